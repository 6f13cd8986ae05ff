"""Chat completions: /v1/chat/completions, whole and streamed (server-sent events)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from jinfer.engine.output.completion import Chunk, Completion, TokenLogprob
from jinfer.engine.requests import RequestError
from jinfer.sampling.request_errors import ConstraintError
from jinfer.server import usage
from jinfer.server.field_checks import check_stream, ignore_verbose, reject_fields
from jinfer.server.http_errors import as_api_error, invalid_request, unsupported_field
from jinfer.server.http_responses import HttpResponse, StreamedResponse, dumps
from jinfer.server.ignored_fields import Ignore
from jinfer.server.openai_answer import OpenAIAnswer, stream_answer
from jinfer.server.output_deltas import OutputDelta, OutputParser, OutputParsing, ToolCallDelta
from jinfer.server.prompt_builder import chat_prompt_ids, request_template
from jinfer.server.prompt_logprobs import score_prompt
from jinfer.server.request_activations import captured
from jinfer.server.request_params import CHAT, RequestOptions, request_options
from jinfer.server.request_runner import PromptRequests, prepare_prompt
from jinfer.server.schemas.chat import ChatRequest
from jinfer.server.schemas.sampling_fields import SamplingFields
from jinfer.server.served_model import ServedModel
from jinfer.server.service import RequestContext, Service
from jinfer.server.thinking_choice import (
    UNLIMITED,
    ThinkingChoice,
    choose_thinking,
    without_budget,
)
from jinfer.server.tool_calls import output_parsing
from jinfer.template import TemplateError

# Fields that are no sampling parameters.
CHAT_FIELDS = frozenset(ChatRequest.model_fields) - frozenset(SamplingFields.model_fields)


async def chat(call: RequestContext[ChatRequest]) -> HttpResponse | StreamedResponse:
    """Handles a chat completion request."""
    body = call.body
    check_stream(body, body.stream, body.stream_options)
    ignore_verbose(body, body.stream, call.ignore)
    reject_fields(body, n_probs="log-probabilities are given with logprobs and top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise unsupported_field("they are not streamed", "prompt_logprobs")
    if body.top_logprobs and not body.logprobs:
        raise invalid_request("it needs logprobs: true", "top_logprobs")
    call.note(user=body.user or body.safety_identifier, metadata=body.metadata)
    if body.stream:
        return StreamedResponse(stream_answer(call, _prepare, _ChatAnswer))
    async with call.running(_prepare) as (hosted, run):
        answer = _ChatAnswer(call, hosted, run)
        more: dict[str, Any] = {}
        if body.prompt_logprobs is not None:
            wanted = score_prompt, hosted.session, answer.job.ids, body.prompt_logprobs
            scored = await call.service.in_engine_thread(*wanted)
            more["prompt_logprobs"] = [None, *map(usage.ranked_logprobs, scored)]
        (answers,) = await run.completions()
        if not more and not body.logprobs and not body.capture:
            return HttpResponse(answer.whole(answers))
        # Serializing many tokens takes long, so it runs in a worker thread.
        return HttpResponse(
            await call.service.in_thread(lambda: dumps(answer.whole(answers) | more))
        )


def _prepare(call: RequestContext[ChatRequest], hosted: ServedModel) -> list[PromptRequests]:
    return [prepare_chat(call.service, call.body, hosted, call.ignore)]


def prepare_chat(
    service: Service,
    body: ChatRequest,
    hosted: ServedModel,
    ignore: Ignore,
    *,
    base: Mapping[str, Any] = CHAT,
    before: Sequence[int] = (),
) -> PromptRequests:
    """Builds a conversation's prompt and output parser. Slow: call it in a worker thread.

    Args:
        ignore: records fields that have no effect.
        base: the route's defaults, below the model's.
        before: the tokens of an earlier prompt and its answer, which the conversation follows.

    Raises:
        ApiError: the request cannot be answered.
    """
    session, settings = hosted.session, service.settings
    try:
        ids = chat_prompt_ids(body, session, settings, ignore)
    except (TemplateError, RequestError) as error:
        raise as_api_error(error, param="messages") from error
    if before:
        # One BOS is enough; in ChatML it is not that, but the beginning of each message.
        alone = ids[0] == session.tokenizer.bos_id and ids[0] not in ids[1:]
        ids = [*before, *ids[alone:]]
    parsing = output_parsing(body, body.parallel_tool_calls is not False, session, ids, ignore)
    if (
        parsing.param_changes
        and body.response_format is not None
        and body.response_format.type != "text"
    ):
        # The format concerns the content, and a forced tool call has none.
        ignore("response_format", "it cannot be used where tools have to be called")
        body = body.model_copy(update={"response_format": None})
    changes: dict[str, Any] = dict(parsing.param_changes)
    if body.logprobs:
        changes["logprobs"] = body.top_logprobs or 0
    body = without_budget(body, session.opened, ignore)
    sampling = request_options(body, session, base, changes, CHAT_FIELDS)
    thinking = choose_thinking(body, request_template(body, session, settings), session.opened)
    sampling = _with_budget(sampling, thinking)
    if parsing.param_changes:
        sampling = replace(
            sampling, names={**sampling.names, **dict.fromkeys(parsing.param_changes, "tools")}
        )
    elif sampling.params.constrained:
        sampling, parsing = _constrained(sampling, parsing)
    return prepare_prompt(
        session, ids, sampling, param="messages", timeout=settings.timeout, parsing=parsing
    )


def _with_budget(sampling: RequestOptions, chosen: ThinkingChoice) -> RequestOptions:
    """Applies the thinking budget that fields of the conversation say."""
    if chosen.budget is None:
        return sampling
    name, budget = "thinking_token_budget", None if chosen.budget == UNLIMITED else chosen.budget
    other = sampling.names.get(name)
    if other is not None and sampling.params.thinking_token_budget != budget:
        raise invalid_request(
            f"{other} and {chosen.budget_field} say different things", chosen.budget_field
        )
    params = replace(sampling.params, thinking_token_budget=budget)
    return replace(sampling, params=params, names={**sampling.names, name: chosen.budget_field})


def _constrained(
    sampling: RequestOptions, parsing: OutputParsing
) -> tuple[RequestOptions, OutputParsing]:
    """Applies a constraint to the answer: no tool calls, and reasoning only before JSON."""
    schema = sampling.params.json_schema
    if schema is None or parsing.constrained is None:
        return sampling, OutputParsing()
    field = sampling.names.get("json_schema", "response_format")
    try:
        parsing = parsing.constrained(schema)
    except ConstraintError as error:
        raise as_api_error(error, param=field) from error
    if parsing.param_changes:
        params = replace(sampling.params, json_schema=None, **parsing.param_changes)
        sampling = replace(sampling, params=params, names={**sampling.names, "grammar": field})
    return sampling, parsing


class _ChatAnswer(OpenAIAnswer):
    """A chat request that is being answered."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    nothing: ClassVar[dict[str, Any]] = {"delta": {}}

    def __post_init__(self) -> None:
        super().__post_init__()
        (self.job,) = self.run.jobs
        self.parsed = [ParsedAnswer(self.job.parsing.parser()) for _ in self.run.prepared]

    def whole(self, answers: list[Completion]) -> dict[str, Any]:
        """The response body with all choices."""
        choices = [self._choice(i, answer) for i, answer in enumerate(answers)]
        more = {"prompt_token_ids": self.job.ids} if self.job.sampling.token_ids else {}
        more |= self._prompt_text() | self.verbose(0, self.job, answers[0])
        return self.body(choices, answers[0].usage) | more

    def _prompt_text(self) -> dict[str, Any]:
        """What the model reads, if requested."""
        if not self.call.body.return_prompt_text:
            return {}
        tokenizer = self.hosted.session.tokenizer
        return {"prompt_text": tokenizer.decode(self.job.ids, skip_special=False)}

    @property
    def _shows_thoughts(self) -> bool:
        """Whether thoughts are part of the answer."""
        body = self.call.body
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
            message["tool_calls"] = [_call(one, complete=True) for one in reading.calls.values()]
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": self._reason(reading, answer.finish_reason),
        }
        if self.call.body.logprobs:
            entries = self.logprobs(answer.logprobs or ())
            choice["logprobs"] = {"content": entries, "refusal": None}
        if self.job.sampling.token_ids:
            choice["token_ids"] = answer.token_ids
        return choice | captured(answer.captured, self.call.body)

    def logprobs(self, entries: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
        """Log-probabilities in the format of chat completions."""
        as_ids = self.call.body.return_tokens_as_token_ids
        return usage.chat_logprobs(self.hosted.llm.tokenizer, entries, as_ids)

    def _reason(self, reading: ParsedAnswer, reason: str) -> str:
        return "tool_calls" if reading.calls and reason == "stop" else reason

    def events(self, index: int, piece: Chunk) -> list[dict[str, Any]]:
        """The events of one engine chunk."""
        result: list[dict[str, Any]] = []
        reading, body, sampling = self.parsed[index], self.call.body, self.job.sampling
        if not reading.started:
            reading.started = True
            result.append(self.chunk(index, {"delta": {"role": "assistant", "content": ""}}))
            if sampling.token_ids:
                result[-1]["prompt_token_ids"] = self.job.ids
            result[-1] |= self._prompt_text()
        self.run.mark_shown(index, piece)
        deltas = [reading.push(piece.text)] if piece.text else []
        reason = None
        if piece.finish_reason is not None:
            deltas.append(reading.finish(piece.finish_reason))
            reason = self._reason(reading, piece.finish_reason)
        delta: dict[str, Any] = {}
        for one in deltas:
            for name, value in _delta(one, thoughts=self._shows_thoughts).items():
                delta[name] = delta[name] + value if name in delta else value
        more: dict[str, Any] = {}
        if body.logprobs:
            entries = self.logprobs(piece.logprobs)
            more["logprobs"] = {"content": entries, "refusal": None}
        if sampling.token_ids:
            more["token_ids"] = list(piece.token_ids)
        # With continuous usage, as in vLLM, the finish reason comes in the chunk of the last token.
        options = body.stream_options
        together = options is not None and options.continuous_usage_stats
        if delta or more or sampling.timings:
            said = {"delta": delta}
            result.append(self.chunk(index, said, reason if together else None, **more))
            reason = None if together else reason
        if reason is not None:
            result.append(self.chunk(index, self.nothing, reason))
        return result


@dataclass
class ParsedAnswer:
    """One answer, parsed incrementally into content, reasoning and tool calls."""

    parser: OutputParser
    content: str = ""
    reasoning: str = ""
    calls: dict[int, ToolCallDelta] = field(default_factory=dict)
    started: bool = False

    def push(self, text: str) -> OutputDelta:
        """Parses more text."""
        return self._keep(self.parser.push(text))

    def finish(self, reason: str) -> OutputDelta:
        """Parses the end of the answer, given its finish reason."""
        return self._keep(self.parser.finish(reason == "length"))

    def _keep(self, delta: OutputDelta) -> OutputDelta:
        self.content += delta.content
        self.reasoning += delta.reasoning
        for one in delta.calls:
            if one.end == "void":
                self.calls.pop(one.index, None)
                continue
            known = self.calls.get(one.index, ToolCallDelta(one.index))
            arguments = known.arguments + one.arguments
            self.calls[one.index] = ToolCallDelta(
                one.index, known.id or one.id, known.name or one.name, arguments
            )
        return delta


def _call(one: ToolCallDelta, *, complete: bool = False) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": one.arguments}
    if one.name is not None:
        function = {"name": one.name, **function}
    head = {} if one.id is None else {"id": one.id, "type": "function"}
    return {**({} if complete else {"index": one.index}), **head, "function": function}


def _delta(delta: OutputDelta, *, thoughts: bool = True) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if delta.content:
        result["content"] = delta.content
    if delta.reasoning and thoughts:
        result["reasoning_content"] = delta.reasoning
    calls = [_call(one) for one in delta.calls if one.name is not None or one.arguments]
    if calls:
        result["tool_calls"] = calls
    return result
