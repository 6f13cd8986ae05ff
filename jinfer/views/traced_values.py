"""Captured values: what views take from `LLM.trace`, with errors of one line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jinfer.sampling.request_errors import RequestError

if TYPE_CHECKING:
    from jaxtyping import Float

    from jinfer.api.llm import LLM
    from jinfer.modelspec.layer_spec import StackSpec

_TOP = 20


def captured(
    llm: LLM, ids: Sequence[int], names: Sequence[str]
) -> Mapping[str, Float[np.ndarray, "tokens ..."]]:
    """Values of a prompt by name. Raises `RequestError`."""
    check_llm(llm)
    if llm.session.engine.runner.model.has_cross_attention:
        raise RequestError(
            "an encoder reads the prompt, and this view is of a decoder's; llm.trace with "
            "encoder_ids has the values"
        )
    trace = llm.trace(list(ids), capture=list(names))
    assert not isinstance(trace, list), "one prompt has one trace"
    return {name: trace[name] for name in trace.names}


def residual_streams(
    llm: LLM, ids: Sequence[int]
) -> tuple[list[str], list[Float[np.ndarray, "tokens hidden"]]]:
    """The decoder's input and what each layer gives, with names: "embed", "0", "1", ...

    Raises:
        RequestError: the model has no decoder.
    """
    layers = range(layer_count(llm))
    found = captured(llm, ids, ["embed", *(f"decoder.{at}.x" for at in layers)])
    streams = [found["embed"], *(found[f"decoder.{at}.x"] for at in layers)]
    return ["embed", *map(str, layers)], streams


def layer_count(llm: LLM) -> int:
    """How many layers the decoder has. Raises `RequestError` where there is none."""
    check_llm(llm)
    if llm.spec.decoder is None:
        raise RequestError(
            "the model has no decoder, which this view is of; attention patterns, outliers and "
            "memory are there for encoders"
        )
    return len(llm.spec.decoder.layers)


def looked_into(llm: LLM) -> StackSpec:
    """The decoder; of a model without one the encoder. Raises `RequestError`."""
    check_llm(llm)
    return llm.spec.decoder or llm.spec.stacks[0]


def layer_name(llm: LLM, layer: int) -> str:
    """A layer such as "decoder.3"; -1 is the last one. Raises `RequestError`."""
    stack = looked_into(llm)
    count = len(stack.layers)
    if type(layer) is not int or not -count <= layer < count:
        raise RequestError(f"there is no layer {layer!r}; the {stack.name} has 0 to {count - 1}")
    return f"{stack.name}.{layer % count}"


def check_llm(llm: object) -> None:
    """Raises `RequestError` for what is no `LLM`, such as an `AsyncLLM`."""
    generate = getattr(llm, "generate", None)
    if generate is None or inspect.iscoroutinefunction(generate):
        kind = type(llm).__name__
        raise RequestError(f"a view is of an LLM, not of {kind}; open the model as LLM(source)")


def check_top(top: int) -> None:
    """Raises `RequestError` unless it is a number of tokens that a view shows."""
    if type(top) is not int or not 1 <= top <= _TOP:
        raise RequestError(f"top is {top!r}; give how many tokens, from 1 to {_TOP}")


def names_like(llm: LLM, pattern: str) -> list[str]:
    """Names of values that there are, for a regular expression that matches the whole name."""
    every = re.compile(pattern)
    return [value.name for value in llm.names() if every.fullmatch(value.name)]
