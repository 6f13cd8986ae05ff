"""llama.cpp API: /completion, and /props and /slots, which its clients query."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from jinfer.api.session import Session
from jinfer.engine.output.completion import Chunk, Completion, TokenLogprob, completion
from jinfer.server import usage
from jinfer.server.field_checks import NO_CAPTURE, check_stream, reject_fields
from jinfer.server.http_errors import unsupported_field
from jinfer.server.http_responses import HttpResponse, StreamedResponse, batch_bytes, sse_event
from jinfer.server.native_answer import set_parameters, slot_of, statistics
from jinfer.server.prompt_builder import is_single_prompt, prompt_ids
from jinfer.server.request_params import LLAMA_CPP, RequestOptions, request_options
from jinfer.server.request_runner import PromptRequests, RequestRunner, prepare_prompt
from jinfer.server.schemas.llamacpp_api import LlamaPrompt, LlamaRequest, LlamaText
from jinfer.server.schemas.sampling_fields import SamplingFields
from jinfer.server.served_model import ServedModel
from jinfer.server.service import Prepare, RequestContext
from jinfer.version import __version__

_ROUTE = frozenset(LlamaRequest.model_fields) - frozenset(SamplingFields.model_fields)


async def completion_route(call: RequestContext[LlamaRequest]) -> HttpResponse | StreamedResponse:
    """Handles a completion request."""
    return await answer_prompts(call, _prepare_prompts)


async def answer_prompts(
    call: RequestContext[LlamaRequest], prepare: Prepare
) -> HttpResponse | StreamedResponse:
    """Answers prompts in llama.cpp's format, whole or streamed."""
    body = call.body
    check_stream(body, body.stream, None)
    if body.prompt_logprobs is not None:
        raise unsupported_field("they are given by /v1/completions", "prompt_logprobs")
    reject_fields(body, return_token_ids="ids are given with return_tokens", capture=NO_CAPTURE)
    if body.stream:
        return StreamedResponse(_stream_events(call, prepare))
    async with call.running(prepare) as (hosted, run):
        answer = _LlamaAnswers(call, hosted, run)
        whole = [(i, one) for i, group in enumerate(await run.completions()) for one in group]
        answers = [answer.body(number, *one) for number, one in enumerate(whole)]
        return HttpResponse(answers[0] if answer.single else answers)


def _prepare_prompts(
    call: RequestContext[LlamaRequest], hosted: ServedModel
) -> list[PromptRequests]:
    session, limit = hosted.session, call.service.settings.max_prompts
    sampling = request_options(call.body, session, LLAMA_CPP, None, _ROUTE)
    prompts = prompt_ids(_plain(call.body.prompt), session, limit)
    return prepare_llama(call, session, prompts, sampling)


def prepare_llama(
    call: RequestContext[LlamaRequest],
    session: Session,
    prompts: Sequence[list[int]],
    sampling: RequestOptions,
    param: str = "prompt",
) -> list[PromptRequests]:
    """The engine requests of prompts. Raises `ApiError`."""
    timeout = call.service.settings.timeout
    return [prepare_prompt(session, ids, sampling, param=param, timeout=timeout) for ids in prompts]


def _plain(prompt: LlamaPrompt) -> str | list[Any]:
    """A prompt in the format of the other routes."""
    if isinstance(prompt, list):
        return [one.prompt_string if isinstance(one, LlamaText) else one for one in prompt]
    return prompt.prompt_string if isinstance(prompt, LlamaText) else prompt


