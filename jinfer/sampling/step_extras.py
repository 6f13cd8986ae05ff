"""Extras of a step: what few requests want of it, so that programs for the others are without.

A logits processor; the log-probabilities of ids that a request names; or those after the samplers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from jinfer.sampling.logits_processors import LogitsProcessor
from jinfer.sampling.sampling_params import SamplingParams

type Extra = LogitsProcessor | Literal["logprob_token_ids", "post_sampling_probs"]


def extras_of(params: SamplingParams, processors: Sequence[LogitsProcessor]) -> tuple[Extra, ...]:
    """The extras of a request."""
    named: list[Extra] = []
    if params.logprobs is not None and params.logprob_token_ids:
        named.append("logprob_token_ids")
    if params.logprobs is not None and params.post_sampling_probs:
        named.append("post_sampling_probs")
    return (*named, *processors)


def union(rows: Iterable[Sequence[Extra]]) -> tuple[Extra, ...]:
    """The extras of a program for some requests, each once, in an order of their own."""
    return tuple(sorted({one for row in rows for one in row}, key=_place))


def processors_of(extras: Iterable[object]) -> list[LogitsProcessor]:
    """The logits processors among them."""
    return [one for one in extras if isinstance(one, LogitsProcessor)]


def has_function(extras: Iterable[Extra]) -> bool:
    """Whether a user's function is among them."""
    return bool(processors_of(extras))


def _place(extra: Extra) -> tuple[int, str]:
    return (extra.index, "") if isinstance(extra, LogitsProcessor) else (-1, extra)
