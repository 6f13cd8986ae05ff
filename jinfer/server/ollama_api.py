"""Ollama API: /api/chat and /api/generate, whole and streamed (lines of JSON)."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from jinfer.engine.output.completion import Chunk
from jinfer.engine.requests import RequestError
from jinfer.server import usage
from jinfer.server.chat import CHAT_FIELDS, ParsedAnswer, prepare_chat
from jinfer.server.field_checks import reject_fields
from jinfer.server.http_errors import ApiError, ErrorFormat, as_api_error, invalid_request
from jinfer.server.http_responses import (
    NDJSON_MEDIA_TYPE,
    HttpResponse,
    StreamedResponse,
    dumps,
)
from jinfer.server.ollama_request import chat_request, ollama_name
from jinfer.server.output_deltas import OutputDelta, WholeCallsParser
from jinfer.server.request_params import OLLAMA, request_options
from jinfer.server.request_runner import PromptRequests, RequestRunner, prepare_prompt
from jinfer.server.schemas.ollama_api import (
    OllamaChatRequest,
    OllamaError,
    OllamaGenerateRequest,
)
from jinfer.server.served_model import ServedModel
from jinfer.server.service import RequestContext


def _error(error: ApiError) -> dict[str, Any]:
    """An error as Ollama's clients read it: one text, which names the field at fault."""
    named = error.param is None or error.message.startswith(error.param)
    return {"error": error.message if named else f"{error.param}: {error.message}"}


OLLAMA_ERRORS = ErrorFormat(_error, OllamaError, lambda error: error.status)

type _Call = RequestContext[Any]  # of an `OllamaChatRequest` or an `OllamaGenerateRequest`


async def chat(call: RequestContext[OllamaChatRequest]) -> HttpResponse | StreamedResponse:
    """Handles a chat request; without messages the model is only loaded."""
    return await _answer(call, empty=not call.body.messages)


async def generate(call: RequestContext[OllamaGenerateRequest]) -> HttpResponse | StreamedResponse:
    """Handles a generate request; without a prompt the model is only loaded."""
    body = call.body
    reject_fields(
        body,
        images="the model does not read images",
        template="the model has its own; write the whole prompt with raw: true",
        suffix="a text is not filled in here; /infill and /v1/completions do that",
    )
    if body.raw:
        why = "a raw prompt is not put into a conversation"
        reject_fields(body, **dict.fromkeys(("system", "context"), why))
    return await _answer(call, empty=not body.prompt)


async def _answer(call: _Call, *, empty: bool) -> HttpResponse | StreamedResponse:
    body, clock = call.body, Clock()
    if body.top_logprobs and not body.logprobs:
        raise invalid_request("it needs logprobs: true", "top_logprobs")
    if empty:
        hosted, reason = await _load_or_unload(call)
        clock.loaded()
        times = {"total_duration": clock.total, "load_duration": clock.load}
        end = {"done": True, "done_reason": reason, **times}
        return HttpResponse({**_head(hosted), **_shape(body, _Parts()), **end})
    if body.stream is not False:
        return StreamedResponse(_lines(call, clock), NDJSON_MEDIA_TYPE, _failed)
    prepare = partial(_prepare, clock)
    async with call.running(prepare) as (hosted, run), contextlib.aclosing(run.chunks()) as pieces:
        answer, whole = _OllamaAnswer(call, hosted, run, clock), _Parts()
        async for batch in pieces:
            for _, chunk in batch or ():
                whole += answer.push(chunk)
        return HttpResponse(answer.end(whole))


async def _load_or_unload(call: _Call) -> tuple[ServedModel, str]:
    """Loads the model of a request that asks nothing; with a `keep_alive` of 0, unloads it."""
    models, keep = call.service.models, call.keep_alive()
    if keep == 0:
        hosted = models.by_name(call.body.model)
        await models.unload(hosted)
        return hosted, "unload"
    async with models.use(call.body.model, keep=keep) as hosted:
        return hosted, "load"


async def _lines(call: _Call, clock: Clock) -> AsyncGenerator[bytes]:
    """The lines of a stream; the last one has the figures. Silence has no lines."""
    prepare = partial(_prepare, clock)
    async with call.running(prepare) as (hosted, run), contextlib.aclosing(run.chunks()) as pieces:
        answer = _OllamaAnswer(call, hosted, run, clock)
        async for batch in pieces:
            parts = [answer.push(chunk) for _, chunk in batch or ()]
            yield b"".join(dumps(answer.line(one)) + b"\n" for one in parts if one)
        yield dumps(answer.end(_Parts())) + b"\n"


def _failed(error: ApiError) -> bytes:
    """Formats an error in the middle of a stream."""
    return dumps(_error(error)) + b"\n"


def _prepare(clock: Clock, call: _Call, hosted: ServedModel) -> list[PromptRequests]:
    """Builds the prompt. Slow: call it in a worker thread."""
    clock.loaded()
    try:
        return [_prompt(call, hosted)]
    except ApiError as error:
        if error.param is not None:
            error.param = ollama_name(error.param)
            if isinstance(call.body, OllamaGenerateRequest) and error.param == "messages":
                error.param = "prompt"
        raise


