"""Text completions: /v1/completions, whole and streamed (server-sent events)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from jinfer.engine.output.completion import Chunk, Completion, TokenLogprob
from jinfer.engine.requests import Request
from jinfer.server.core import usage
from jinfer.server.core.endpoint import Routes
from jinfer.server.core.prompt_builder import fim_options, infill_ids, prompt_ids
from jinfer.server.core.prompt_requests import PromptRequests, prepare_prompt
from jinfer.server.core.request_activations import captured
from jinfer.server.core.request_params import COMPLETIONS, request_options
from jinfer.server.core.sampling_fields import (
    SamplingFields,
    check_stream,
    ignore_verbose,
    reject_fields,
)
from jinfer.server.core.service import RequestContext
from jinfer.server.http import schema_base as base
from jinfer.server.http.http_errors import unsupported_field
from jinfer.server.http.http_responses import (
    SSE_MEDIA_TYPE,
    HttpResponse,
    StreamedResponse,
    dumps,
)
from jinfer.server.models.served_model import ServedModel
from jinfer.server.openai.openai_response import OpenAIFormatter, score_prompt, stream_answer
from jinfer.tokenizer import Tokenizer
from jinfer.tokenizer.detokenizer import Detokenizer
from jinfer.tokenizer.tokenizer_base import valid_text

routes = Routes(tag="OpenAI")


class CompletionRequest(SamplingFields):
    """A request to /v1/completions."""

    prompt: base.Prompts
    model: str | None = None
    stream: bool | None = None
    stream_options: base.StreamOptions | None = None
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    suffix: str | None = Field(None, description="text after the gap to fill in (FIM)")
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(None, description="in logprobs (vLLM)")
    user: str | None = Field(None, description="is logged")
    prompt_embeds: Annotated[None, base.rejected_field("prompts must be texts or token ids")] = None


class TextLogprobs(base.ResponseModel):
    """Log-probabilities of an answer's tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int]


class TextChoice(base.ResponseModel):
    """One answer."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class CompletionResponse(base.ResponseModel):
    """The response of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    system_fingerprint: str
    model: str
    choices: list[TextChoice]
    usage: base.TokenUsage
    timings: base.Timings | None = None


def token_offsets(detokenizer: Detokenizer, ids: Sequence[int]) -> list[int]:
    """Return the offset of each token in the decoded text.

    A token that continues a character has that character's offset. Advances the detokenizer.
    """
    result = []
    for id in ids:
        result.append(detokenizer.offset_of(id))
        detokenizer.push(id)
    return result


class TextOffsets:
    """Computes the text offsets of an answer's tokens incrementally."""

    def __init__(self, tokenizer: Tokenizer | None, request: Request) -> None:
        """Begin an answer; without a tokenizer all offsets are 0."""
        self._detokenizer = None
        self._shown = 0
        if tokenizer is not None:
            special = request.sampling.skip_special
            self._detokenizer = tokenizer.detokenizer(
                request.prompt, skip_special=special, shown=request.shown
            )

    def of(self, ids: Sequence[int], text: str = "", *, ended: bool = False) -> list[int]:
        """Return the offsets of more tokens.

        Args:
            text: the text shown with them; part may be held back for a stop text.
            ended: whether the text ends here, so that hidden tokens are at the end.
        """
        self._shown += len(text)
        if self._detokenizer is None:
            return [0] * len(ids)
        found = token_offsets(self._detokenizer, ids)
        return [min(place, self._shown) for place in found] if ended else found


def token_offsets_in(
    tokenizer: Tokenizer, text: str, ids: Sequence[int], *, last: bool = False
) -> list[int]:
    """Return the offset of each token in a text that may contain special tokens.

    Where the tokenizer normalizes the text, an offset is the length of the tokens before it, at
    most the text's length.

    Args:
        last: whether the tokens are the last tokens of the text.
    """
    data = valid_text(text).encode()
    begins = [0, *accumulate(len(letter.encode()) for letter in valid_text(text))]
    own = b"".join(map(tokenizer.token_bytes, ids))
    result, at = [], max(0, len(data) - len(own)) if last else 0
    for id in ids:
        own = tokenizer.spelled(id)
        if tokenizer.is_control(id) and not data.startswith(own, at):
            own = b""  # bytes that the tokenizer adds around a text
        if at == 0 and tokenizer.strip_space and not data.startswith(own):
            own = own.removeprefix(b" ")
        result.append(bisect_right(begins, at) - 1)
        at = min(at + len(own), len(data))
    return result


