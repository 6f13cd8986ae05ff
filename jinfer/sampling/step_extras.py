"""Extras of a step: results that few requests need, left out of other programs.

They are logits processors, log-probabilities of requested ids, and log-probabilities after the
samplers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from jinfer.sampling.logits_processors import LogitsProcessor
from jinfer.sampling.sampling_params import SamplingParams

type Extra = LogitsProcessor | Literal["logprob_token_ids", "post_sampling_probs"]


def extras_of(params: SamplingParams, processors: Sequence[LogitsProcessor]) -> tuple[Extra, ...]:
    """Returns the extras of a request."""
    named: list[Extra] = []
    if params.logprobs is not None and params.logprob_token_ids:
        named.append("logprob_token_ids")
    if params.logprobs is not None and params.post_sampling_probs:
        named.append("post_sampling_probs")
    return (*named, *processors)


def union(rows: Iterable[Sequence[Extra]]) -> tuple[Extra, ...]:
    """Returns the distinct extras of some requests, in a fixed order."""
    return tuple(sorted({extra for row in rows for extra in row}, key=_place))


def processors_of(extras: Iterable[object]) -> list[LogitsProcessor]:
    """Selects the logits processors."""
    return [extra for extra in extras if isinstance(extra, LogitsProcessor)]


def has_function(extras: Iterable[Extra]) -> bool:
    """Whether the extras include a user's function."""
    return bool(processors_of(extras))


def _place(extra: Extra) -> tuple[int, str]:
    return (extra.index, "") if isinstance(extra, LogitsProcessor) else (-1, extra)
