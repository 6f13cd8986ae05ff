"""Messages API (Anthropic): /v1/messages, whole and streamed, and /v1/messages/count_tokens."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from jinfer.engine.output.completion import Chunk, Usage
from jinfer.engine.requests import RequestError
from jinfer.server.anthropic_errors import ANTHROPIC_ERRORS
from jinfer.server.chat import prepare_chat
from jinfer.server.field_checks import TOKEN_FIELDS, reject_fields
from jinfer.server.http_errors import ApiError, as_api_error, unsupported_field
from jinfer.server.http_responses import HttpResponse, StreamedResponse, sse_event
from jinfer.server.ignored_fields import Ignore
from jinfer.server.message_blocks import MessageBlocks
from jinfer.server.message_prompt import chat_request, field_name, with_field_names
from jinfer.server.output_deltas import WholeCallsParser
from jinfer.server.prompt_builder import chat_prompt_ids
from jinfer.server.request_runner import PromptRequests, RequestRunner
from jinfer.server.schemas.messages import (
    ClientTool,
    ConversationFields,
    CountTokensRequest,
    MessagesRequest,
)
from jinfer.server.served_model import ServedModel
from jinfer.server.service import RequestContext
from jinfer.template import TemplateError

_PING = sse_event({"type": "ping"}, "ping")
# Fields of other routes that this API does not support.
_ELSEWHERE = {
    "n_probs": "a message has no log-probabilities",
    **TOKEN_FIELDS,
}


async def create_message(call: RequestContext[MessagesRequest]) -> HttpResponse | StreamedResponse:
    """Handles a message request."""
    body = call.body
    reject_fields(body, **_ELSEWHERE)
    for name in ("n", "best_of"):
        if (getattr(body, name) or 1) > 1:
            raise unsupported_field("a message is one answer", name)
    call.note(user=body.metadata and body.metadata.user_id)
    if body.stream:
        return StreamedResponse(_stream_events(call), failed=_failed)
    async with call.running(_prepare) as (hosted, run), contextlib.aclosing(run.chunks()) as pieces:
        answer = _MessageAnswer(call, hosted, run)
        async for batch in pieces:
            for _, chunk in batch or ():
                answer.push(chunk)
        answer.finish()
        return HttpResponse(answer.message())


async def count_tokens(call: RequestContext[CountTokensRequest]) -> HttpResponse:
    """Counts the tokens of a conversation."""
    async with call.service.models.use(call.body.model) as hosted:
        return HttpResponse(await call.service.in_thread(_count, call, hosted))


def _count(call: RequestContext[CountTokensRequest], hosted: ServedModel) -> dict[str, Any]:
    ignore = _named(call)
    try:
        asked = chat_request(call.body, call.ignore)
        ids = chat_prompt_ids(asked, hosted.session, call.service.settings, ignore)
    except (TemplateError, RequestError) as error:
        raise as_api_error(error, param="messages") from error
    except ApiError as error:
        raise with_field_names(error, call.body) from None
    return {"input_tokens": len(ids)}


def _prepare(call: RequestContext[MessagesRequest], hosted: ServedModel) -> list[PromptRequests]:
    try:
        asked = chat_request(call.body, call.ignore)
        return [prepare_chat(call.service, asked, hosted, _named(call))]
    except ApiError as error:
        raise with_field_names(error, call.body) from error.__cause__


def _named[B: ConversationFields](call: RequestContext[B]) -> Ignore:
    """Reports fields of the chat request by their names in this API."""

    def ignore(field: str, why: str) -> None:
        call.ignore(field_name(field, call.body), why)

    return ignore


def _failed(error: ApiError) -> bytes:
    """Formats an error in the middle of a stream."""
    return sse_event(ANTHROPIC_ERRORS.body(error), "error")


@dataclass
class _MessageAnswer:
    """A message that is being generated."""

    call: RequestContext[MessagesRequest]
    hosted: ServedModel
    run: RequestRunner
    finish_reason: str | None = None
    stop_string: str = ""
    blocks: MessageBlocks = field(default_factory=MessageBlocks)
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")

    def __post_init__(self) -> None:
        (self.job,) = self.run.jobs
        parser = self.job.parsing.parser()
        self._parser = parser if self._eager() else WholeCallsParser(parser)

    def _eager(self) -> bool:
        """Whether calls are streamed as they are written.

        Where nothing binds the model, what begins as a call may turn out to be none, and clients
        would run it: the format has no way to take a block back.
        """
        body = self.call.body
        tools = [one for one in body.tools or () if isinstance(one, ClientTool)]
        bound = body.tool_choice is not None and body.tool_choice.type in ("any", "tool")
        return bool(body.stream) and (bound or any(one.eager_input_streaming for one in tools))

    def push(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Parses a chunk; returns its events."""
        self.run.mark_shown(0, chunk)
        self.finish_reason, self.stop_string = chunk.finish_reason, chunk.stop_string
        return self.blocks.push(self._parser.push(chunk.text))

    def finish(self) -> list[dict[str, Any]]:
        """Parses the end of the answer; returns its events."""
        rest = self._parser.finish(self.finish_reason == "length")
        return [*self.blocks.push(rest), *self.blocks.close()]

    def stop(self) -> dict[str, Any]:
        """Why the answer ended."""
        if self.stop_string:
            reason = "stop_sequence"
        elif self.finish_reason == "length":
            limit = self.job.sampling.params.max_tokens
            full = not self.job.sampling.nothing and (
                limit is None or self.run.usages[0].completion_tokens < limit
            )
            reason = "model_context_window_exceeded" if full else "max_tokens"
        else:
            reason = "tool_use" if self.blocks.called else "end_turn"
        return {"stop_reason": reason, "stop_sequence": self.stop_string or None}

    def message(self) -> dict[str, Any]:
        """The whole message."""
        return self._message(self.blocks.done, self.stop(), self.run.usages[0])

    def start(self) -> dict[str, Any]:
        """The message before its first block."""
        nothing = {"stop_reason": None, "stop_sequence": None}
        return self._message([], nothing, self.run.shown_usage(0))

    def _message(
        self, content: list[dict[str, Any]], stop: dict[str, Any], used: Usage
    ) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.hosted.name}
        return {**head, "content": content, **stop, "usage": token_usage(used)}


