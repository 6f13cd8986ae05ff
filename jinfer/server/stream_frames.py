"""Streaming helpers: checks, chunk objects and final events shared by the OpenAI routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinfer.engine.output.generation import Usage
from jinfer.server import usage
from jinfer.server.http_errors import invalid_request, unsupported_field
from jinfer.server.http_responses import SSE_PING, sse_event
from jinfer.server.request_runner import PromptRequests, RequestRunner
from jinfer.server.schemas.sampling_fields import SamplingFields
from jinfer.server.schemas.schema_base import StreamOptions


def check_stream(body: SamplingFields, stream: bool | None, options: StreamOptions | None) -> None:
    """Raises `ApiError` if stream options are given without a stream, or are invalid."""
    if stream:
        if body.best_of is not None and body.best_of > (body.n or 1):
            raise invalid_request("the best of several answers is known only at the end", "best_of")
        return
    if options is not None:
        raise invalid_request("it needs stream: true", "stream_options")
    for name in ("timings_per_token", "return_progress"):
        if getattr(body, name):
            raise invalid_request("it needs stream: true", name)


def reject_fields(body: SamplingFields, **reasons: str) -> None:
    """Raises `ApiError`, with the reason, if a field is set that a route does not support."""
    for name, reason in reasons.items():
        if getattr(body, name):
            raise unsupported_field(reason, name)


def chunk_object(
    id: str,
    kind: str,
    created: int,
    model: str,
    options: StreamOptions | None,
    choices: list[dict[str, Any]],
) -> dict[str, Any]:
    """A streamed chunk object; with `include_usage`, all chunks have the key `usage`."""
    data = {
        "id": id,
        "object": kind,
        "created": created,
        "model": model,
        "choices": choices,
    }
    return data | {"usage": None} if options is not None and options.include_usage else data


def chunk_choice(
    index: int, content: Mapping[str, Any], reason: str | None, more: Mapping[str, Any]
) -> dict[str, Any]:
    """One entry of a chunk's `choices`."""
    return {"index": index, **content, "logprobs": None, "finish_reason": reason, **more}


def chunk_usage(job: PromptRequests, options: StreamOptions | None, used: Usage) -> dict[str, Any]:
    """The usage and timings of a chunk, if requested."""
    result: dict[str, Any] = {}
    if options is not None and options.continuous_usage_stats:
        result["usage"] = usage.usage([job], {0: used})
    if job.sampling.timings:
        result["timings"] = usage.llamacpp_timings(used)
    return result


def batch_bytes(events: Sequence[bytes], batch: Sequence[Any] | None) -> bytes:
    """The bytes for a batch of `RequestRunner.chunks`; a ping if nothing came for some time."""
    return b"".join(events) or (SSE_PING if batch is not None and not batch else b"")


def final_event(
    options: StreamOptions | None,
    frame: dict[str, Any],
    jobs: Sequence[PromptRequests],
    run: RequestRunner,
) -> bytes:
    """The final event: the usage, if requested, and llama.cpp's timings."""
    if options is None or not options.include_usage:
        return b""
    tokens = usage.usage(jobs, run.usages)
    return sse_event({**frame, "usage": tokens, "timings": usage.llamacpp_timings(run.usages[0])})
