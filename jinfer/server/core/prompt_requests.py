"""Prompt requests: a tokenized prompt and its engine requests, checked against the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jinfer.api.image_inputs import EncodedPrompt
from jinfer.api.session import PreparedRequest, Session
from jinfer.engine.requests import RequestError
from jinfer.sampling.request_errors import ConstraintError
from jinfer.server.core.request_params import RequestOptions
from jinfer.server.http.http_errors import as_api_error, context_exceeded, invalid_request
from jinfer.server.tool_parsers.output_deltas import PLAIN_TEXT, OutputParsing


@dataclass(frozen=True)
class PromptRequests:
    """A prompt and its engine requests, one for each answer.

    Attributes:
        ids: the prompt.
        options: the request's sampling parameters and other options.
        engine_requests: an engine request for each answer.
        parsing: how the answers are parsed.
    """

    ids: list[int]
    options: RequestOptions
    engine_requests: list[PreparedRequest]
    parsing: OutputParsing


def prepare_prompt(
    session: Session,
    prompt: list[int] | EncodedPrompt,
    options: RequestOptions,
    *,
    param: str,
    timeout: float | None = None,
    parsing: OutputParsing = PLAIN_TEXT,
) -> PromptRequests:
    """Validate a prompt and make its engine requests. Slow: call it in a worker thread.

    Args:
        param: the request field of the prompt, for errors.
        timeout: seconds until the request is cancelled.
        parsing: how the answers are parsed.

    Raises:
        ApiError: the request cannot be run.
    """
    whole = prompt if isinstance(prompt, EncodedPrompt) else EncodedPrompt(prompt)
    fits = session.opened.context - 1
    ids = truncate_prompt(whole.ids, options.truncate, fits, first=options.first)
    if whole.images and len(ids) < len(whole):
        raise invalid_request("a prompt with images is not truncated", "truncate_prompt_tokens")
    limits = [item for item in (timeout, options.seconds) if item is not None]
    context = session.opened.context
    if len(ids) >= context:
        # A prompt that fills the context leaves no room for an answer.
        advice = "shorten it, set truncate_prompt_tokens, or serve with a larger --ctx-size"
        raise context_exceeded("the prompt", len(ids), context, advice, param)
    if not ids and not session.engine.runner.model.has_cross_attention:
        raise invalid_request("the prompt is empty; give at least one token", param)
    try:
        prepared = session.prepare(
            ids,
            options.params,
            adapter=options.adapter,
            priority=options.priority,
            timeout=min(limits, default=None),
            images=whole.images,
        )
    except (RequestError, ConstraintError) as error:
        raise as_api_error(error, param=field_of_error(error, options) or param) from error
    shown = parsing.shown_tokens
    prepared = [
        replace(
            prepared_request,
            request=replace(r, reuse=options.reuse and r.reuse, shown=shown, slot=options.slot),
        )
        for prepared_request in prepared
        for r in [prepared_request.request]
    ]
    return PromptRequests(ids, options, prepared, parsing)


def check_captured_bytes(jobs: Sequence[PromptRequests], max_bytes: int) -> None:
    """Raise `ApiError` if the answers to some prompts capture more than `max_bytes`."""
    requests = [prepared.request for job in jobs for prepared in job.engine_requests]
    uses = ((request.activations, request.limit - 1) for request in requests)
    total = sum(use.bytes_of_token * tokens for use, tokens in uses if use is not None)
    if total > max_bytes:
        raise invalid_request(
            f"{total} bytes of activations would be captured; a request may capture "
            f"{max_bytes}: capture fewer, set max_tokens, or serve with a larger "
            "--inspection-bytes",
            "capture",
        )


def field_of_error(error: Exception, options: RequestOptions) -> str | None:
    """Return the request field of an error, which begins with the engine's name for it."""
    return options.names.get(str(error).split(" ", 1)[0].rstrip(":"))


def truncate_prompt(
    ids: list[int], limit: int | None, fits: int, *, first: bool = False
) -> list[int]:
    """Truncate a prompt to its last or first tokens, if requested. Raises `ApiError`."""
    if limit is None:
        return ids
    if limit < -1 or limit == 0:
        raise invalid_request("it must be -1 or at least 1", "truncate_prompt_tokens")
    count = fits if limit == -1 else limit
    return ids[:count] if first else ids[-count:]
