"""Ollama API: /api/chat and /api/generate, whole and streamed (lines of JSON)."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from jinfer.engine.output.completion import Chunk
from jinfer.engine.requests import RequestError
from jinfer.server.core import usage
from jinfer.server.core.embedder import Embedder, truncate_vectors
from jinfer.server.core.endpoint import Routes
from jinfer.server.core.prepare_chat import CHAT_FIELDS, field_names, ignore_as, prepare_chat
from jinfer.server.core.prompt_requests import PromptRequests, prepare_prompt
from jinfer.server.core.request_params import OLLAMA, request_options
from jinfer.server.core.request_runner import RequestRunner
from jinfer.server.core.sampling_fields import reject_fields
from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_errors import (
    ApiError,
    ErrorFormat,
    as_api_error,
    invalid_request,
    unsupported_field,
)
from jinfer.server.http.http_responses import (
    NDJSON_MEDIA_TYPE,
    HttpResponse,
    StreamedResponse,
    dumps,
    dumps_list,
)
from jinfer.server.http.request_body import Ignore
from jinfer.server.models.served_model import ServedModel
from jinfer.server.ollama.ollama_schemas import (
    OllamaChatRequest,
    OllamaChatResponse,
    OllamaEmbeddingsRequest,
    OllamaEmbeddingsResponse,
    OllamaEmbedRequest,
    OllamaEmbedResponse,
    OllamaError,
    OllamaGenerateRequest,
    OllamaGenerateResponse,
)
from jinfer.server.ollama.ollama_to_chat import chat_request, ollama_name
from jinfer.server.tool_parsers.output_deltas import OutputDelta, ParsedAnswer, WholeCallsParser


def _error(error: ApiError) -> dict[str, Any]:
    """Return an error in Ollama's format: a single text, which names the field at fault."""
    named = error.param is None or error.message.startswith(error.param)
    return {"error": error.message if named else f"{error.param}: {error.message}"}


OLLAMA_ERRORS = ErrorFormat(_error, OllamaError, lambda error: error.status)
routes = Routes(tag="Ollama", errors=OLLAMA_ERRORS)

type _Call = RequestContext[Any]  # of an `OllamaChatRequest` or an `OllamaGenerateRequest`


@routes.add("POST /api/chat", OllamaChatResponse, stream=NDJSON_MEDIA_TYPE)
async def chat(request: RequestContext[OllamaChatRequest]) -> HttpResponse | StreamedResponse:
    """Answer a conversation."""
    return await _answer(request, empty=not request.body.messages)


@routes.add("POST /api/generate", OllamaGenerateResponse, stream=NDJSON_MEDIA_TYPE)
async def generate(
    request: RequestContext[OllamaGenerateRequest],
) -> HttpResponse | StreamedResponse:
    """Answer a prompt, or continue it."""
    body = request.body
    reject_fields(
        body,
        template="the model has its own template; use raw: true for a complete prompt",
        suffix="use /infill or /v1/completions to fill in the middle",
    )
    if body.raw:
        why = "a raw prompt is not part of a conversation"
        reject_fields(body, **dict.fromkeys(("system", "context", "images"), why))
    return await _answer(request, empty=not (body.prompt or body.images))


async def _answer(request: _Call, *, empty: bool) -> HttpResponse | StreamedResponse:
    body, clock = request.body, Clock()
    if body.top_logprobs and not body.logprobs:
        raise invalid_request("it needs logprobs: true", "top_logprobs")
    if empty:
        model, reason = await _load_or_unload(request)
        clock.loaded()
        times = {"total_duration": clock.total, "load_duration": clock.load}
        end = {"done": True, "done_reason": reason, **times}
        return HttpResponse({**_head(model), **_shape(body, _Parts()), **end})
    if body.stream is not False:
        return StreamedResponse(_lines(request, clock), NDJSON_MEDIA_TYPE, _failed)
    prepare = partial(_prepare, clock)
    async with request.streaming(prepare) as (model, run, pieces):
        answer, whole = _OllamaFormatter(request, model, run, clock), _Parts()
        async for batch in pieces:
            for _, chunk in batch or ():
                whole += answer.push(chunk)
        return HttpResponse(answer.end(whole))


