"""jinfer: a compiled inference engine for transformers; a model is a TOML file."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinfer.async_llm import AsyncLLM
    from jinfer.engine.generation import Chunk, Completion, TokenLogprob, Usage
    from jinfer.engine.requests import EngineError, RequestError
    from jinfer.errors import USER_ERRORS
    from jinfer.llm import LLM
    from jinfer.sampling.params import SamplingParams

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
]

# Imported when they are first asked for: JAX takes a second, in which a command line has checked
# its flags, and can be interrupted.
_HOMES = {
    "LLM": "llm",
    "USER_ERRORS": "errors",
    "AsyncLLM": "async_llm",
    "Chunk": "engine.generation",
    "Completion": "engine.generation",
    "EngineError": "engine.requests",
    "RequestError": "engine.requests",
    "SamplingParams": "sampling.params",
    "TokenLogprob": "engine.generation",
    "Usage": "engine.generation",
}

if not TYPE_CHECKING:  # mypy would take any name for one of them

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'jinfer' has no attribute {name!r}")
        from jinfer.engine.collector import paused

        with paused():
            globals()[name] = getattr(import_module(f"jinfer.{_HOMES[name]}"), name)
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
