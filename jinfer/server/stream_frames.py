"""Streaming helpers: checks, chunk objects and final events shared by the OpenAI routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinfer.engine.output.generation import Usage
from jinfer.server import usage
from jinfer.server.http_errors import invalid, unsupported
from jinfer.server.http_responses import PING, event
from jinfer.server.request_runner import Job, Run
from jinfer.server.schemas.sampling_fields import SamplingFields
from jinfer.server.schemas.schema_base import StreamOptions


def check_stream(body: SamplingFields, stream: bool | None, options: StreamOptions | None) -> None:
    """Raises `ApiError` if stream options are given without a stream, or are invalid."""
    if stream:
        if body.best_of is not None and body.best_of > (body.n or 1):
            raise invalid("the best of several answers is known only at the end", "best_of")
        return
    if options is not None:
        raise invalid("it needs stream: true", "stream_options")
    for name in ("timings_per_token", "return_progress"):
        if getattr(body, name):
            raise invalid("it needs stream: true", name)


def refuse(body: SamplingFields, **reasons: str) -> None:
    """Raises `ApiError`, with the reason, if a field is set that a route does not support."""
    for name, reason in reasons.items():
        if getattr(body, name):
            raise unsupported(reason, name)


def framed(
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


def choice(
    index: int, content: Mapping[str, Any], reason: str | None, more: Mapping[str, Any]
) -> dict[str, Any]:
    """One entry of a chunk's `choices`."""
    return {"index": index, **content, "logprobs": None, "finish_reason": reason, **more}


def so_far(job: Job, options: StreamOptions | None, used: Usage) -> dict[str, Any]:
    """The usage and timings of a chunk, if requested."""
    result: dict[str, Any] = {}
    if options is not None and options.continuous_usage_stats:
        result["usage"] = usage.usage([job], {0: used})
    if job.asked.timings:
        result["timings"] = usage.timings(used)
    return result


def sent(events: Sequence[bytes], batch: Sequence[Any] | None) -> bytes:
    """The bytes for a batch of `RequestRunner.chunks`; a ping if nothing came for some time."""
    return b"".join(events) or (PING if batch is not None and not batch else b"")


def ended(
    options: StreamOptions | None, frame: dict[str, Any], jobs: Sequence[Job], run: Run
) -> bytes:
    """The final event: the usage, if requested, and llama.cpp's timings."""
    if options is None or not options.include_usage:
        return b""
    tokens = usage.usage(jobs, run.usages)
    return event({**frame, "usage": tokens, "timings": usage.timings(run.usages[0])})
