"""OpenAI response: common format of chat and text completions, whole and streamed (SSE)."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jinfer.api.forward_results import prompt_logprobs
from jinfer.api.session import Session
from jinfer.engine.output.completion import Chunk, Completion, TokenLogprob, Usage
from jinfer.sampling.param_types import MAX_LOGPROBS
from jinfer.server.core import usage
from jinfer.server.core.prompt_requests import PromptRequests
from jinfer.server.core.request_runner import RequestRunner
from jinfer.server.core.service import Prepare, RequestContext
from jinfer.server.http.http_errors import invalid_request, unsupported_field
from jinfer.server.http.http_responses import SSE_DONE, batch_bytes, sse_event
from jinfer.server.llamacpp.llamacpp_response import llamacpp_response
from jinfer.server.models.served_model import ServedModel
from jinfer.version import __version__


def score_prompt(session: Session, ids: Sequence[int], top: int) -> list[TokenLogprob]:
    """Compute the log-probabilities of a prompt; see `prompt_logprobs`. Slow.

    Raises:
        ApiError: `top` is out of range, or the model is an encoder-decoder.
    """
    if not 0 <= top <= MAX_LOGPROBS:
        raise invalid_request(f"it must be from 0 to {MAX_LOGPROBS}", "prompt_logprobs")
    if session.engine.runner.model.has_cross_attention:
        raise unsupported_field("tokens of an encoder have no probabilities", "echo")
    return prompt_logprobs(session, ids, top)


@dataclass
class OpenAIFormatter(ABC):
    """Formats the answers to a completion request.

    Attributes:
        prefix: prefix of the id.
        kind: `object` of a whole response.
        chunk_kind: `object` of a streamed chunk.
        nothing: content of an empty chunk.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    nothing: ClassVar[Mapping[str, Any]]

    request: RequestContext[Any]
    model: ServedModel
    run: RequestRunner
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"

    @abstractmethod
    def events(self, index: int, piece: Chunk) -> list[dict[str, Any]]:
        """Return the events of an engine chunk."""

    def body(self, choices: list[dict[str, Any]], first: Usage) -> dict[str, Any]:
        """Return the whole response; `first` is the usage of the first answer."""
        return self._frame(self.kind, choices) | self._totals(first)

    def verbose(self, index: int, job: PromptRequests, answer: Completion) -> dict[str, Any]:
        """Return the answer in llama.cpp's format, if requested."""
        if not self.request.body.verbose:
            return {}
        return {"__verbose": llamacpp_response(self.model, job, answer, index)}

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head: dict[str, Any] = {"id": self.id, "object": kind, "created": self.created}
        head["system_fingerprint"] = f"jinfer-{__version__}"
        return {**head, "model": self.model.name, "choices": choices}

    def _totals(self, first: Usage) -> dict[str, Any]:
        tokens = usage.usage(self.run.jobs, self.run.usages)
        return {"usage": tokens, "timings": usage.llamacpp_timings(first)}

    def _chunks(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a streamed chunk; with `include_usage`, each has the key `usage`."""
        options = self.request.body.stream_options
        with_usage = options is not None and options.include_usage
        return self._frame(self.chunk_kind, choices) | ({"usage": None} if with_usage else {})

    def chunk(
        self, index: int, content: Mapping[str, Any], reason: str | None = None, **more: Any
    ) -> dict[str, Any]:
        """Return a streamed chunk of a choice, with usage and timings if requested."""
        choice = {"index": index, **content, "logprobs": None, "finish_reason": reason, **more}
        job, used = self.run.job(index), self.run.shown_usage(index)
        result = self._chunks([choice])
        options = self.request.body.stream_options
        if options is not None and options.continuous_usage_stats:
            result["usage"] = usage.usage([job], {0: used})
        if job.options.timings and "role" not in content.get("delta", ()):
            result["timings"] = usage.llamacpp_timings(used)
        return result

    def progress(self, *, first: bool) -> list[bytes]:
        """Return prefill progress events, if requested; see `RequestRunner.progress`."""
        if not self.request.body.return_progress:
            return []
        return [
            sse_event({**self.chunk(index, self.nothing), "prompt_progress": known})
            for index, known in self.run.progress(first=first)
        ]

    def last_event(self) -> bytes:
        """Return the final event: the usage, if requested, and llama.cpp's timings."""
        frame = self._chunks([])
        return sse_event(frame | self._totals(self.run.usages[0])) if "usage" in frame else b""


async def stream_answer(
    request: RequestContext[Any], prepare: Prepare, kind: type[OpenAIFormatter]
) -> AsyncGenerator[bytes]:
    """Yield the server-sent events of a streamed answer."""
    async with request.streaming(prepare) as (model, run, pieces):
        answer = kind(request, model, run)
        async for batch in pieces:
            events = answer.progress(first=batch != [])
            for index, piece in batch or ():
                events += map(sse_event, answer.events(index, piece))
            yield batch_bytes(events, batch)
        yield answer.last_event()
        yield SSE_DONE
