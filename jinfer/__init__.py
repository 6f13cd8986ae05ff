"""jinfer: a compiled inference engine for transformers; a model is a TOML file."""

from jinfer.engine.collector import paused

with paused():
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
