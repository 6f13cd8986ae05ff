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
from jinfer.server.core import usage
from jinfer.server.core.endpoint import Routes
from jinfer.server.core.prepare_chat import field_names, ignore_as, prepare_chat
from jinfer.server.core.prompt_builder import build_chat_prompt
from jinfer.server.core.prompt_requests import PromptRequests
from jinfer.server.core.request_runner import RequestRunner
from jinfer.server.core.sampling_fields import TOKEN_FIELDS, reject_fields
from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_errors import ApiError, invalid_request, unsupported_field
from jinfer.server.http.http_responses import (
    SSE_MEDIA_TYPE,
    HttpResponse,
    StreamedResponse,
    batch_bytes,
    sse_event,
)
from jinfer.server.http.query_params import PAGE, last_event_id, listed_page, query_value
from jinfer.server.models.served_model import ServedModel
from jinfer.server.openai.response_input import ResponseInput, read_input, to_chat_request
from jinfer.server.openai.response_items import ResponseItems, custom_names
from jinfer.server.openai.response_schemas import (
    LOGPROBS,
    CustomTool,
    DeletedResponse,
    FunctionTool,
    InputItems,
    InputTokens,
    InputTokensRequest,
    ResponseObject,
    ResponseRequest,
)
from jinfer.server.stores.response_store import UNFINISHED, ResponseJob, StoredResponse
from jinfer.server.tool_parsers.output_deltas import WholeCallsParser

routes = Routes(tag="OpenAI")
_PATH = "/v1/responses/{response_id}"

# Chat request field -> its name in the Responses API.
_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "json_schema": "text.format.schema",
}


# Fields of other routes that this API does not support.
_ELSEWHERE: Mapping[str, str] = {
    "response_format": "use text.format",
    "n_probs": f"use include: [{LOGPROBS}]",
    **TOKEN_FIELDS,
}
# Batches of events, with the batch of `RequestRunner.chunks`.
type EventBatches = AsyncGenerator[tuple[list[dict[str, Any]], Sequence[Any] | None]]


@routes.add("POST /v1/responses /responses", ResponseObject, stream=SSE_MEDIA_TYPE)
async def create_response(
    request: RequestContext[ResponseRequest],
) -> HttpResponse | StreamedResponse:
    """Answer a conversation."""
    body, kept = request.body, _is_kept(request)
    check_response(request)
    request.note(user=body.user or body.safety_identifier, metadata=body.metadata)
    if body.background and not kept:
        raise invalid_request("a background response must be stored", "background")
    response_input = await request.service.in_thread(read_input, body, request.service.responses)
    answering = _Answering(request, response_input, kept)
    if body.background:
        job = ResponseJob(answering.id, answering.created_response(), response_input.listed())
        await request.service.response_jobs.start(job, answering.batches(), request.service.answers)
        if body.stream:
            pieces = job.log.read(0, 0, request.service.settings.ping)
            return StreamedResponse(pieces, failed=failed_event)
        return HttpResponse(job.response)
    if body.stream:
        return StreamedResponse(_stream_bytes(answering.batches()), failed=failed_event)
    response: Any = None
    async with contextlib.aclosing(answering.batches()) as batches:
        async for events, _ in batches:
            response = events[-1].get("response", response) if events else response
    return HttpResponse(response)


def check_response(request: RequestContext[ResponseRequest]) -> None:
    """Raise `ApiError` for invalid fields; report fields without effect."""
    body = request.body
    if body.stream_options is not None and not body.stream:
        raise invalid_request("it needs stream: true", "stream_options")
    for number, item in enumerate(body.include or ()):
        if item != LOGPROBS:
            request.ignore(f"include.{number}", "answers do not have this part")
    if body.top_logprobs and not shows_logprobs(body):
        raise invalid_request(f"it needs include: [{LOGPROBS}]", "top_logprobs")
    reject_fields(body, **_ELSEWHERE)
    for name in ("n", "best_of"):
        if (getattr(body, name) or 1) > 1:
            raise unsupported_field("a response is a single answer", name)
    if body.store and not _is_kept(request):
        request.ignore("store", "the server does not store responses")


def _is_kept(request: RequestContext[ResponseRequest]) -> bool:
    """Return whether the answer is stored."""
    return request.body.store is not False and request.service.responses.max_responses > 0


