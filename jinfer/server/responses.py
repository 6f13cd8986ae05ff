"""Responses API: /v1/responses, whole and streamed (server-sent events)."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jinfer.engine.output.generation import Chunk
from jinfer.server import usage
from jinfer.server.chat import prepare_chat
from jinfer.server.field_checks import TOKEN_FIELDS, reject_fields
from jinfer.server.http_errors import ApiError, invalid_request, unsupported_field
from jinfer.server.http_responses import HttpResponse, StreamedResponse, batch_bytes, sse_event
from jinfer.server.model_manager import ServedModel
from jinfer.server.output_deltas import WholeCallsParser
from jinfer.server.prompt_builder import parse_arguments
from jinfer.server.request_body import validated
from jinfer.server.request_runner import PromptRequests, RequestRunner
from jinfer.server.response_items import ResponseItems
from jinfer.server.schemas.chat import ChatRequest
from jinfer.server.schemas.responses import (
    LOGPROBS,
    FunctionTool,
    InputItem,
    InputPart,
    ResponseRequest,
)
from jinfer.server.schemas.sampling_fields import SamplingFields
from jinfer.server.service import RequestContext

# Chat completion field -> its name in the Responses API.
_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "json_schema": "text.format.schema",
    "reasoning_effort": "reasoning.effort",
}


# Fields of other routes that this API does not support.
_ELSEWHERE: Mapping[str, str] = {
    "response_format": "text.format says it",
    "n_probs": f"log-probabilities are given with include: [{LOGPROBS}]",
    **TOKEN_FIELDS,
}


async def create_response(call: RequestContext[ResponseRequest]) -> HttpResponse | StreamedResponse:
    """Handles a response request."""
    body = call.body
    if body.stream_options is not None and not body.stream:
        raise invalid_request("it needs stream: true", "stream_options")
    for number, one in enumerate(body.include or ()):
        if one != LOGPROBS:
            call.ignore(f"include.{number}", "answers have no such part")
    if body.top_logprobs and not shows_logprobs(body):
        raise invalid_request(f"it needs include: [{LOGPROBS}]", "top_logprobs")
    reject_fields(body, **_ELSEWHERE)
    for name in ("n", "best_of"):
        if (getattr(body, name) or 1) > 1:
            raise unsupported_field("a response is one answer", name)
    call.note(user=body.user or body.safety_identifier, metadata=body.metadata)
    if body.stream:
        return StreamedResponse(_stream_events(call), failed=_failed)
    async with call.running(_prepare) as (hosted, run), contextlib.aclosing(run.chunks()) as pieces:
        answer = _ResponseAnswer(call, hosted, run)
        async for batch in pieces:
            for _, chunk in batch or ():
                answer.push(chunk)
        answer.finish()
        return HttpResponse(answer.response(answer.status))


def _failed(error: ApiError) -> bytes:
    """Formats an error in the middle of a stream."""
    shown = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return sse_event({**shown, "sequence_number": 0}, "error")


def shows_logprobs(body: ResponseRequest) -> bool:
    """Whether the answer has log-probabilities."""
    return LOGPROBS in (body.include or ())


def _prepare(call: RequestContext[ResponseRequest], hosted: ServedModel) -> list[PromptRequests]:
    """Builds the prompt; with truncation, from the latest messages that fit. Slow."""
    asked = to_chat_request(call.body)

    def ignore(field: str, why: str) -> None:
        call.ignore(_named(field), why)

    while True:
        try:
            return [prepare_chat(call.service, asked, hosted, ignore)]
        except ApiError as error:
            fits = error.code != "context_length_exceeded"
            first = next((i for i, m in enumerate(asked.messages) if m.role != "system"), None)
            if (
                fits
                or call.body.truncation != "auto"
                or first is None
                or len(asked.messages) - first < 2
            ):
                error.param = error.param and _named(error.param)
                raise
        asked.messages = [*asked.messages[:first], *asked.messages[first + 1 :]]


def _named(field: str) -> str:
    """The Responses API's name of a chat completion field."""
    tool = field.replace(".function.", ".", 1) if field.startswith("tools.") else field
    return _NAMES.get(field, tool)