async def _load_or_unload(request: _Call) -> tuple[ServedModel, str]:
    """Load the model of an empty request; with a `keep_alive` of 0, unload it."""
    models, keep = request.service.models, request.keep_alive()
    if keep == 0:
        model = models.by_name(request.body.model)
        await models.unload(model)
        return model, "unload"
    async with models.use(request.body.model, keep=keep) as model:
        return model, "load"


async def _lines(request: _Call, clock: Clock) -> AsyncGenerator[bytes]:
    """Yield the lines of a stream; the last line has the statistics."""
    prepare = partial(_prepare, clock)
    async with request.streaming(prepare) as (model, run, pieces):
        answer = _OllamaFormatter(request, model, run, clock)
        async for batch in pieces:
            parts = [answer.push(chunk) for _, chunk in batch or ()]
            yield b"".join(dumps(answer.line(part)) + b"\n" for part in parts if part)
        yield dumps(answer.end(_Parts())) + b"\n"


def _failed(error: ApiError) -> bytes:
    """Format an error in the middle of a stream."""
    return dumps(_error(error)) + b"\n"


def _prepare(clock: Clock, request: _Call, model: ServedModel) -> list[PromptRequests]:
    """Build the prompt. Slow: call it in a worker thread."""
    clock.loaded()
    name_of = partial(ollama_name, body=request.body)
    with field_names(name_of):
        return [_prompt(request, model, ignore_as(request.ignore, name_of))]


def _prompt(request: _Call, model: ServedModel, ignore: Ignore) -> PromptRequests:
    body, session, settings = request.body, model.session, request.service.settings
    chat = chat_request(body)
    if isinstance(body, OllamaGenerateRequest) and (body.raw or not model.llm.can_chat):
        # Without a chat template, Ollama uses the plain prompt.
        if body.system:
            raise invalid_request("the model has no chat template with a system prompt", "system")
        if body.images:
            raise unsupported_field("images need a chat template, and the model has none", "images")
        if body.think is not None:
            request.ignore("think", "the prompt has no chat template")
        changes = {"logprobs": chat.top_logprobs or 0} if chat.logprobs else {}
        options = request_options(chat, session, OLLAMA, changes, CHAT_FIELDS)
        ids = [*_context(body, model), *session.encode(body.prompt or "")]
        return prepare_prompt(session, ids, options, param="prompt", timeout=settings.timeout)
    context = _context(body, model) if isinstance(body, OllamaGenerateRequest) else []
    return prepare_chat(chat, model, settings, ignore, base=OLLAMA, context=context)


def _context(body: OllamaGenerateRequest, model: ServedModel) -> list[int]:
    """Return the tokens of an earlier prompt and its answer."""
    try:
        return model.session.encode(body.context) if body.context else []
    except RequestError as error:
        raise as_api_error(error, param="context") from error


@dataclass
class Clock:
    """Measures the durations of a request, in nanoseconds."""

    begun: int = field(default_factory=time.perf_counter_ns)
    load: int = 0

    def loaded(self) -> None:
        """Record that the model is loaded."""
        self.load = self.total

    @property
    def total(self) -> int:
        """Nanoseconds since the request arrived."""
        return time.perf_counter_ns() - self.begun