def failed_event(error: ApiError) -> bytes:
    """Format an error in the middle of a stream."""
    shown = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return sse_event({**shown, "sequence_number": 0}, "error")


def shows_logprobs(body: ResponseRequest) -> bool:
    """Return whether the answer has log-probabilities."""
    return LOGPROBS in (body.include or ())


async def _stream_bytes(batches: EventBatches) -> AsyncGenerator[bytes]:
    """Yield the server-sent events of a stream."""
    async with contextlib.aclosing(batches):
        async for events, batch in batches:
            yield batch_bytes([sse_event(event, event["type"]) for event in events], batch)


def prepare_response(
    request: RequestContext[ResponseRequest], model: ServedModel, response_input: ResponseInput
) -> list[PromptRequests]:
    """Prepare the prompt; with truncation, from the latest messages that fit. Slow."""
    ignore = ignore_as(request.ignore, response_field)
    chat = to_chat_request(request.body, response_input, request.ignore)
    with field_names(response_field):
        while True:
            try:
                return [prepare_chat(chat, model, request.service.settings, ignore)]
            except ApiError as error:
                if error.code != "context_length_exceeded" or request.body.truncation != "auto":
                    raise
                first = next((i for i, m in enumerate(chat.messages) if m.role != "system"), None)
                if first is None or len(chat.messages) - first < 2:
                    raise
            chat.messages = [*chat.messages[:first], *chat.messages[first + 1 :]]


def response_field(field: str) -> str:
    """Return the Responses API's name of a chat request's field."""
    tool = field.replace(".function.", ".", 1) if field.startswith("tools.") else field
    return "input" if field.startswith("messages.") else _NAMES.get(field, tool)


