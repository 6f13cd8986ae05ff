"""What `generate` and `stream` are asked, as requests of an open model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinfer.api.prompt_inputs import Ids, Params, Prompt, prompts
from jinfer.api.session import Frontend, Prepared
from jinfer.engine.requests import RequestError
from jinfer.modelspec.spec_errors import show
from jinfer.sampling.sampling_params import SamplingParams


def requested(
    frontend: Frontend,
    given: object,
    params: Params | Sequence[Params] | None,
    sampling: Mapping[str, Any],
    *,
    decoder_prefix: Ids = (),
    language: str | None = None,
    special: bool | None = None,
    priority: int = 0,
    timeout: float | None = None,
) -> list[tuple[list[Prepared], SamplingParams]]:
    """The requests that answer each prompt, and its parameters; arguments as `LLM.generate`.

    Raises:
        RequestError: one cannot be run, or there are more prompts than parameters, or fewer.
    """
    every = prompts(given)
    each: list[Any] = [*params] if isinstance(params, list | tuple) else [params] * len(every)
    if len(each) != len(every):
        raise RequestError(f"{len(every)} prompts, but {len(each)} sampling parameters")
    if type(priority) is not int:
        raise RequestError(
            f"priority is {show(priority)}; give a whole number, lower ones go first"
        )
    if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):
        raise RequestError(f"timeout is {show(timeout)}; give a number of seconds, or None")
    if (len(decoder_prefix) or language) and not frontend.engine.model.has_cross_attention:
        raise RequestError(
            "decoder_prefix and language are for a model with an encoder and a decoder; "
            "leave them out"
        )
    chosen = [frontend.sampling(one, sampling) for one in each]
    prefix = frontend.prefix(decoder_prefix, language)
    return [
        (
            frontend.prepare(
                frontend.encode(prompt, special=special),
                one,
                prefix,
                priority=priority,
                timeout=timeout,
            ),
            one,
        )
        for prompt, one in zip(every, chosen, strict=True)
    ]


def streamed(
    frontend: Frontend,
    prompt: Prompt,
    params: Params | None,
    sampling: Mapping[str, Any],
    **more: Any,
) -> Prepared:
    """The one request of a stream; other arguments as `requested`.

    Raises:
        RequestError: it cannot be run, or its answer is not one that comes in pieces.
    """
    asked = [frontend.encode(prompt, special=more.get("special"))]
    ((prepared, chosen),) = requested(frontend, asked, params, sampling, **more)
    if chosen.strategy == "beam":
        raise RequestError("a beam search knows its answer only at the end; use generate")
    if len(prepared) > 1:
        raise RequestError("one answer is streamed at a time; use generate for n or best_of")
    return prepared[0]
