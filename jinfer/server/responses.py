"""Responses API: /v1/responses, whole, streamed (server-sent events), or in the background."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jinfer.engine.output.completion import Chunk
from jinfer.server import usage
from jinfer.server.chat import prepare_chat
from jinfer.server.field_checks import TOKEN_FIELDS, reject_fields
from jinfer.server.http_errors import ApiError, invalid_request, unsupported_field
from jinfer.server.http_responses import HttpResponse, StreamedResponse, batch_bytes, sse_event
from jinfer.server.output_deltas import WholeCallsParser
from jinfer.server.request_runner import PromptRequests, RequestRunner
from jinfer.server.response_input import ResponseInput, read_input, to_chat_request
from jinfer.server.response_items import ResponseItems
from jinfer.server.response_jobs import ResponseJob
from jinfer.server.response_store import StoredResponse
from jinfer.server.response_tools import custom_names
from jinfer.server.schemas.responses import (
    LOGPROBS,
    CustomTool,
    FunctionTool,
    ResponseRequest,
)
from jinfer.server.served_model import ServedModel
from jinfer.server.service import RequestContext

# Chat completion field -> its name in the Responses API.
_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "json_schema": "text.format.schema",
}


# Fields of other routes that this API does not support.
_ELSEWHERE: Mapping[str, str] = {
    "response_format": "text.format says it",
    "n_probs": f"log-probabilities are given with include: [{LOGPROBS}]",
    **TOKEN_FIELDS,
}
# Batches of events, and what of the engine they came from; see `RequestRunner.chunks`.
type EventBatches = AsyncGenerator[tuple[list[dict[str, Any]], Sequence[Any] | None]]


async def create_response(call: RequestContext[ResponseRequest]) -> HttpResponse | StreamedResponse:
    """Handles a response request."""
    body, kept = call.body, _is_kept(call)
    check_response(call)
    call.note(user=body.user or body.safety_identifier, metadata=body.metadata)
    if body.background and not kept:
        raise invalid_request("an answer in the background is one that is stored", "background")
    given = await call.service.in_thread(read_input, body, call.service.responses)
    answering = _Answering(call, given, kept)
    if body.background:
        job = ResponseJob(answering.id, answering.created_response(), given.listed())
        await call.service.response_jobs.start(job, answering.batches(), call.service.answers)
        if body.stream:
            pieces = job.events(-1, call.service.settings.ping)
            return StreamedResponse(pieces, failed=failed_event)
        return HttpResponse(job.response)
    if body.stream:
        return StreamedResponse(_stream_bytes(answering.batches()), failed=failed_event)
    response: Any = None
    async with contextlib.aclosing(answering.batches()) as batches:
        async for events, _ in batches:
            response = events[-1].get("response", response) if events else response
    return HttpResponse(response)


def check_response(call: RequestContext[ResponseRequest]) -> None:
    """Raises `ApiError` for fields that cannot be; reports those without effect."""
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
    if body.store and not _is_kept(call):
        call.ignore("store", "no answers are stored here")


def _is_kept(call: RequestContext[ResponseRequest]) -> bool:
    """Whether the answer is stored."""
    return call.body.store is not False and call.service.responses.most > 0


def failed_event(error: ApiError) -> bytes:
    """Formats an error in the middle of a stream."""
    shown = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return sse_event({**shown, "sequence_number": 0}, "error")


def shows_logprobs(body: ResponseRequest) -> bool:
    """Whether the answer has log-probabilities."""
    return LOGPROBS in (body.include or ())


async def _stream_bytes(batches: EventBatches) -> AsyncGenerator[bytes]:
    """The server-sent events of a stream."""
    async with contextlib.aclosing(batches):
        async for events, batch in batches:
            yield batch_bytes([sse_event(one, one["type"]) for one in events], batch)


def prepare_response(
    call: RequestContext[ResponseRequest], hosted: ServedModel, given: ResponseInput
) -> list[PromptRequests]:
    """Builds the prompt; with truncation, from the latest messages that fit. Slow."""

    def ignore(field: str, why: str) -> None:
        call.ignore(_named(field), why)

    asked = to_chat_request(call.body, given, call.ignore)
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


@dataclass
class _Answering:
    """A request for a response, before and while it is answered.

    Attributes:
        given: what it answers.
        kept: whether the answer is stored.
    """

    call: RequestContext[ResponseRequest]
    given: ResponseInput
    kept: bool
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    async def batches(self) -> EventBatches:
        """The events, with sequence numbers; the last one has the response, stored before."""
        prepare = partial(prepare_response, given=self.given)
        number = 0

        def numbered(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
            nonlocal number
            number += len(events)
            first = number - len(events)
            return [{**one, "sequence_number": first + i} for i, one in enumerate(events)]

        async with (
            self.call.running(prepare) as (hosted, run),
            contextlib.aclosing(run.chunks()) as pieces,
        ):
            answer = _ResponseAnswer(self, hosted, run)
            begun = False
            async for batch in pieces:
                events: list[dict[str, Any]] = []
                if not begun:
                    begun = True
                    for kind in ("created", "in_progress"):
                        known = answer.response("in_progress")
                        events.append({"type": f"response.{kind}", "response": known})
                for _, chunk in batch or ():
                    events += answer.push(chunk)
                yield numbered(events), batch
            events = answer.finish()
            response = answer.response(answer.status)
            if self.kept:
                stored = StoredResponse(response, self.given.listed())
                await self.call.service.in_thread(self.call.service.responses.put, stored)
            events.append({"type": f"response.{answer.status}", "response": response})
            yield numbered(events), ()

    def created_response(self) -> dict[str, Any]:
        """The response object before anything is known of the answer."""
        model = self.call.service.models.find(self.call.body.model).name
        return self.response("queued", model, [], None, self.call.body)

    def response(
        self, status: str, model: str, output: Any, tokens: Any, params: Any
    ) -> dict[str, Any]:
        """The response object.

        Args:
            params: what has the temperature and `top_p`.
        """
        body = self.call.body
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
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
            "background": bool(body.background),
            "error": None,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": self.kept,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": chosen if isinstance(chosen, str) else chosen.model_dump(),
            "tools": [_shown_tool(one) for one in body.tools or () if not _is_other(one)],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": tokens,
            "user": body.user,
        }


def _is_other(tool: Any) -> bool:
    return not isinstance(tool, FunctionTool | CustomTool)


def _shown_tool(tool: Any) -> dict[str, Any]:
    known = {"strict": None, "parameters": None} if isinstance(tool, FunctionTool) else {}
    return {**known, **tool.model_dump(exclude_none=True)}


@dataclass
class _ResponseAnswer:
    """A response that is being generated."""

    asked: _Answering
    hosted: ServedModel
    run: RequestRunner
    status: str = "completed"

    def __post_init__(self) -> None:
        (self.job,) = self.run.jobs
        parser = self.job.parsing.parser()
        body = self.asked.call.body
        self._parser = parser if body.stream else WholeCallsParser(parser)
        self.items = ResponseItems(custom=custom_names(body))

    def push(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Parses a chunk; returns its events."""
        entries: list[dict[str, Any]] = []
        if shows_logprobs(self.asked.call.body):
            entries = usage.chat_logprobs(self.hosted.llm.tokenizer, chunk.logprobs)
        self.status = "incomplete" if chunk.finish_reason == "length" else "completed"
        return self.items.push(self._parser.push(chunk.text), entries)

    def finish(self) -> list[dict[str, Any]]:
        """Parses the end of the answer; returns its events."""
        rest = self._parser.finish(self.status == "incomplete")
        return [*self.items.push(rest, []), *self.items.close(self.status)]

    def response(self, status: str) -> dict[str, Any]:
        """The response object as far as it is known."""
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
        params = self.job.sampling.params
        return self.asked.response(status, self.hosted.name, self.items.done, tokens, params)
