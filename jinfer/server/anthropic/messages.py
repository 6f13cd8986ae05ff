"""Messages API (Anthropic): /v1/messages, whole and streamed, and /v1/messages/count_tokens."""

from __future__ import annotations

import contextlib
import hashlib
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import orjson

from jinfer.engine.output.completion import Chunk, Usage
from jinfer.server.anthropic.anthropic_schemas import (
    ClientTool,
    ConversationFields,
    CountTokensRequest,
    MessageErrorResponse,
    MessageObject,
    MessagesRequest,
)
from jinfer.server.anthropic.anthropic_to_chat import chat_request, field_name
from jinfer.server.core.chat_schemas import ChatRequest, TokenCount
from jinfer.server.core.endpoint import Routes
from jinfer.server.core.prepare_chat import field_names, ignore_as, prepare_chat
from jinfer.server.core.prompt_builder import build_chat_prompt
from jinfer.server.core.prompt_requests import PromptRequests
from jinfer.server.core.request_runner import RequestRunner
from jinfer.server.core.sampling_fields import TOKEN_FIELDS, reject_fields
from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_errors import ApiError, ErrorFormat, unsupported_field
from jinfer.server.http.http_responses import (
    SSE_MEDIA_TYPE,
    HttpResponse,
    StreamedResponse,
    sse_event,
)
from jinfer.server.http.request_body import Ignore
from jinfer.server.models.served_model import ServedModel
from jinfer.server.tool_parsers.output_deltas import OutputDelta, ToolCallDelta, WholeCallsParser

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def _status(error: ApiError) -> int:
    if error.code == "deadline_exceeded":
        return 504
    return {501: 400, 503: 529}.get(error.status, error.status)


