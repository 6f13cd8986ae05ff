"""Every error that a user can mend: one line each, shown without a traceback."""

from jinfer.checkpoint import CheckpointError
from jinfer.generation import RequestError
from jinfer.load import LoadError
from jinfer.sources import SourceError
from jinfer.spec.errors import SpecError
from jinfer.template import TemplateError
from jinfer.tokenizer import TokenizerError

USER_ERRORS = (
    CheckpointError,
    LoadError,
    RequestError,
    SourceError,
    SpecError,
    TemplateError,
    TokenizerError,
)
