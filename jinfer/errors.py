"""Every error that a user can mend: one line each, shown without a traceback."""

from jinfer.checkpoint import CheckpointError
from jinfer.engine.requests import EngineError, RequestError
from jinfer.guard.limits import LimitError
from jinfer.opening.sources import SourceError
from jinfer.ops.switches import SwitchError
from jinfer.sampling.errors import ConstraintError
from jinfer.spec.errors import SpecError
from jinfer.template import TemplateError
from jinfer.tokenizer import TokenizerError
from jinfer.weights.load import LoadError

USER_ERRORS = (
    CheckpointError,
    EngineError,
    ConstraintError,
    LimitError,
    LoadError,
    RequestError,
    SourceError,
    SpecError,
    SwitchError,
    TemplateError,
    TokenizerError,
)
