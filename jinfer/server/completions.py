"""Text completions: /v1/completions, whole and streamed (server-sent events)."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinfer.engine.output.generation import Chunk, Completion
from jinfer.engine.output.token_logprob import TokenLogprob
from jinfer.server import stream_frames, usage
from jinfer.server.http_errors import unsupported_field
from jinfer.server.http_responses import SSE_DONE, HttpResponse, StreamedResponse, dumps, sse_event
from jinfer.server.model_manager import ServedModel
from jinfer.server.prompt_builder import prompt_ids
from jinfer.server.prompt_logprobs import score_prompt
from jinfer.server.request_params import COMPLETIONS, request_options
from jinfer.server.request_runner import PromptRequests, RequestRunner, prepare_prompt
from jinfer.server.schemas.completions import CompletionRequest
from jinfer.server.schemas.sampling_fields import SamplingFields
from jinfer.server.service import RequestContext
from jinfer.server.stream_frames import (
    batch_bytes,
    check_stream,
    chunk_object,
    final_event,
    reject_fields,
)
from jinfer.server.text_offsets import TextOffsets, token_offsets, token_offsets_in

_ROUTE = frozenset(CompletionRequest.model_fields) - frozenset(SamplingFields.model_fields)


async def completions(call: RequestContext[CompletionRequest]) -> HttpResponse | StreamedResponse:
    """Handles a completion request."""
    body = call.body
    check_stream(body, body.stream, body.stream_options)
    reject_fields(
        body,
        suffix="a text is continued, not filled in",
        n_probs="log-probabilities are given with logprobs",
    )
    if body.stream:
        if body.echo and body.logprobs is not None:
            raise unsupported_field(
                "log-probabilities of an echoed prompt are not streamed", "echo"
            )
        if body.prompt_logprobs is not None:
            raise unsupported_field("they are not streamed", "prompt_logprobs")
        return StreamedResponse(_stream_events(call))
    async with _run_request(call) as answer:
        groups = await answer.run.completions()
        if body.logprobs is None and body.prompt_logprobs is None:
            return HttpResponse(answer.body(groups))
        # Serializing many tokens takes long, so it runs in a worker thread.
        return HttpResponse(await call.service.in_thread(lambda: dumps(answer.body(groups))))


@contextlib.asynccontextmanager
async def _run_request(call: RequestContext[CompletionRequest]) -> AsyncIterator[_TextAnswers]:
    """Runs a request on its model, which stays loaded meanwhile."""
    service = call.service
    call.note(user=call.body.user)
    async with service.models.use(call.body.model) as hosted:
        call.note(model=hosted.name)
        jobs = await service.in_prepare_thread(call.body, _prepare_prompts, call, hosted)
        run = service.runner(hosted, jobs)
        answer = _TextAnswers(call, hosted, jobs, run)
        try:
            await answer.score()
            yield answer
        finally:
            call.note(**run.summary())


def _prepare_prompts(
    call: RequestContext[CompletionRequest], hosted: ServedModel
) -> list[PromptRequests]:
    """Tokenizes and validates the prompts. Slow: call it in a worker thread."""
    body, session, settings = call.body, hosted.session, call.service.settings
    changes = {} if body.logprobs is None else {"logprobs": body.logprobs}
    sampling = request_options(body, session, COMPLETIONS, changes, _ROUTE)
    prompts = prompt_ids(
        body.prompt, session, settings.max_prompts, special=body.add_special_tokens
    )
    return [
        prepare_prompt(session, ids, sampling, param="prompt", timeout=settings.timeout)
        for ids in prompts
    ]


@dataclass
class _TextAnswers:
    """A completion request that is being answered.

    Attributes:
        prompt_logprobs: log-probabilities of each prompt's tokens, if requested.
    """

    call: RequestContext[CompletionRequest]
    hosted: ServedModel
    jobs: list[PromptRequests]
    run: RequestRunner
    prompt_logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

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

    def body(self, groups: list[list[Completion]]) -> dict[str, Any]:
        """The response body with all choices."""
        answers = [(i, answer) for i, group in enumerate(groups) for answer in group]
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.hosted.name,
            "choices": [
                self._choice(number, prompt, answer)
                for number, (prompt, answer) in enumerate(answers)
            ],
            "usage": usage.usage(self.jobs, self.run.usages),
            "timings": usage.llamacpp_timings(answers[0][1].usage),
        }

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
        return choice

    def echoed_text(self, prompt: int) -> str:
        """The prompt's text, if the answer echoes it; else ""."""
        if not self.call.body.echo:
            return ""
        given = self.call.body.prompt
        if isinstance(given, str):
            return given
        one = given[prompt] if given and not isinstance(given[0], int) else given
        if isinstance(one, str):
            return one
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
        if self._is_text(prompt):
            cut = self.call.body.truncate_prompt_tokens is not None
            return token_offsets_in(tokenizer, self.echoed_text(prompt), ids, last=cut)
        return token_offsets(tokenizer.detokenizer(), ids)

    def _is_text(self, prompt: int) -> bool:
        given = self.call.body.prompt
        return isinstance(given, str) or (bool(given) and isinstance(given[prompt], str))

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

    def chunk(
        self, number: int, text: str, reason: str | None = None, **more: Any
    ) -> dict[str, Any]:
        """A streamed chunk of one choice."""
        return self.frame([stream_frames.chunk_choice(number, {"text": text}, reason, more)])

    def frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The fields that every chunk has."""
        head = (self.id, "text_completion", self.created, self.hosted.name)
        return chunk_object(*head, self.call.body.stream_options, choices)

    def events(
        self, index: int, piece: Chunk, begun: dict[int, TextOffsets]
    ) -> list[dict[str, Any]]:
        """The events of one engine chunk.

        Args:
            begun: text offsets of the answers that have begun, by index.
        """
        body = self.call.body
        result: list[dict[str, Any]] = []
        prompt, job = self._prompt(index), self._job(index)
        first = index not in begun
        offsets = begun.setdefault(index, self._offsets(prompt)) if first else begun[index]
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
            result.append(self._with_usage(index, self.chunk(index, text, reason, **more)))
        return result

    def progress(self, *, first: bool) -> list[bytes]:
        """Prefill progress events, if requested; see `RequestRunner.progress`."""
        if not self.call.body.return_progress:
            return []
        return [
            sse_event({**self._with_usage(index, self.chunk(index, "")), "prompt_progress": known})
            for index, known in self.run.progress(first=first)
        ]

    def _with_usage(self, index: int, chunk: dict[str, Any]) -> dict[str, Any]:
        """A chunk with the usage and timings that the request asked for."""
        job, options = self._job(index), self.call.body.stream_options
        return chunk | stream_frames.chunk_usage(job, options, self.run.shown_usage(index))

    def _job(self, index: int) -> PromptRequests:
        return self.jobs[self._prompt(index)]

    def _prompt(self, index: int) -> int:
        return next(i for i, job in enumerate(self._owners) if index < job)

    def __post_init__(self) -> None:
        self._owners: list[int] = []
        for job in self.jobs:
            self._owners.append(
                len(job.engine_requests) + (self._owners[-1] if self._owners else 0)
            )


async def _stream_events(call: RequestContext[CompletionRequest]) -> AsyncGenerator[bytes]:
    """The server-sent events of a streamed answer."""
    async with _run_request(call) as answer, contextlib.aclosing(answer.run.chunks()) as pieces:
        begun: dict[int, TextOffsets] = {}
        async for batch in pieces:
            events = answer.progress(first=batch != [])
            for i, piece in batch or ():
                events += [sse_event(one) for one in answer.events(i, piece, begun)]
            yield batch_bytes(events, batch)
        yield final_event(call.body.stream_options, answer.frame([]), answer.jobs, answer.run)
        yield SSE_DONE