def _body(error: ApiError) -> dict[str, Any]:
    """Return the JSON body; the message names the field, as the format has no key for it."""
    message, field = error.message, error.param
    if field is not None and not message.startswith(f"{field}:"):
        message = f"{field}: {message}"
    kind = _TYPES.get(_status(error), "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


ANTHROPIC_ERRORS = ErrorFormat(
    _body,
    MessageErrorResponse,
    _status,
    (("504", "the time limit was exceeded"), ("529", "the server is starting or shutting down")),
)
routes = Routes(tag="Anthropic", errors=ANTHROPIC_ERRORS)


Kind = Literal["text", "thinking", "tool_use"]


@dataclass
class _OpenBlock:
    """The block that is being streamed."""

    kind: Kind
    index: int
    call: ToolCallDelta | None
    text: str = ""

    def start(self) -> dict[str, Any]:
        """Return the block without content."""
        if self.call is not None:
            return {"type": self.kind, "id": self.call.id, "name": self.call.name, "input": {}}
        if self.kind == "thinking":
            return {"type": self.kind, "thinking": "", "signature": ""}
        return {"type": self.kind, "text": ""}

    def delta(self, text: str) -> dict[str, Any]:
        """Return an event's delta with more content."""
        match self.kind:
            case "text":
                return {"type": "text_delta", "text": text}
            case "thinking":
                return {"type": "thinking_delta", "thinking": text}
        return {"type": "input_json_delta", "partial_json": text}

    def block(self) -> dict[str, Any]:
        """Return the whole block."""
        match self.kind:
            case "text":
                return {"type": "text", "text": self.text}
            case "thinking":
                return {"type": "thinking", "thinking": self.text, "signature": self.signature()}
        return {**self.start(), "input": _arguments(self.text)}

    def signature(self) -> str:
        """Return a signature, as clients drop thoughts without it; it is never checked."""
        return hashlib.blake2b(self.text.encode("utf-8", "replace"), digest_size=16).hexdigest()


def _arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a call; {} if the token limit cut them."""
    try:
        arguments = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


@dataclass
class MessageBlocks:
    """Collects the content blocks of a message.

    Attributes:
        done: complete blocks.
        called: whether a block is a complete tool call.
    """

    done: list[dict[str, Any]] = field(default_factory=list)
    called: bool = False
    _open: _OpenBlock | None = None

    def push(self, delta: OutputDelta) -> list[dict[str, Any]]:
        """Return the events of a parsed delta."""
        going = [tool_call for tool_call in delta.calls if self._continues(tool_call)]
        events = [event for call in going for event in self._call(call)]
        if delta.reasoning:
            events += self._grow("thinking", delta.reasoning)
        if delta.content:
            events += self._grow("text", delta.content)
        rest = [call for call in delta.calls if call not in going]
        return [*events, *(event for call in rest for event in self._call(call))]

    def close(self) -> list[dict[str, Any]]:
        """End the open block."""
        opened, self._open = self._open, None
        if opened is None:
            return []
        self.done.append(opened.block())
        events: list[dict[str, Any]] = []
        if opened.kind == "thinking":
            signed = {"type": "signature_delta", "signature": opened.signature()}
            events.append({"type": "content_block_delta", "index": opened.index, "delta": signed})
        return [*events, {"type": "content_block_stop", "index": opened.index}]

    def _continues(self, call: ToolCallDelta) -> bool:
        known = None if self._open is None else self._open.call
        return known is not None and known.index == call.index

    def _call(self, call: ToolCallDelta) -> list[dict[str, Any]]:
        if call.end == "void" and not self._continues(call):
            return []
        events = self._grow("tool_use", call.arguments, call)
        self.called |= call.end == "done"
        return [*events, *(self.close() if call.end else [])]

    def _grow(
        self, kind: Kind, text: str, call: ToolCallDelta | None = None
    ) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        same = self._open is not None and self._open.kind == kind
        if not same or (call is not None and not self._continues(call)):
            events += self.close()
            self._open = _OpenBlock(kind, len(self.done), call)
            begun = {"index": self._open.index, "content_block": self._open.start()}
            events.append({"type": "content_block_start", **begun})
        current = self._open
        assert current is not None, "a block is open"
        current.text += text
        if text:
            more = {"index": current.index, "delta": current.delta(text)}
            events.append({"type": "content_block_delta", **more})
        return events


_PING = sse_event({"type": "ping"}, "ping")
# Fields of other routes that this API does not support.
_ELSEWHERE = {
    "n_probs": "a message has no log-probabilities",
    **TOKEN_FIELDS,
}


@routes.add("POST /v1/messages", MessageObject, stream=SSE_MEDIA_TYPE)
async def create_message(
    request: RequestContext[MessagesRequest],
) -> HttpResponse | StreamedResponse:
    """Answer a conversation."""
    body = request.body
    reject_fields(body, **_ELSEWHERE)
    for name in ("n", "best_of"):
        if (getattr(body, name) or 1) > 1:
            raise unsupported_field("a message is a single answer", name)
    request.note(user=body.metadata and body.metadata.user_id)
    if body.stream:
        return StreamedResponse(_stream_events(request), failed=_failed)
    async with request.streaming(_prepare) as (model, run, pieces):
        answer = _MessageFormatter(request, model, run)
        async for batch in pieces:
            for _, chunk in batch or ():
                answer.push(chunk)
        answer.finish()
        return HttpResponse(answer.message())


@routes.add("POST /v1/messages/count_tokens", TokenCount)
async def count_tokens(request: RequestContext[CountTokensRequest]) -> HttpResponse:
    """Count the tokens of a conversation."""
    async with request.service.models.use(request.body.model) as model:
        return HttpResponse(await request.service.in_thread(_count, request, model))


def _count(request: RequestContext[CountTokensRequest], model: ServedModel) -> dict[str, Any]:
    with _translated(request) as (chat, ignore):
        prompt = build_chat_prompt(chat, model.session, request.service.settings, ignore)
        return {"input_tokens": len(prompt.ids())}


def _prepare(request: RequestContext[MessagesRequest], model: ServedModel) -> list[PromptRequests]:
    with _translated(request) as (chat, ignore):
        return [prepare_chat(chat, model, request.service.settings, ignore)]


@contextlib.contextmanager
def _translated[B: ConversationFields](
    request: RequestContext[B],
) -> Iterator[tuple[ChatRequest, Ignore]]:
    """Translate the request to a chat request, and field names in errors back."""
    name_of = partial(field_name, body=request.body)
    with field_names(name_of):
        yield chat_request(request.body, request.ignore), ignore_as(request.ignore, name_of)


def _failed(error: ApiError) -> bytes:
    """Format an error in the middle of a stream."""
    return sse_event(ANTHROPIC_ERRORS.body(error), "error")


@dataclass
class _MessageFormatter:
    """Formats a message while it is generated."""

    request: RequestContext[MessagesRequest]
    model: ServedModel
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
        """Return whether to stream incomplete tool calls.

        Without a forced call, the beginning of a call may turn out to be text, and clients would
        run it: the format cannot revoke a block.
        """
        body = self.request.body
        tools = [tool for tool in body.tools or () if isinstance(tool, ClientTool)]
        bound = body.tool_choice is not None and body.tool_choice.type in ("any", "tool")
        return bool(body.stream) and (bound or any(tool.eager_input_streaming for tool in tools))

    def push(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Parse a chunk; return its events."""
        self.run.mark_shown(0, chunk)
        self.finish_reason, self.stop_string = chunk.finish_reason, chunk.stop_string
        return self.blocks.push(self._parser.push(chunk.text))

    def finish(self) -> list[dict[str, Any]]:
        """Parse the end of the answer; return its events."""
        rest = self._parser.finish(self.finish_reason == "length")
        return [*self.blocks.push(rest), *self.blocks.close()]

    def stop(self) -> dict[str, Any]:
        """Return the stop reason."""
        if self.stop_string:
            reason = "stop_sequence"
        elif self.finish_reason == "length":
            limit = self.job.options.params.max_tokens
            full = not self.job.options.nothing and (
                limit is None or self.run.usages[0].completion_tokens < limit
            )
            reason = "model_context_window_exceeded" if full else "max_tokens"
        else:
            reason = "tool_use" if self.blocks.called else "end_turn"
        return {"stop_reason": reason, "stop_sequence": self.stop_string or None}

    def message(self) -> dict[str, Any]:
        """Return the whole message."""
        return self._message(self.blocks.done, self.stop(), self.run.usages[0])

    def start(self) -> dict[str, Any]:
        """Return the message before its first block."""
        nothing = {"stop_reason": None, "stop_sequence": None}
        return self._message([], nothing, self.run.shown_usage(0))

    def _message(
        self, content: list[dict[str, Any]], stop: dict[str, Any], used: Usage
    ) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model.name}
        return {**head, "content": content, **stop, "usage": token_usage(used)}


