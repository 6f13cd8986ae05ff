"""User errors: all exceptions that a user can fix, with messages of one line."""

from jinfer.checkpoint import CheckpointError
from jinfer.engine.requests import EngineError, RequestError
from jinfer.modelspec.spec_errors import SpecError
from jinfer.opening.sources import SourceError
from jinfer.ops.disable_kernels import SwitchError
from jinfer.sampling.request_errors import ConstraintError
from jinfer.sandbox.process_limits import ProcessLimitError
from jinfer.template import TemplateError
from jinfer.tokenizer import TokenizerError
from jinfer.weights.tensor_mapping import LoadError

USER_ERRORS = (
    CheckpointError,
    EngineError,
    ConstraintError,
    ProcessLimitError,
    LoadError,
    RequestError,
    SourceError,
    SpecError,
    SwitchError,
    TemplateError,
    TokenizerError,
)
