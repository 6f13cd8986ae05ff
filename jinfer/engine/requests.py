"""What an engine is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jinfer.engine.steps import Row
from jinfer.sampling.params import SamplingParams
from jinfer.sampling.rows import Encode, allowed_mask, mask_words, progress_row, sampler_row
from jinfer.sampling.sampler import Sampled


@dataclass(frozen=True)
class Request:
    """A sequence to be continued.

    Attributes:
        id: of the caller's choosing; its tokens carry it.
        prompt: token ids, at least one.
        sampling, row: how tokens are chosen, as it was asked and as the device reads it.
        encoder: token ids that an encoder reads; the prompt is then the decoder's.
        limit: tokens it may have in the end, prompt included; at most the context.
        end_ids: the model's own ends of sequence.
    """

    id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    row: Row = field(compare=False)
    limit: int
    end_ids: tuple[int, ...] = ()
    encoder: tuple[int, ...] = ()


def row_of(
    sampling: SamplingParams, end_ids: Iterable[int], vocab: int, encode: Encode | None
) -> Row:
    """A request's parameters for the device. Raises ValueError like `sampler_row`."""
    sampler = sampler_row(sampling, end_ids, vocab, encode)
    mask = allowed_mask(sampling, vocab)
    words = np.zeros(mask_words(vocab), np.uint32) if mask is None else mask
    arrays: tuple[Any, ...] = (words[None], np.array([mask is not None]))
    return Row(sampler, progress_row(sampling), *arrays)


@dataclass(frozen=True)
class Token:
    """A new token of a request.

    Attributes:
        logprob, top: its log-probability and the likeliest (id, log-probability), if asked for.
    """

    request: int
    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def token_of(step: Sampled, row: int, request: Request) -> Token:
    """The token of a row of one step."""
    id, wanted = int(step.tokens[row]), request.sampling.logprobs
    if wanted is None:
        return Token(request.id, id)
    assert step.logprob is not None, "they were asked for"
    assert step.top_ids is not None
    assert step.top_logprobs is not None
    ids, logprobs = step.top_ids[row][:wanted], step.top_logprobs[row][:wanted]
    top = tuple((int(i), float(p)) for i, p in zip(ids, logprobs, strict=True))
    return Token(request.id, id, float(step.logprob[row]), top)