@dataclass
class _LlamaAnswers:
    """A llama.cpp completion request that is being answered."""

    call: RequestContext[LlamaRequest]
    hosted: ServedModel
    run: RequestRunner

    @property
    def single(self) -> bool:
        """Whether there is a single answer, which is then not in a list."""
        return is_single_prompt(_plain(self.call.body.prompt)) and len(self.run.prepared) == 1

    def body(self, index: int, prompt: int, answer: Completion) -> dict[str, Any]:
        """The response body of one answer."""
        shown = {
            "index": index,
            "content": answer.text,
            "tokens": answer.token_ids if self.call.body.return_tokens else [],
            **statistics(self.hosted, self.run.jobs[prompt], answer),
        }
        if self.call.body.n_probs:
            shown["completion_probabilities"] = self.probabilities(answer.logprobs or ())
        return self._selected(shown)

    def _selected(self, shown: dict[str, Any]) -> dict[str, Any]:
        """Only the requested response fields."""
        wanted = self.call.body.response_fields
        if not wanted:
            return shown
        chosen: dict[str, Any] = {}
        for path in wanted:
            value: Any = shown
            for step in path.split("/"):
                value = value.get(step) if isinstance(value, dict) else None
            if value is not None:
                chosen[path] = value
        return chosen

    def probabilities(self, entries: Any) -> list[dict[str, Any]]:
        """Log-probabilities in llama.cpp's format; those after the samplers as probabilities."""
        name = "top_probs" if self.call.body.post_sampling_probs else "top_logprobs"
        tops = [[*map(self._entry, self._top(one))] for one in entries]
        return [{**self._entry(one), name: top} for one, top in zip(entries, tops, strict=True)]

    def _top(self, one: TokenLogprob) -> list[TokenLogprob]:
        """The likeliest tokens, of those that could be drawn."""
        after = self.call.body.post_sampling_probs
        return [each for each in one.top if not after or each.logprob > -math.inf]

    def _entry(self, one: TokenLogprob) -> dict[str, Any]:
        data = self.hosted.session.tokenizer.spelled(one.id)
        shown = {"logprob": usage.finite_logprob(one.logprob)}
        if self.call.body.post_sampling_probs:
            shown = {"prob": math.exp(one.logprob)}
        return {
            "id": one.id,
            "token": data.decode("utf-8", "replace"),
            "bytes": list(data),
            **shown,
        }

    def chunk(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """A streamed chunk other than the last."""
        self.run.mark_shown(index, chunk)
        so_far = self.run.shown_usage(index)
        shown = {
            "index": index,
            "content": chunk.text,
            "tokens": list(chunk.token_ids),
            "stop": False,
            "id_slot": slot_of(self.run.jobs[self.run.owners[index]]),
            "tokens_predicted": so_far.completion_tokens,
            "tokens_evaluated": so_far.prompt_tokens,
        }
        if self.call.body.n_probs:
            shown["completion_probabilities"] = self.probabilities(chunk.logprobs)
        return shown | self._timings(index)

    def progress(self, *, first: bool) -> list[bytes]:
        """Prefill progress events; see `RequestRunner.progress`."""
        shown = {"content": "", "tokens": [], "stop": False}
        return [
            sse_event({"index": index, **shown, "prompt_progress": known, **self._timings(index)})
            for index, known in self.run.progress(first=first)
        ]

    def _timings(self, index: int) -> dict[str, Any]:
        """The timings so far, if requested."""
        if not self.call.body.timings_per_token:
            return {}
        return {"timings": usage.llamacpp_timings(self.run.shown_usage(index))}


async def _stream_events(
    call: RequestContext[LlamaRequest], prepare: Prepare
) -> AsyncGenerator[bytes]:
    """The server-sent events of a stream; the last one of an answer has its statistics."""
    async with call.running(prepare) as (hosted, run):
        answer = _LlamaAnswers(call, hosted, run)
        chunks: list[list[Chunk]] = [[] for _ in run.prepared]
        ended: set[int] = set()
        async with contextlib.aclosing(run.chunks()) as pieces:
            async for batch in pieces:
                events = answer.progress(first=batch != []) if call.body.return_progress else []
                for index, chunk in batch or ():
                    chunks[index].append(chunk)
                    events.append(sse_event(answer.chunk(index, chunk)))
                for index in run.usages.keys() - ended:
                    ended.add(index)
                    events.append(_end(answer, index, chunks[index]))
                yield batch_bytes(events, batch)
        left = sorted(run.usages.keys() - ended)
        yield b"".join(_end(answer, index, chunks[index]) for index in left)


def _end(answer: _LlamaAnswers, index: int, chunks: list[Chunk]) -> bytes:
    """The final event of an answer; its text came in the events before."""
    run = answer.run
    whole = answer.body(index, run.owners[index], completion(chunks, run.usages[index]))
    said: dict[str, Any] = {"content": "", "tokens": []}
    whole.pop("completion_probabilities", None)
    return sse_event({name: said.get(name, value) for name, value in whole.items()})


async def props(call: RequestContext[Any]) -> HttpResponse:
    """Properties of a model, as llama.cpp's /props."""
    name = call.request.query_params.get("model")
    async with call.service.models.see(name) as hosted:
        session, opened = hosted.session, hosted.session.opened
        tokenizer = opened.tokenizer
        names = {}
        if tokenizer is not None:
            bos = tokenizer.bos_id
            names["bos_token"] = "" if bos is None else tokenizer.token(bos)
            names["eos_token"] = "".join(tokenizer.token(id) for id in tokenizer.eos_ids[:1])
        defaults = set_parameters(session.params()) if opened.spec.generates else {}
        conversation = opened.conversation
        return HttpResponse(
            {
                "default_generation_settings": {"n_ctx": opened.context, "params": defaults},
                "total_slots": session.engine.scheduler.slots,
                "model_alias": hosted.name,
                "model_path": hosted.source.path,
                "chat_template": conversation.prompt.template or conversation.jinja or "",
                **names,
                "modalities": {"vision": False, "audio": False},
                "is_sleeping": hosted.state == "sleeping",
                "build_info": f"jinfer {__version__}",
            }
        )


async def slots(call: RequestContext[Any]) -> HttpResponse:
    """The state of each slot, without prompts."""
    async with call.service.models.use(call.request.query_params.get("model")) as hosted:
        session = hosted.session
        running = {sequence.slot: sequence for sequence in list(session.engine.scheduler.running)}
        shown = []
        for number in range(session.engine.scheduler.slots):
            one = running.get(number)
            state: dict[str, Any] = {
                "id": number,
                "n_ctx": session.opened.context,
                "is_processing": one is not None,
            }
            if one is not None:
                prompt = len(one.request.prompt)
                state |= {
                    "id_task": one.request.id,
                    "n_prompt_tokens": prompt,
                    "n_prompt_tokens_cache": one.cached or 0,
                    "n_prompt_tokens_processed": min(one.computed, prompt),
                    "next_token": {
                        "n_decoded": max(0, len(one.tokens) - prompt),
                        "n_remain": max(0, one.request.limit - len(one.tokens)),
                    },
                }
            shown.append(state)
        return HttpResponse(shown)