_ROUTE = frozenset(CompletionRequest.model_fields) - frozenset(SamplingFields.model_fields)


@routes.add("POST /v1/completions /completions", CompletionResponse, stream=SSE_MEDIA_TYPE)
async def completions(
    request: RequestContext[CompletionRequest],
) -> HttpResponse | StreamedResponse:
    """Continue texts."""
    body = request.body
    check_stream(body, body.stream, body.stream_options)
    ignore_verbose(body, body.stream, request.ignore)
    reject_fields(body, n_probs="use logprobs")
    if body.suffix and body.echo:
        raise unsupported_field("suffix and echo cannot be combined; leave one out", "echo")
    request.note(user=body.user)
    if body.stream:
        if body.echo and body.logprobs is not None:
            raise unsupported_field(
                "log-probabilities of an echoed prompt are not streamed", "echo"
            )
        if body.prompt_logprobs is not None:
            raise unsupported_field("streams have no prompt log-probabilities", "prompt_logprobs")
        return StreamedResponse(stream_answer(request, _prepare_prompts, _CompletionFormatter))
    async with request.running(_prepare_prompts) as (model, run):
        answer = _CompletionFormatter(request, model, run)
        await answer.score()
        groups = await run.completions()
        if body.logprobs is None and body.prompt_logprobs is None and not body.capture:
            return HttpResponse(answer.whole(groups))
        # Serializing many tokens takes long, so it runs in a worker thread.
        return HttpResponse(await request.service.in_thread(lambda: dumps(answer.whole(groups))))


def _prepare_prompts(
    request: RequestContext[CompletionRequest], model: ServedModel
) -> list[PromptRequests]:
    """Tokenize and validate the prompts. Slow: call it in a worker thread."""
    body, session, settings = request.body, model.session, request.service.settings
    changes = {} if body.logprobs is None else {"logprobs": body.logprobs}
    sampling = request_options(body, session, COMPLETIONS, changes, _ROUTE)
    if body.suffix:
        prompts = infill_ids(body.prompt, body.suffix, session, settings.max_prompts)
        sampling = fim_options(session, sampling)
    else:
        prompts = prompt_ids(
            body.prompt, session, settings.max_prompts, special=body.add_special_tokens
        )
    return [
        prepare_prompt(session, ids, sampling, param="prompt", timeout=settings.timeout)
        for ids in prompts
    ]


