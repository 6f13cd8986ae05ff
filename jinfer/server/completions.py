"""Text completions: /v1/completions, whole and streamed (server-sent events)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from jinfer.engine.output.completion import Chunk, Completion, TokenLogprob
from jinfer.server import usage
from jinfer.server.field_checks import check_stream, ignore_verbose, reject_fields
from jinfer.server.http_errors import unsupported_field
from jinfer.server.http_responses import HttpResponse, StreamedResponse, dumps
from jinfer.server.infill import fim_options, infill_ids
from jinfer.server.openai_answer import OpenAIAnswer, stream_answer
from jinfer.server.prompt_builder import prompt_ids
from jinfer.server.prompt_logprobs import score_prompt
from jinfer.server.request_activations import captured
from jinfer.server.request_params import COMPLETIONS, request_options
from jinfer.server.request_runner import PromptRequests, prepare_prompt
from jinfer.server.schemas.completions import CompletionRequest
from jinfer.server.schemas.sampling_fields import SamplingFields
from jinfer.server.served_model import ServedModel
from jinfer.server.service import RequestContext
from jinfer.server.text_offsets import TextOffsets, token_offsets, token_offsets_in

_ROUTE = frozenset(CompletionRequest.model_fields) - frozenset(SamplingFields.model_fields)


async def completions(call: RequestContext[CompletionRequest]) -> HttpResponse | StreamedResponse:
    """Handles a completion request."""
    body = call.body
    check_stream(body, body.stream, body.stream_options)
    ignore_verbose(body, body.stream, call.ignore)
    reject_fields(body, n_probs="log-probabilities are given with logprobs")
    if body.suffix and body.echo:
        raise unsupported_field(
            "what is filled in stands inside of the text; leave one out", "echo"
        )
    call.note(user=body.user)
    if body.stream:
        if body.echo and body.logprobs is not None:
            raise unsupported_field(
                "log-probabilities of an echoed prompt are not streamed", "echo"
            )
        if body.prompt_logprobs is not None:
            raise unsupported_field("they are not streamed", "prompt_logprobs")
        return StreamedResponse(stream_answer(call, _prepare_prompts, _TextAnswers))
    async with call.running(_prepare_prompts) as (hosted, run):
        answer = _TextAnswers(call, hosted, run)
        await answer.score()
        groups = await run.completions()
        if body.logprobs is None and body.prompt_logprobs is None and not body.capture:
            return HttpResponse(answer.whole(groups))
        # Serializing many tokens takes long, so it runs in a worker thread.
        return HttpResponse(await call.service.in_thread(lambda: dumps(answer.whole(groups))))


def _prepare_prompts(
    call: RequestContext[CompletionRequest], hosted: ServedModel
) -> list[PromptRequests]:
    """Tokenizes and validates the prompts. Slow: call it in a worker thread."""
    body, session, settings = call.body, hosted.session, call.service.settings
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


class _TextAnswers(OpenAIAnswer):
    """A completion request that is being answered.

    Attributes:
        prompt_logprobs: log-probabilities of each prompt's tokens, if requested.
        offsets: text offsets of the answers that have begun to be streamed, by index.
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
        return bool(self.call.body.return_tokens_as_token_ids)

    async def score(self) -> None:
        """Computes the prompts' log-probabilities, if requested."""
        body = self.call.body
        tops = [body.prompt_logprobs, body.logprobs if body.echo else None]
        wanted = [top for top in tops if top is not None]
        if not wanted:
            return
        for job in self.jobs:
            found = await self.call.service.in_engine_thread(
                score_prompt, self.hosted.session, job.ids, max(wanted)
            )
            self.prompt_logprobs.append(found)

    def whole(self, groups: list[list[Completion]]) -> dict[str, Any]:
        """The response body with all choices."""
        answers = [(i, answer) for i, group in enumerate(groups) for answer in group]
        choices = [self._choice(number, *answer) for number, answer in enumerate(answers)]
        more = self.verbose(0, self.jobs[0], groups[0][0])
        return self.body(choices, groups[0][0].usage) | more

    def _choice(self, number: int, prompt: int, answer: Completion) -> dict[str, Any]:
        body, job = self.call.body, self.jobs[prompt]
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
            own = self._offsets(prompt).of([one.id for one in entries])
            offsets += [len(echoed) + place for place in own]
            offsets = [min(place, len(text)) for place in offsets]
            choice["logprobs"] = self._logprobs([*before, *entries], ids, offsets)
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = [
                None,
                *map(usage.ranked_logprobs, self.prompt_logprobs[prompt]),
            ]
        if job.sampling.token_ids:
            choice["prompt_token_ids"] = job.ids
            choice["token_ids"] = answer.token_ids
        return choice | captured(answer.captured, body)

    def echoed_text(self, prompt: int) -> str:
        """The prompt's text, if the answer echoes it; else ""."""
        if not self.call.body.echo:
            return ""
        if (text := self._sent_text(prompt)) is not None:
            return text
        tokenizer = self.hosted.llm.tokenizer
        return "" if tokenizer is None else tokenizer.decode(self.jobs[prompt].ids)

    def _offsets(self, prompt: int) -> TextOffsets:
        """Text offsets for a new answer to a prompt."""
        return TextOffsets(self.hosted.llm.tokenizer, self.jobs[prompt].engine_requests[0].request)

    def _prompt_offsets(self, prompt: int) -> list[int]:
        """The text offset of each token of an echoed prompt."""
        ids, tokenizer = self.jobs[prompt].ids, self.hosted.llm.tokenizer
        if tokenizer is None:
            return [0] * len(ids)
        if (text := self._sent_text(prompt)) is not None:
            cut = self.call.body.truncate_prompt_tokens is not None
            return token_offsets_in(tokenizer, text, ids, last=cut)
        return token_offsets(tokenizer.detokenizer(), ids)

    def _sent_text(self, prompt: int) -> str | None:
        """A prompt that was sent as a text; None for token ids."""
        given = self.call.body.prompt
        one = given if isinstance(given, str) else given[prompt]
        return one if isinstance(one, str) else None

    def _logprobs(
        self, entries: Sequence[TokenLogprob], first: Sequence[int], offsets: Sequence[int]
    ) -> dict[str, Any]:
        """Log-probabilities in the format of completions; the first token of a prompt has none."""
        tokenizer = self.hosted.llm.tokenizer
        ids = [*first, *(one.id for one in entries)]
        unknown: list[None] = [None] * len(first)
        return {
            "tokens": [usage.token_text(tokenizer, id, self._as_ids) for id in ids],
            "token_logprobs": [*unknown, *(usage.finite_logprob(one.logprob) for one in entries)],
            "top_logprobs": [*unknown, *(self._top(one) for one in entries)],
            "text_offset": [*offsets],
        }

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        tokenizer, as_ids = self.hosted.llm.tokenizer, self._as_ids
        # The sampled token is listed too, even if it is not among the likeliest.
        return {
            usage.token_key(tokenizer, each.id, as_ids): usage.finite_logprob(each.logprob)
            for each in (*one.top, one)
        }

    def events(self, index: int, piece: Chunk) -> list[dict[str, Any]]:
        """The events of one engine chunk."""
        body, prompt, job = self.call.body, self.run.owners[index], self.run.job(index)
        first = index not in self.offsets
        offsets = self.offsets[index] = self._offsets(prompt) if first else self.offsets[index]
        text = self.echoed_text(prompt) + piece.text if first else piece.text
        more: dict[str, Any] = {}
        if body.logprobs is not None:
            last = piece.finish_reason is not None
            own = offsets.of(piece.token_ids, piece.text, ended=last)
            more["logprobs"] = self._logprobs(piece.logprobs, (), own)
        if job.sampling.token_ids:
            more["token_ids"] = list(piece.token_ids)
            if first:
                more["prompt_token_ids"] = job.ids
        self.run.mark_shown(index, piece)
        reason = piece.finish_reason
        if text or more or reason is not None or job.sampling.timings:
            return [self.chunk(index, {"text": text}, reason, **more)]
        return []
