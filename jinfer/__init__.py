"""jinfer: a compiled inference engine for transformers; a model is a TOML file."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinfer.api.async_llm import AsyncLLM
    from jinfer.api.llm import LLM
    from jinfer.api.user_errors import USER_ERRORS
    from jinfer.engine.output.completion import Chunk, Completion, TokenLogprob, Usage
    from jinfer.engine.requests import EngineError, NotFiniteError, RequestError
    from jinfer.loader.adapters.control_vectors import read_control_vector
    from jinfer.sampling.activation_edits import Edit, Steer
    from jinfer.sampling.sampling_params import SamplingParams

    __version__: str

# A name is imported when it is first asked for: what imports a part of jinfer, as the command line
# does to show its help, need not wait for JAX.
_HOMES = {
    "LLM": "jinfer.api.llm",
    "USER_ERRORS": "jinfer.api.user_errors",
    "AsyncLLM": "jinfer.api.async_llm",
    "Chunk": "jinfer.engine.output.completion",
    "Completion": "jinfer.engine.output.completion",
    "Edit": "jinfer.sampling.activation_edits",
    "EngineError": "jinfer.engine.requests",
    "NotFiniteError": "jinfer.engine.requests",
    "RequestError": "jinfer.engine.requests",
    "SamplingParams": "jinfer.sampling.sampling_params",
    "Steer": "jinfer.sampling.activation_edits",
    "TokenLogprob": "jinfer.engine.output.completion",
    "Usage": "jinfer.engine.output.completion",
    "__version__": "jinfer.version",
    "read_control_vector": "jinfer.loader.adapters.control_vectors",
}

__all__ = [
    "LLM",
    "USER_ERRORS",
    "AsyncLLM",
    "Chunk",
    "Completion",
    "Edit",
    "EngineError",
    "NotFiniteError",
    "RequestError",
    "SamplingParams",
    "Steer",
    "TokenLogprob",
    "Usage",
    "__version__",
    "read_control_vector",
]

if not TYPE_CHECKING:  # a type checker would take any name for one that is there

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'jinfer' has no attribute {name!r}")
        from jinfer.startup import gc_spared

        with gc_spared():
            value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES})