@dataclass
class _Parts:
    """The content of an answer or of a piece."""

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
class _OllamaFormatter:
    """Formats the answer to a request."""

    request: _Call
    model: ServedModel
    run: RequestRunner
    clock: Clock
    reason: str = "stop"

    def __post_init__(self) -> None:
        (self.job,) = self.run.jobs
        # The arguments of a call are an object, so that a call is never split.
        self._parsed = ParsedAnswer(WholeCallsParser(self.job.parsing.parser()))
        self._ids: list[int] = []

    def push(self, chunk: Chunk) -> _Parts:
        """Parse a chunk."""
        self._ids += chunk.token_ids
        parts = self._parts(self._parsed.push(chunk.text))
        if self.request.body.logprobs:
            tokenizer = self.model.llm.tokenizer
            parts.logprobs = usage.chat_logprobs(tokenizer, chunk.logprobs)
        if chunk.finish_reason is not None:
            self.reason = chunk.finish_reason
            parts += self._parts(self._parsed.finish(chunk.finish_reason))
        return parts

    def _parts(self, delta: OutputDelta) -> _Parts:
        ended = [tool_call.index for tool_call in delta.calls if tool_call.end == "done"]
        return _Parts(delta.content, delta.reasoning, list(map(self._call, ended)))

    def _call(self, index: int) -> dict[str, Any]:
        tool_call = self._parsed.calls[index]
        arguments = json.loads(tool_call.arguments or "{}")
        return {
            "id": tool_call.id,
            "function": {"index": index, "name": tool_call.name, "arguments": arguments},
        }

    def line(self, parts: _Parts) -> dict[str, Any]:
        """Return a line of a stream other than the last."""
        return {**_head(self.model), **_shape(self.request.body, parts), "done": False}

    def end(self, parts: _Parts) -> dict[str, Any]:
        """Return the whole answer, or the last line of a stream."""
        used, body = self.run.usages[0], self.request.body
        prefill = max(0.0, used.prefill_seconds - used.queue_seconds)
        more: dict[str, Any] = {}
        # Tokens alone do not bring an image back.
        images = any(prepared.request.images for prepared in self.job.engine_requests)
        if isinstance(body, OllamaGenerateRequest) and not body.raw and not images:
            more["context"] = [*self.job.ids, *self._ids]
        return {
            **_head(self.model),
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


def _head(model: ServedModel) -> dict[str, Any]:
    return {"model": model.name, "created_at": timestamp(datetime.now(UTC))}


def timestamp(when: datetime) -> str:
    """Format a time for Ollama's clients (RFC 3339)."""
    return when.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _shape(body: OllamaChatRequest | OllamaGenerateRequest, parts: _Parts) -> dict[str, Any]:
    """Convert parts of an answer to the format of the route."""
    thinking = {"thinking": parts.thinking} if parts.thinking else {}
    logprobs = {"logprobs": parts.logprobs} if parts.logprobs else {}
    if isinstance(body, OllamaGenerateRequest):
        return {"response": parts.content, **thinking, **logprobs}
    calls = {"tool_calls": parts.calls} if parts.calls else {}
    message = {"role": "assistant", "content": parts.content, **thinking, **calls}
    return {"message": message, **logprobs}


_AS_MANY_AS_FIT = -1


@routes.add("POST /api/embed", OllamaEmbedResponse)
async def embed(request: RequestContext[OllamaEmbedRequest]) -> HttpResponse:
    """Compute the vectors of texts."""
    body, clock = request.body, Clock()
    truncate = None if body.truncate is False else _AS_MANY_AS_FIT
    async with request.service.models.use(body.model, keep=request.keep_alive()) as model:
        clock.loaded()
        request.note(model=model.name)
        head = {"model": model.name, "load_duration": clock.load}
        if not body.input:
            none = {"embeddings": [], "total_duration": clock.total, "prompt_eval_count": 0}
            return HttpResponse({**head, **none})
        embedder = Embedder(request.service, model, truncate)
        vectors, tokens = await embedder.embed(body.input, "input", None, normalize=True)
        request.note(prompt_tokens=tokens)
        vectors = truncate_vectors(vectors, body.dimensions, unit=True)
        head |= {"total_duration": clock.total, "prompt_eval_count": tokens}
        return HttpResponse(
            await request.service.in_thread(dumps_list, head, "embeddings", vectors)
        )


@routes.add("POST /api/embeddings", OllamaEmbeddingsResponse)
async def embeddings(request: RequestContext[OllamaEmbeddingsRequest]) -> HttpResponse:
    """Compute the vector of a text."""
    body = request.body
    async with request.service.models.use(body.model, keep=request.keep_alive()) as model:
        request.note(model=model.name)
        if not body.prompt:
            return HttpResponse({"embedding": []})
        embedder = Embedder(request.service, model, _AS_MANY_AS_FIT)
        (vector,), tokens = await embedder.embed(body.prompt, "prompt", None, normalize=False)
        request.note(prompt_tokens=tokens)
        return HttpResponse({"embedding": vector})
