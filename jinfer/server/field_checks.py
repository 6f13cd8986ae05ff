"""Checks of request fields: those that need a stream, and those that a route does not have."""

from __future__ import annotations

from pydantic import BaseModel

from jinfer.server.http_errors import invalid_request, unsupported_field
from jinfer.server.ignored_fields import Ignore
from jinfer.server.schemas.sampling_fields import SamplingFields
from jinfer.server.schemas.schema_base import StreamOptions


def ignore_verbose(body: SamplingFields, stream: bool | None, ignore: Ignore) -> None:
    """Reports `verbose` where it changes nothing."""
    if body.verbose and stream:
        ignore("verbose", "only whole answers are given in llama.cpp's format, too")


def check_stream(body: SamplingFields, stream: bool | None, options: StreamOptions | None) -> None:
    """Raises `ApiError` if stream options are given without a stream, or are invalid."""
    if stream:
        if body.capture:
            raise unsupported_field("activations are not streamed", "capture")
        if body.best_of is not None and body.best_of > (body.n or 1):
            raise invalid_request("the best of several answers is known only at the end", "best_of")
        return
    if body.capture_format is not None and not body.capture:
        raise invalid_request("it needs capture", "capture_format")
    if options is not None:
        raise invalid_request("it needs stream: true", "stream_options")
    for name in ("timings_per_token", "return_progress"):
        if getattr(body, name):
            raise invalid_request("it needs stream: true", name)


NO_CAPTURE = "activations are given by /v1/completions and /v1/chat/completions"

# Fields about tokens, for which answers in parts (messages, responses) have no place.
TOKEN_FIELDS = {
    "prompt_logprobs": "they are given by /v1/completions",
    "return_token_ids": "no ids are given here",
    "timings_per_token": "no timings are given here",
    "return_progress": "nothing is told of the prompt here",
    "capture": NO_CAPTURE,
}


def reject_fields(body: BaseModel, **reasons: str) -> None:
    """Raises `ApiError`, with the reason, if a field is set that a route does not support."""
    for name, reason in reasons.items():
        if getattr(body, name):
            raise unsupported_field(reason, name)
