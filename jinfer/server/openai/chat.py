"""Chat completions: /v1/chat/completions, whole and streamed (server-sent events)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar, cast

import orjson

from jinfer.engine.output.completion import Chunk, Completion, TokenLogprob
from jinfer.server.core import usage
from jinfer.server.core.chat_schemas import ChatBatchRequest, ChatRequest, ChatResponse, TokenCount
from jinfer.server.core.endpoint import Routes
from jinfer.server.core.prepare_chat import prepare_chat
from jinfer.server.core.prompt_builder import build_chat_prompt
from jinfer.server.core.prompt_requests import PromptRequests
from jinfer.server.core.request_activations import captured
from jinfer.server.core.sampling_fields import check_stream, ignore_verbose, reject_fields
from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_errors import ApiError, invalid_request, unsupported_field
from jinfer.server.http.http_responses import (
    SSE_MEDIA_TYPE,
    HttpResponse,
    StreamedResponse,
    dumps,
)
from jinfer.server.models.served_model import ServedModel
from jinfer.server.openai.openai_response import OpenAIFormatter, score_prompt, stream_answer
from jinfer.server.tool_parsers.output_deltas import (
    OutputDelta,
    ParsedAnswer,
    ToolCallDelta,
)

routes = Routes(tag="OpenAI")


@routes.add("POST /v1/chat/completions /chat/completions", ChatResponse, stream=SSE_MEDIA_TYPE)
async def chat(request: RequestContext[ChatRequest]) -> HttpResponse | StreamedResponse:
    """Answer a conversation."""
    body = request.body
    check_stream(body, body.stream, body.stream_options)
    ignore_verbose(body, body.stream, request.ignore)
    reject_fields(body, n_probs="use logprobs and top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise unsupported_field("streams have no prompt log-probabilities", "prompt_logprobs")
    if body.top_logprobs and not body.logprobs:
        raise invalid_request("it needs logprobs: true", "top_logprobs")
    request.note(user=body.user or body.safety_identifier, metadata=body.metadata)
    if body.stream:
        return StreamedResponse(stream_answer(request, _prepare, _ChatFormatter))
    async with request.running(_prepare) as (model, run):
        answer = _ChatFormatter(request, model, run)
        more: dict[str, Any] = {}
        if body.prompt_logprobs is not None:
            arguments = score_prompt, model.session, answer.job.ids, body.prompt_logprobs
            scored = await request.service.in_engine_thread(*arguments)
            more["prompt_logprobs"] = [None, *map(usage.ranked_logprobs, scored)]
        (answers,) = await run.completions()
        if not more and not body.logprobs and not body.capture:
            return HttpResponse(answer.whole(answers))
        # Serializing many tokens takes long, so it runs in a worker thread.
        return HttpResponse(
            await request.service.in_thread(lambda: dumps(answer.whole(answers) | more))
        )


def _prepare(request: RequestContext[ChatRequest], model: ServedModel) -> list[PromptRequests]:
    return [prepare_chat(request.body, model, request.service.settings, request.ignore)]


class _ChatFormatter(OpenAIFormatter):
    """Formats the answers to a chat request."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    nothing: ClassVar[dict[str, Any]] = {"delta": {}}

    def __post_init__(self) -> None:
        super().__post_init__()
        (self.job,) = self.run.jobs
        self.parsed = [ParsedAnswer(self.job.parsing.parser()) for _ in self.run.prepared]

    def whole(self, answers: list[Completion]) -> dict[str, Any]:
        """Return the response body with all choices."""
        choices = [self._choice(i, answer) for i, answer in enumerate(answers)]
        more = {"prompt_token_ids": self.job.ids} if self.job.options.token_ids else {}
        more |= self._prompt_text() | self.verbose(0, self.job, answers[0])
        return self.body(choices, answers[0].usage) | more

    def _prompt_text(self) -> dict[str, Any]:
        """Return the text of the prompt, if requested."""
        if not self.request.body.return_prompt_text:
            return {}
        tokenizer = self.model.session.tokenizer
        return {"prompt_text": tokenizer.decode(self.job.ids, skip_special=False)}

    @property
    def _shows_thoughts(self) -> bool:
        """Whether the response shows thoughts."""
        body = self.request.body
        hidden = body.reasoning is not None and body.reasoning.exclude
        return body.include_reasoning is not False and not hidden

    def _choice(self, index: int, answer: Completion) -> dict[str, Any]:
        reading = ParsedAnswer(self.job.parsing.parser())
        reading.push(answer.text)
        reading.finish(answer.finish_reason)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": reading.content or (None if reading.calls else ""),
            "refusal": None,
        }
        if reading.reasoning and self._shows_thoughts:
            message["reasoning_content"] = reading.reasoning
        if reading.calls:
            message["tool_calls"] = [
                _call(tool_call, complete=True) for tool_call in reading.calls.values()
            ]
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": self._reason(reading, answer.finish_reason),
        }
        if self.request.body.logprobs:
            entries = self.logprobs(answer.logprobs or ())
            choice["logprobs"] = {"content": entries, "refusal": None}
        if self.job.options.token_ids:
            choice["token_ids"] = answer.token_ids
        return choice | captured(answer.captured, self.request.body)

    def logprobs(self, entries: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
        """Convert log-probabilities to the format of chat completions."""
        as_ids = self.request.body.return_tokens_as_token_ids
        return usage.chat_logprobs(self.model.llm.tokenizer, entries, as_ids)

    def _reason(self, reading: ParsedAnswer, reason: str) -> str:
        return "tool_calls" if reading.calls and reason == "stop" else reason

    def events(self, index: int, piece: Chunk) -> list[dict[str, Any]]:
        """Return the events of an engine chunk."""
        result: list[dict[str, Any]] = []
        reading, body, options = self.parsed[index], self.request.body, self.job.options
        if not reading.started:
            reading.started = True
            result.append(self.chunk(index, {"delta": {"role": "assistant", "content": ""}}))
            if options.token_ids:
                result[-1]["prompt_token_ids"] = self.job.ids
            result[-1] |= self._prompt_text()
        self.run.mark_shown(index, piece)
        deltas = [reading.push(piece.text)] if piece.text else []
        reason = None
        if piece.finish_reason is not None:
            deltas.append(reading.finish(piece.finish_reason))
            reason = self._reason(reading, piece.finish_reason)
        delta: dict[str, Any] = {}
        for item in deltas:
            for name, value in _delta(item, thoughts=self._shows_thoughts).items():
                delta[name] = delta[name] + value if name in delta else value
        more: dict[str, Any] = {}
        if body.logprobs:
            entries = self.logprobs(piece.logprobs)
            more["logprobs"] = {"content": entries, "refusal": None}
        if options.token_ids:
            more["token_ids"] = list(piece.token_ids)
        # With continuous usage the finish reason is in the chunk of the last token, as in vLLM.
        stream = body.stream_options
        together = stream is not None and stream.continuous_usage_stats
        if delta or more or options.timings:
            content = {"delta": delta}
            result.append(self.chunk(index, content, reason if together else None, **more))
            reason = None if together else reason
        if reason is not None:
            result.append(self.chunk(index, self.nothing, reason))
        return result


def _call(tool_call: ToolCallDelta, *, complete: bool = False) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": tool_call.arguments}
    if tool_call.name is not None:
        function = {"name": tool_call.name, **function}
    head = {} if tool_call.id is None else {"id": tool_call.id, "type": "function"}
    return {**({} if complete else {"index": tool_call.index}), **head, "function": function}


def _delta(delta: OutputDelta, *, thoughts: bool = True) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if delta.content:
        result["content"] = delta.content
    if delta.reasoning and thoughts:
        result["reasoning_content"] = delta.reasoning
    calls = [
        _call(tool_call)
        for tool_call in delta.calls
        if tool_call.name is not None or tool_call.arguments
    ]
    if calls:
        result["tool_calls"] = calls
    return result


@routes.add(
    "POST /v1/chat/completions/input_tokens /chat/completions/input_tokens",
    TokenCount,
    tag="llama.cpp",
)
async def count_tokens(request: RequestContext[ChatRequest]) -> HttpResponse:
    """Count the tokens of a conversation."""
    settings, ignore = request.service.settings, request.ignore
    async with request.service.models.use(request.body.model) as model:
        arguments = request.body, model.session, settings, ignore
        prompt = await request.service.in_thread(build_chat_prompt, *arguments)
        ids = await request.service.in_thread(prompt.ids)
    return HttpResponse({"input_tokens": len(ids)})


@routes.add("POST /v1/chat/completions/batch", ChatResponse, tag="vLLM")
async def chat_batch(request: RequestContext[ChatBatchRequest]) -> HttpResponse:
    """Answer several conversations."""
    body = request.body
    if body.stream:
        raise invalid_request(
            "answers to several conversations are not streamed; leave it out", "stream"
        )
    if body.n is not None and body.n != 1:
        raise invalid_request("each conversation has a single answer; leave it out", "n")
    shared = {name: getattr(body, name) for name in body.model_fields_set - {"messages"}}
    chats = [ChatRequest.model_construct(messages=message, **shared) for message in body.messages]
    jobs = [asyncio.ensure_future(_batched(request, i, item)) for i, item in enumerate(chats)]
    try:
        answers = await asyncio.gather(*jobs)
    finally:
        for job in jobs:
            job.cancel()
    return HttpResponse(_joined(answers))


async def _batched(
    request: RequestContext[ChatBatchRequest], number: int, body: ChatRequest
) -> dict[str, Any]:
    try:
        own: Any = replace(request, body=cast("Any", body))
        reply = await chat(own)
    except ApiError as error:
        if error.param and error.param.startswith("messages"):
            error.param = f"messages.{number}{error.param.removeprefix('messages')}"
        raise
    content = cast("HttpResponse", reply).content
    return cast("dict[str, Any]", orjson.loads(content) if isinstance(content, bytes) else content)


def _joined(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the answers: a choice for each conversation, and the sum of the usage."""
    choices = [
        {**choice, "index": number}
        for number, answer in enumerate(answers)
        for choice in answer["choices"]
    ]
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    usage: dict[str, Any] = {
        name: sum(answer["usage"][name] for answer in answers) for name in names
    }
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    usage["prompt_tokens_details"] = {"cached_tokens": sum(cached)}
    return {**answers[0], "choices": choices, "usage": usage}