def token_usage(used: Usage) -> dict[str, Any]:
    """Convert the usage to Anthropic's format: input tokens exclude cached tokens."""
    return {
        "input_tokens": used.prompt_tokens - used.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": used.cached_tokens,
        "output_tokens": used.completion_tokens,
    }


async def _stream_events(request: RequestContext[MessagesRequest]) -> AsyncGenerator[bytes]:
    """Yield the server-sent events of a stream."""

    def named(event: dict[str, Any]) -> bytes:
        return sse_event(event, event["type"])

    async with request.streaming(_prepare) as (model, run, pieces):
        answer = _MessageFormatter(request, model, run)
        begun, sent = False, time.monotonic()
        async for batch in pieces:
            events: list[bytes] = []
            # The number of cached tokens is unknown at the first batch, None.
            if batch is not None and not begun:
                begun = True
                events.append(named({"type": "message_start", "message": answer.start()}))
            for _, chunk in batch or ():
                events += map(named, answer.push(chunk))
            # A call that is held back is silence for the client.
            if batch is not None and not events and time.monotonic() - sent >= run.ping:
                events.append(_PING)
            sent = time.monotonic() if events else sent
            yield b"".join(events)
        events = list(map(named, answer.finish()))
        end = {"type": "message_delta", "delta": answer.stop(), "usage": token_usage(run.usages[0])}
        yield b"".join([*events, named(end), named({"type": "message_stop"})])