@dataclass
class _Answering:
    """Answers a request for a response.

    Attributes:
        response_input: the input.
        kept: whether the answer is stored.
    """

    request: RequestContext[ResponseRequest]
    response_input: ResponseInput
    kept: bool
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    async def batches(self) -> EventBatches:
        """Yield numbered events; the last event has the response, which is stored before."""
        prepare = partial(prepare_response, response_input=self.response_input)
        number = 0

        def numbered(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
            nonlocal number
            number += len(events)
            first = number - len(events)
            return [{**event, "sequence_number": first + i} for i, event in enumerate(events)]

        async with self.request.streaming(prepare) as (model, run, pieces):
            answer = _ResponseFormatter(self, model, run)
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
                stored = StoredResponse(response, self.response_input.listed())
                await self.request.service.in_thread(self.request.service.responses.put, stored)
            events.append({"type": f"response.{answer.status}", "response": response})
            yield numbered(events), ()

    def created_response(self) -> dict[str, Any]:
        """Return the response object before the answer begins."""
        model = self.request.service.models.find(self.request.body.model).name
        return self.response("queued", model, [], None, self.request.body)

    def response(
        self, status: str, model: str, output: Any, tokens: Any, params: Any
    ) -> dict[str, Any]:
        """Return the response object.

        Args:
            params: object with `temperature` and `top_p`.
        """
        body = self.request.body
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        text = {}
        if body.text is not None:
            without = {"verbosity"}
            text = body.text.model_dump(by_alias=True, exclude_none=True, exclude=without)
        tool_choice: Any = body.tool_choice or "auto"
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
            "tool_choice": tool_choice
            if isinstance(tool_choice, str)
            else tool_choice.model_dump(),
            "tools": [_shown_tool(tool) for tool in body.tools or () if not _is_other(tool)],
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
class _ResponseFormatter:
    """Formats a response while it is generated."""

    answering: _Answering
    model: ServedModel
    run: RequestRunner
    status: str = "completed"

    def __post_init__(self) -> None:
        (self.job,) = self.run.jobs
        parser = self.job.parsing.parser()
        body = self.answering.request.body
        self._parser = parser if body.stream else WholeCallsParser(parser)
        self.items = ResponseItems(custom=custom_names(body))

    def push(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Parse a chunk; return its events."""
        entries: list[dict[str, Any]] = []
        if shows_logprobs(self.answering.request.body):
            entries = usage.chat_logprobs(self.model.llm.tokenizer, chunk.logprobs)
        self.status = "incomplete" if chunk.finish_reason == "length" else "completed"
        return self.items.push(self._parser.push(chunk.text), entries)

    def finish(self) -> list[dict[str, Any]]:
        """Parse the end of the answer; return its events."""
        rest = self._parser.finish(self.status == "incomplete")
        return [*self.items.push(rest, []), *self.items.close(self.status)]

    def response(self, status: str) -> dict[str, Any]:
        """Return the current response object."""
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
        params = self.job.options.params
        return self.answering.response(status, self.model.name, self.items.done, tokens, params)


# Before the routes whose path with an id would match it.
@routes.add("POST /v1/responses/input_tokens", InputTokens)
async def input_tokens(request: RequestContext[InputTokensRequest]) -> HttpResponse:
    """Count the input tokens of a response."""
    check_response(request)
    response_input = await request.service.in_thread(
        read_input, request.body, request.service.responses
    )
    async with request.service.models.use(request.body.model) as model:
        request.note(model=model.name)
        count = await request.service.in_thread(_count_tokens, request, model, response_input)
    return HttpResponse({"object": "response.input_tokens", "input_tokens": count})


def _count_tokens(
    request: RequestContext[InputTokensRequest], model: ServedModel, response_input: ResponseInput
) -> int:
    chat = to_chat_request(request.body, response_input, request.ignore)
    with field_names(response_field):
        ignore = ignore_as(request.ignore, response_field)
        prompt = build_chat_prompt(chat, model.session, request.service.settings, ignore)
        return len(prompt.ids())


@routes.add(
    f"GET {_PATH}", ResponseObject, stream=SSE_MEDIA_TYPE, query=("stream", "starting_after")
)
async def retrieve(request: RequestContext[Any]) -> HttpResponse | StreamedResponse:
    """Retrieve a stored response."""
    id = _response_id(request)
    job = request.service.response_jobs.jobs.get(id)
    after = query_value(request.http, "starting_after")
    if query_value(request.http, "stream", False):
        after = last_event_id(request.http) if after is None else after
        if job is None:
            await _stored_response(request)
            raise invalid_request(
                "only running and recent background responses can be streamed",
                "stream",
            )
        place = 0 if after is None else after + 1
        events = job.log.read(place, 0, request.service.settings.ping)
        return StreamedResponse(events, failed=failed_event)
    if after is not None:
        raise invalid_request("it needs stream=true", "starting_after")
    return HttpResponse(await _known_response(request))


@routes.add(f"POST {_PATH}/cancel", ResponseObject)
async def cancel(request: RequestContext[Any]) -> HttpResponse:
    """Cancel a background response."""
    jobs, id = request.service.response_jobs, _response_id(request)
    if jobs.running(id) is None and not (await _stored_response(request)).response["background"]:
        raise invalid_request("only a background response can be cancelled")
    await jobs.cancel(id)
    return HttpResponse(await _known_response(request))


@routes.add(f"DELETE {_PATH}", DeletedResponse)
async def delete(request: RequestContext[Any]) -> HttpResponse:
    """Delete a stored response."""
    jobs, id = request.service.response_jobs, _response_id(request)
    await jobs.cancel(id)
    jobs.jobs.pop(id, None)
    if not await request.service.in_thread(request.service.responses.delete, id):
        raise _missing_response(id)
    return HttpResponse({"id": id, "object": "response", "deleted": True})


@routes.add(f"GET {_PATH}/input_items", InputItems, query=PAGE)
async def input_items(request: RequestContext[Any]) -> HttpResponse:
    """List the input items of a stored response."""
    return HttpResponse(listed_page(request.http, (await _stored_response(request)).input))


def _response_id(request: RequestContext[Any]) -> str:
    return str(request.http.path_params["response_id"])


async def _known_response(request: RequestContext[Any]) -> dict[str, Any]:
    """Return the current response object."""
    if (job := request.service.response_jobs.running(_response_id(request))) is not None:
        return job.response
    response = (await _stored_response(request)).response
    if response["status"] in UNFINISHED:  # left by a killed process
        error = {
            "code": "server_error",
            "message": "the server ended before the answer was complete",
        }
        response = {**response, "status": "failed", "error": error}
    return response


async def _stored_response(request: RequestContext[Any]) -> StoredResponse:
    """Return the stored response of the path. Raises `ApiError`."""
    found = await request.service.in_thread(request.service.responses.get, _response_id(request))
    if found is None:
        raise _missing_response(_response_id(request))
    return found


def _missing_response(id: str) -> ApiError:
    return ApiError(404, f"Response with id {id[:80]!r} not found.", param="response_id")