def _prompt(call: _Call, hosted: ServedModel) -> PromptRequests:
    body, session, settings = call.body, hosted.session, call.service.settings
    asked = chat_request(body)
    if isinstance(body, OllamaGenerateRequest) and (body.raw or not hosted.llm.can_chat):
        # Where a model has no template, Ollama's is the prompt as it is.
        if body.system:
            raise invalid_request("the model has no chat template with a system prompt", "system")
        if body.think is not None:
            call.ignore("think", "the prompt is not put into a chat template")
        changes = {"logprobs": asked.top_logprobs or 0} if asked.logprobs else {}
        sampling = request_options(asked, session, OLLAMA, changes, CHAT_FIELDS)
        ids = [*_context(body, hosted), *session.encode(body.prompt or "")]
        return prepare_prompt(session, ids, sampling, param="prompt", timeout=settings.timeout)

    def ignore(field: str, why: str) -> None:
        call.ignore(ollama_name(field), why)

    before = _context(body, hosted) if isinstance(body, OllamaGenerateRequest) else []
    return prepare_chat(call.service, asked, hosted, ignore, base=OLLAMA, before=before)


def _context(body: OllamaGenerateRequest, hosted: ServedModel) -> list[int]:
    """The tokens of an earlier prompt and its answer."""
    try:
        return hosted.session.encode(body.context) if body.context else []
    except RequestError as error:
        raise as_api_error(error, param="context") from error


@dataclass
class Clock:
    """When a request came, and when its model was there; durations are in nanoseconds."""

    begun: int = field(default_factory=time.perf_counter_ns)
    load: int = 0

    def loaded(self) -> None:
        """The model is there."""
        self.load = self.total

    @property
    def total(self) -> int:
        """Nanoseconds since the request came."""
        return time.perf_counter_ns() - self.begun


@dataclass
class _Parts:
    """What an answer, or a piece of one, consists of."""

    content: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.thinking or self.calls or self.logprobs)

    def __iadd__(self, more: _Parts) -> _Parts:
        self.content += more.content
        self.thinking += more.thinking
        self.calls += more.calls
        self.logprobs += more.logprobs
        return self


@dataclass
class _OllamaAnswer:
    """A request that is being answered."""

    call: _Call
    hosted: ServedModel
    run: RequestRunner
    clock: Clock
    reason: str = "stop"

    def __post_init__(self) -> None:
        (self.job,) = self.run.jobs
        # A call has its arguments as an object, so that it comes whole.
        self._parsed = ParsedAnswer(WholeCallsParser(self.job.parsing.parser()))
        self._ids: list[int] = []

    def push(self, chunk: Chunk) -> _Parts:
        """Parses a chunk."""
        self._ids += chunk.token_ids
        parts = self._parts(self._parsed.push(chunk.text))
        if self.call.body.logprobs:
            tokenizer = self.hosted.llm.tokenizer
            parts.logprobs = usage.chat_logprobs(tokenizer, chunk.logprobs)
        if chunk.finish_reason is not None:
            self.reason = chunk.finish_reason
            parts += self._parts(self._parsed.finish(chunk.finish_reason))
        return parts

    def _parts(self, delta: OutputDelta) -> _Parts:
        ended = [one.index for one in delta.calls if one.end == "done"]
        return _Parts(delta.content, delta.reasoning, list(map(self._call, ended)))

    def _call(self, index: int) -> dict[str, Any]:
        one = self._parsed.calls[index]
        arguments = json.loads(one.arguments or "{}")
        return {
            "id": one.id,
            "function": {"index": index, "name": one.name, "arguments": arguments},
        }

    def line(self, parts: _Parts) -> dict[str, Any]:
        """A line of a stream other than the last."""
        return {**_head(self.hosted), **_shape(self.call.body, parts), "done": False}

    def end(self, parts: _Parts) -> dict[str, Any]:
        """The whole answer, or the last line of a stream."""
        used, body = self.run.usages[0], self.call.body
        prefill = max(0.0, used.prefill_seconds - used.queue_seconds)
        more: dict[str, Any] = {}
        if isinstance(body, OllamaGenerateRequest) and not body.raw:
            more["context"] = [*self.job.ids, *self._ids]
        return {
            **_head(self.hosted),
            **_shape(body, parts),
            "done": True,
            "done_reason": self.reason,
            **more,
            "total_duration": self.clock.total,
            "load_duration": self.clock.load,
            "prompt_eval_count": used.prompt_tokens,
            "prompt_eval_duration": round(prefill * 1e9),
            "eval_count": used.completion_tokens,
            "eval_duration": round(used.decode_seconds * 1e9),
        }


def _head(hosted: ServedModel) -> dict[str, Any]:
    return {"model": hosted.name, "created_at": timestamp(datetime.now(UTC))}


def timestamp(when: datetime) -> str:
    """A time as Ollama's clients read it (RFC 3339)."""
    return when.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _shape(body: OllamaChatRequest | OllamaGenerateRequest, parts: _Parts) -> dict[str, Any]:
    """Parts of an answer in the format of the route."""
    thinking = {"thinking": parts.thinking} if parts.thinking else {}
    logprobs = {"logprobs": parts.logprobs} if parts.logprobs else {}
    if isinstance(body, OllamaGenerateRequest):
        return {"response": parts.content, **thinking, **logprobs}
    calls = {"tool_calls": parts.calls} if parts.calls else {}
    message = {"role": "assistant", "content": parts.content, **thinking, **calls}
    return {"message": message, **logprobs}
