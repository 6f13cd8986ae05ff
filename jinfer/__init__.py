"""jinfer: a compiled inference engine for transformers; a model is a TOML file."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinfer.async_llm import AsyncLLM
    from jinfer.engine.generation import Chunk, Completion, TokenLogprob, Usage
    from jinfer.engine.requests import EngineError, RequestError
    from jinfer.errors import USER_ERRORS
    from jinfer.llm import LLM
    from jinfer.sampling.params import SamplingParams

    __version__: str

# A name is imported when it is first asked for: what imports a part of jinfer, as the command line
# does to show its help, need not wait for JAX.
_HOMES = {
    "LLM": "jinfer.llm",
    "USER_ERRORS": "jinfer.errors",
    "AsyncLLM": "jinfer.async_llm",
    "Chunk": "jinfer.engine.generation",
    "Completion": "jinfer.engine.generation",
    "EngineError": "jinfer.engine.requests",
    "RequestError": "jinfer.engine.requests",
    "SamplingParams": "jinfer.sampling.params",
    "TokenLogprob": "jinfer.engine.generation",
    "Usage": "jinfer.engine.generation",
    "__version__": "jinfer.version",
}

__all__ = [
    "LLM",
    "USER_ERRORS",
    "AsyncLLM",
    "Chunk",
    "Completion",
    "EngineError",
    "RequestError",
    "SamplingParams",
    "TokenLogprob",
    "Usage",
    "__version__",
]

if not TYPE_CHECKING:  # a type checker would take any name for one that is there

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'jinfer' has no attribute {name!r}")
        from jinfer.xla.undisturbed import paused

        with paused():
            value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES})