class _CompletionFormatter(OpenAIFormatter):
    """Formats the answers to a completion request.

    Attributes:
        prompt_logprobs: log-probabilities of each prompt's tokens, if requested.
        offsets: text offsets of streamed answers, by index.
    """

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    nothing: ClassVar[dict[str, Any]] = {"text": ""}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.jobs = self.run.jobs
        self.prompt_logprobs: list[list[TokenLogprob]] = []
        self.offsets: dict[int, TextOffsets] = {}

    @property
    def _as_ids(self) -> bool:
        """Whether log-probabilities show token ids in place of texts."""
        return bool(self.request.body.return_tokens_as_token_ids)

    async def score(self) -> None:
        """Compute the prompts' log-probabilities, if requested."""
        body = self.request.body
        tops = [body.prompt_logprobs, body.logprobs if body.echo else None]
        counts = [top for top in tops if top is not None]
        if not counts:
            return
        for job in self.jobs:
            found = await self.request.service.in_engine_thread(
                score_prompt, self.model.session, job.ids, max(counts)
            )
            self.prompt_logprobs.append(found)

    def whole(self, groups: list[list[Completion]]) -> dict[str, Any]:
        """Return the response body with all choices."""
        answers = [(i, answer) for i, group in enumerate(groups) for answer in group]
        choices = [self._choice(number, *answer) for number, answer in enumerate(answers)]
        more = self.verbose(0, self.jobs[0], groups[0][0])
        return self.body(choices, groups[0][0].usage) | more

    def _choice(self, number: int, prompt: int, answer: Completion) -> dict[str, Any]:
        body, job = self.request.body, self.jobs[prompt]
        echoed = self.echoed_text(prompt)
        text = echoed + answer.text
        choice: dict[str, Any] = {
            "index": number,
            "text": text,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
        }
        if body.logprobs is not None:
            entries = answer.logprobs or []
            before = self.prompt_logprobs[prompt] if body.echo else []
            ids = job.ids[:1] if body.echo else []
            offsets = self._prompt_offsets(prompt) if body.echo else []
            own = self._offsets(prompt).of([entry.id for entry in entries])
            offsets += [len(echoed) + place for place in own]
            offsets = [min(place, len(text)) for place in offsets]
            choice["logprobs"] = self._logprobs([*before, *entries], ids, offsets)
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = [
                None,
                *map(usage.ranked_logprobs, self.prompt_logprobs[prompt]),
            ]
        if job.options.token_ids:
            choice["prompt_token_ids"] = job.ids
            choice["token_ids"] = answer.token_ids
        return choice | captured(answer.captured, body)

    def echoed_text(self, prompt: int) -> str:
        """Return the prompt's text, if the answer echoes it; else ""."""
        if not self.request.body.echo:
            return ""
        if (text := self._sent_text(prompt)) is not None:
            return text
        tokenizer = self.model.llm.tokenizer
        return "" if tokenizer is None else tokenizer.decode(self.jobs[prompt].ids)

    def _offsets(self, prompt: int) -> TextOffsets:
        """Create the text offsets of a new answer."""
        return TextOffsets(self.model.llm.tokenizer, self.jobs[prompt].engine_requests[0].request)

    def _prompt_offsets(self, prompt: int) -> list[int]:
        """Return the text offset of each token of an echoed prompt."""
        ids, tokenizer = self.jobs[prompt].ids, self.model.llm.tokenizer
        if tokenizer is None:
            return [0] * len(ids)
        if (text := self._sent_text(prompt)) is not None:
            cut = self.request.body.truncate_prompt_tokens is not None
            return token_offsets_in(tokenizer, text, ids, last=cut)
        return token_offsets(tokenizer.detokenizer(), ids)

    def _sent_text(self, prompt: int) -> str | None:
        """Return the text of a prompt; None if it was sent as token ids."""
        prompts = self.request.body.prompt
        item = prompts if isinstance(prompts, str) else prompts[prompt]
        return item if isinstance(item, str) else None

    def _logprobs(
        self, entries: Sequence[TokenLogprob], first: Sequence[int], offsets: Sequence[int]
    ) -> dict[str, Any]:
        """Convert log-probabilities to the format of completions."""
        tokenizer = self.model.llm.tokenizer
        ids = [*first, *(entry.id for entry in entries)]
        unknown: list[None] = [None] * len(first)
        return {
            "tokens": [usage.token_text(tokenizer, id, self._as_ids) for id in ids],
            "token_logprobs": [
                *unknown,
                *(usage.finite_logprob(entry.logprob) for entry in entries),
            ],
            "top_logprobs": [*unknown, *(self._top(entry) for entry in entries)],
            "text_offset": [*offsets],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        tokenizer, as_ids = self.model.llm.tokenizer, self._as_ids
        # The sampled token is always listed, as in vLLM.
        return {
            usage.token_key(tokenizer, token.id, as_ids): usage.finite_logprob(token.logprob)
            for token in (*entry.top, entry)
        }

    def events(self, index: int, piece: Chunk) -> list[dict[str, Any]]:
        """Return the events of an engine chunk."""
        body, prompt, job = self.request.body, self.run.owners[index], self.run.job(index)
        first = index not in self.offsets
        offsets = self.offsets[index] = self._offsets(prompt) if first else self.offsets[index]
        text = self.echoed_text(prompt) + piece.text if first else piece.text
        more: dict[str, Any] = {}
        if body.logprobs is not None:
            last = piece.finish_reason is not None
            own = offsets.of(piece.token_ids, piece.text, ended=last)
            more["logprobs"] = self._logprobs(piece.logprobs, (), own)
        if job.options.token_ids:
            more["token_ids"] = list(piece.token_ids)
            if first:
                more["prompt_token_ids"] = job.ids
        self.run.mark_shown(index, piece)
        reason = piece.finish_reason
        if text or more or reason is not None or job.options.timings:
            return [self.chunk(index, {"text": text}, reason, **more)]
        return []