def to_chat_request(body: ResponseRequest) -> ChatRequest:
    """The request as a chat completion. Raises `ApiError`."""
    chat: dict[str, Any] = {
        **{
            name: one
            for name, one in body.given_fields().items()
            if name in SamplingFields.model_fields
        },
        "model": body.model,  # which may be the name of an adapter
        "messages": _messages(body),
        "max_completion_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    if shows_logprobs(body):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.reasoning is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and (format := body.text.format) is not None:
        chat["response_format"] = {"type": format.type}
        if format.type == "json_schema":
            schema = {"name": format.name, "schema": format.schema_, "strict": format.strict}
            chat["response_format"]["json_schema"] = schema
    if body.tools:
        chat["tools"] = [
            {"type": "function", "function": one.model_dump(exclude={"type"}, exclude_none=True)}
            if isinstance(one, FunctionTool)
            else one
            for one in body.tools
        ]
    if isinstance(body.tool_choice, str):
        chat["tool_choice"] = body.tool_choice
    elif body.tool_choice is not None:
        chat["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    return validated({k: v for k, v in chat.items() if v is not None}, ChatRequest)


def _messages(body: ResponseRequest) -> list[dict[str, Any]]:
    """Input items as chat messages; calls and reasoning join one assistant message."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for number, item in enumerate(body.input):
        one = _message(item, f"input.{number}")
        last = messages[-1] if messages else {}
        if last.get("role") == one["role"] == "assistant":
            calls = [*last.get("tool_calls", []), *one.pop("tool_calls", [])]
            last.update({k: v for k, v in one.items() if v or k not in last})
            if calls:
                last["tool_calls"] = calls
        else:
            messages.append(one)
    if not messages:
        raise invalid_request("there is no message", "input")
    return messages


def _message(item: InputItem, path: str) -> dict[str, Any]:
    match item.type:
        case "message":
            if item.role is None or item.content is None:
                raise invalid_request("a message needs role and content", path)
            return {"role": item.role, "content": _text(item.content, f"{path}.content")}
        case "function_call":
            if item.call_id is None or item.name is None:
                raise invalid_request("a function_call needs call_id and name", path)
            parse_arguments(item.arguments or "", f"{path}.arguments")
            function = {"name": item.name, "arguments": item.arguments or ""}
            call = {"id": item.call_id, "type": "function", "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case "function_call_output":
            if item.call_id is None:
                raise invalid_request("a function_call_output needs call_id", path)
            text = _text(item.output or "", f"{path}.output")
            return {"role": "tool", "tool_call_id": item.call_id, "content": text}
    parts = item.content if isinstance(item.content, list) else []
    texts = [one.get("text") if isinstance(one, dict) else one.text for one in parts]
    thought = "".join(text for text in texts if isinstance(text, str))
    return {"role": "assistant", "content": "", "reasoning_content": thought}


def _text(content: str | list[InputPart] | list[dict[str, Any]], path: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for number, part in enumerate(content):
        if not isinstance(part, InputPart) or part.type not in _TEXTS:
            kind = part.type if isinstance(part, InputPart) else "this"
            raise unsupported_field(f"the model does not read {kind}", f"{path}.{number}")
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise invalid_request(
                f"a part of the type {part.type} needs its text", f"{path}.{number}"
            )
        texts.append(text)
    return "\n".join(texts)


_TEXTS = ("input_text", "output_text", "text", "refusal")


@dataclass
class _ResponseAnswer:
    """A response that is being generated."""

    call: RequestContext[ResponseRequest]
    hosted: ServedModel
    run: RequestRunner
    status: str = "completed"
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        (self.job,) = self.run.jobs
        parser = self.job.parsing.parser()
        self._parser = parser if self.call.body.stream else WholeCallsParser(parser)
        self.items = ResponseItems()

    def push(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Parses a chunk; returns its events."""
        entries: list[dict[str, Any]] = []
        if shows_logprobs(self.call.body):
            entries = usage.chat_logprobs(self.hosted.llm.tokenizer, chunk.logprobs)
        self.status = "incomplete" if chunk.finish_reason == "length" else "completed"
        return self.items.push(self._parser.push(chunk.text), entries)

    def finish(self) -> list[dict[str, Any]]:
        """Parses the end of the answer; returns its events."""
        rest = self._parser.finish(self.status == "incomplete")
        return [*self.items.push(rest, []), *self.items.close(self.status)]

    def response(self, status: str) -> dict[str, Any]:
        """The response object as far as it is known."""
        body = self.call.body
        params = self.job.sampling.params
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        tokens = None
        if self.run.usages:
            known = usage.usage([self.job], self.run.usages)
            tokens = {
                "input_tokens": known["prompt_tokens"],
                "input_tokens_details": {
                    "cached_tokens": known["prompt_tokens_details"]["cached_tokens"],
                    "cache_write_tokens": 0,
                },
                "output_tokens": known["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self.items.reasoning_deltas},
                "total_tokens": known["total_tokens"],
            }
        text = {}
        if body.text is not None:
            without = {"verbosity"}
            text = body.text.model_dump(by_alias=True, exclude_none=True, exclude=without)
        chosen: Any = body.tool_choice or "auto"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.hosted.name,
            "output": self.items.done,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": chosen if isinstance(chosen, str) else chosen.model_dump(),
            "tools": [
                {"strict": None, "parameters": None, **one.model_dump(exclude_none=True)}
                for one in body.tools or ()
                if isinstance(one, FunctionTool)
            ],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": tokens,
            "user": body.user,
        }


async def _stream_events(call: RequestContext[ResponseRequest]) -> AsyncGenerator[bytes]:
    """The server-sent events of a stream, with sequence numbers."""
    number = 0

    def numbered(one: dict[str, Any]) -> bytes:
        nonlocal number
        number += 1
        return sse_event({**one, "sequence_number": number - 1}, one["type"])

    async with call.running(_prepare) as (hosted, run), contextlib.aclosing(run.chunks()) as pieces:
        answer = _ResponseAnswer(call, hosted, run)
        begun = False
        async for batch in pieces:
            events: list[bytes] = []
            if not begun:
                begun = True
                for kind in ("created", "in_progress"):
                    shown = {"type": f"response.{kind}", "response": answer.response("in_progress")}
                    events.append(numbered(shown))
            for _, chunk in batch or ():
                events += map(numbered, answer.push(chunk))
            yield batch_bytes(events, batch)
        events = list(map(numbered, answer.finish()))
        kind = f"response.{answer.status}"
        yield b"".join(
            [*events, numbered({"type": kind, "response": answer.response(answer.status)})]
        )