def token_usage(used: Usage) -> dict[str, Any]:
    """The usage in Anthropic's format: cached tokens are not among the input tokens."""
    return {
        "input_tokens": used.prompt_tokens - used.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": used.cached_tokens,
        "output_tokens": used.completion_tokens,
    }


async def _stream_events(call: RequestContext[MessagesRequest]) -> AsyncGenerator[bytes]:
    """The server-sent events of a stream."""

    def named(one: dict[str, Any]) -> bytes:
        return sse_event(one, one["type"])

    async with call.running(_prepare) as (hosted, run), contextlib.aclosing(run.chunks()) as pieces:
        answer = _MessageAnswer(call, hosted, run)
        begun, sent = False, time.monotonic()
        async for batch in pieces:
            events: list[bytes] = []
            # The first batch, None, comes before it is known what of the prompt is cached.
            if batch is not None and not begun:
                begun = True
                events.append(named({"type": "message_start", "message": answer.start()}))
            for _, chunk in batch or ():
                events += map(named, answer.push(chunk))
            # A call that is held back until it is whole is a silence, too.
            if batch is not None and not events and time.monotonic() - sent >= run.ping:
                events.append(_PING)
            sent = time.monotonic() if events else sent
            yield b"".join(events)
        events = list(map(named, answer.finish()))
        end = {"type": "message_delta", "delta": answer.stop(), "usage": token_usage(run.usages[0])}
        yield b"".join([*events, named(end), named({"type": "message_stop"})])
