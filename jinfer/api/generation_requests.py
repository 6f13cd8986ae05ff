"""Generation requests: builds the engine's requests from the arguments of generate and stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jinfer.api.prompt_inputs import (
    Ids,
    Params,
    Prompt,
    is_conversation,
    parse_prompt,
    parse_prompts,
)
from jinfer.api.session import PreparedRequest, Session
from jinfer.engine.requests import RequestError
from jinfer.modelspec.spec_errors import show_value
from jinfer.sampling.param_types import MAX_STOP_IDS
from jinfer.sampling.sampling_keywords import SamplingKeywords
from jinfer.sampling.sampling_params import SamplingParams
from jinfer.tokenizer.fill_in_middle import infill_prompt


class RequestKeywords(SamplingKeywords, total=False):
    """Keywords of `generate` and `stream`: of requests, and sampling parameters."""

    decoder_prefix: Ids
    language: str | None
    special: bool | None
    priority: int
    timeout: float | None
    adapter: str | None
    suffix: str | None


def build_requests(
    session: Session,
    given: object,
    params: Params | Sequence[Params] | None,
    /,
    *,
    decoder_prefix: Ids = (),
    language: str | None = None,
    special: bool | None = None,
    priority: int = 0,
    timeout: float | None = None,
    adapter: str | None = None,
    suffix: str | None = None,
    **sampling: Any,
) -> list[tuple[list[PreparedRequest], SamplingParams]]:
    """The requests of each prompt, and its parameters; arguments as `LLM.generate`.

    Raises:
        RequestError: a request is not possible, or prompts and parameters differ in number.
    """
    every: list[Any] = [*parse_prompts(given)]
    listed: list[Any] = [*params] if isinstance(params, list | tuple) else [params] * len(every)
    if len(listed) != len(every):
        raise RequestError(f"{len(every)} prompts, but {len(listed)} sampling parameters")
    if type(priority) is not int:
        raise RequestError(
            f"priority is {show_value(priority)}; give a whole number, lower ones go first"
        )
    if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):
        raise RequestError(f"timeout is {show_value(timeout)}; give a number of seconds, or None")
    if (len(decoder_prefix) or language) and not session.engine.runner.model.has_cross_attention:
        raise RequestError(
            "decoder_prefix and language are for a model with an encoder and a decoder; "
            "leave them out"
        )
    use = None if adapter is None else session.adapters.find(adapter)
    resolved = [session.sampling(item, sampling) for item in listed]
    if suffix is not None:
        every = [_infill_ids(session, prompt, suffix) for prompt in every]
        resolved = [with_fim_ends(session, item) for item in resolved]
    prefix = session.prefix(decoder_prefix, language)
    encoded = [session.encode_prompt(prompt, special=special) for prompt in every]
    return [
        (
            session.prepare(
                prompt.ids,
                prompt_params,
                prefix,
                priority=priority,
                timeout=timeout,
                adapter=use,
                images=prompt.images,
            ),
            prompt_params,
        )
        for prompt, prompt_params in zip(encoded, resolved, strict=True)
    ]


def _infill_ids(session: Session, prompt: Any, suffix: object) -> list[int]:
    """The tokens of a fill-in-the-middle prompt. Raises `RequestError`, `TokenizerError`."""
    if not isinstance(suffix, str):
        raise RequestError(f"suffix is {show_value(suffix)}; give the text after the gap, or None")
    if is_conversation(prompt):
        raise RequestError("a suffix goes with a text, not with a conversation; leave one out")
    given = prompt if isinstance(prompt, str) else session.encode(prompt)
    return infill_prompt(session.tokenizer, given, suffix)


def with_fim_ends(session: Session, params: SamplingParams) -> SamplingParams:
    """Parameters with which a filled-in text ends where the FIM tokens say so."""
    tokens = session.tokenizer.fim
    own = [*params.stop_token_ids]
    known = {*own, *session.opened.end_ids}
    more = [id for id in (tokens.ends if tokens else ()) if id not in known]
    return replace(params, stop_token_ids=(*own, *more)[:MAX_STOP_IDS])


def build_stream_request(
    session: Session, prompt: Prompt, params: Params | None, /, **keywords: Any
) -> PreparedRequest:
    """The request of a stream; arguments as `build_requests`.

    Raises:
        RequestError: the request is not possible, or its answer cannot be streamed.
    """
    given: Any = parse_prompt(prompt)
    if keywords.get("suffix") is None:
        given = session.encode_prompt(given, special=keywords.get("special"))
    ((prepared, resolved),) = build_requests(session, [given], params, **keywords)
    if resolved.strategy == "beam":
        raise RequestError("a beam search knows its answer only at the end; use generate")
    if len(prepared) > 1:
        raise RequestError("one answer is streamed at a time; use generate for n or best_of")
    return prepared[0]
