"""User errors: all exceptions that a user can fix, with messages of one line."""

from jinfer.engine.requests import EngineError, RequestError
from jinfer.loader.checkpoint import CheckpointError
from jinfer.loader.config.source_errors import SourceError
from jinfer.loader.weights.tensor_mapping import LoadError
from jinfer.modelspec.spec_errors import SpecError
from jinfer.ops.disable_kernels import SwitchError
from jinfer.sampling.request_errors import ConstraintError
from jinfer.sandbox.process_limits import ProcessLimitError
from jinfer.template import TemplateError
from jinfer.tokenizer import TokenizerError

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
