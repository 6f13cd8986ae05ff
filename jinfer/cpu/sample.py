"""Sampling as custom calls: the samplers of `jinfer.sampling`, row by row.

A row's token is batch-invariant: it depends only on its logits, parameters, state and history.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jax import Array

from jinfer.cpu.build_library import custom_call, loaded

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


class SamplerLayout(NamedTuple):
    """Columns and samplers that the custom call supports, in its order.

    Attributes:
        numbers, counts: the columns of a request's parameters.
        samplers: their names; a sampler's number is its index here.
    """

    numbers: tuple[str, ...]
    counts: tuple[str, ...]
    samplers: tuple[str, ...]


@functools.cache
def layout() -> SamplerLayout:
    """Reads the layout from the library."""
    library = loaded()
    library.jinfer_sampler_layout.restype = ctypes.c_char_p
    names = library.jinfer_sampler_layout().decode().splitlines()
    return SamplerLayout(*(tuple(line.split()) for line in names))


def sample(
    logits: Float[Array, "rows vocab"],
    parameters: Sequence[Array],
    history: Int[Array, "slots length"],
    lengths: Int[Array, " requests"],
    prompts: Int[Array, " requests"],
    requests: Int[Array, " rows"],
    slots: Int[Array, " rows"],
    masks: Sequence[Array] = (),
    *,
    filtered: bool = False,
) -> tuple[Int[Array, " rows"], Float[Array, " rows"], Float[Array, "rows_or_0 vocab"]]:
    """Samples the next token of each row; see `jinfer.sampling.sampler.sample`.

    Args:
        logits: float32.
        parameters: the fields of `SamplingMetadata`, with the columns and samplers of `layout`,
            then those of `SamplerState`; a row per request.
        history: token ids of sequences.
        lengths, prompts: each request's length so far, and the length of its prompt.
        requests, slots: each row's request, and the row of `history` that holds its sequence.
        masks: per request, a bitmask of allowed tokens and whether it applies; or nothing.
        filtered: whether to return the logits that the samplers leave.

    Returns:
        The tokens, mirostat's mu after them, and the filtered logits (-inf for removed tokens),
        with no rows unless requested.
    """
    rows, vocab = logits.shape
    results = [
        jax.ShapeDtypeStruct((rows,), np.int32),
        jax.ShapeDtypeStruct((rows,), np.float32),
        jax.ShapeDtypeStruct((rows if filtered else 0, vocab), np.float32),
    ]
    arguments = (*parameters, history, lengths, prompts, requests, slots, *masks)
    tokens, mu, remaining = custom_call("jinfer_sample", results)(logits, *arguments)
    return tokens, mu, remaining


def log_probabilities(
    logits: Float[Array, "rows vocab"],
    tokens: Int[Array, " rows"],
    needed: Bool[Array, " rows"],
    top: int,
) -> tuple[Float[Array, " rows"], Int[Array, "rows top"], Float[Array, "rows top"]]:
    """Computes log-probabilities of tokens and of the likeliest; see `jinfer.sampling.logprobs`.

    Args:
        logits: float32.
        tokens: whose log-probability is the first result.
        needed: mask of rows to compute; the others are zeros.
        top: number of likeliest tokens to return, likeliest first.
    """
    rows = logits.shape[0]
    shapes = ((rows,), np.float32), ((rows, top), np.int32), ((rows, top), np.float32)
    results = [jax.ShapeDtypeStruct(shape, kind) for shape, kind in shapes]
    chosen, ids, values = custom_call("jinfer_logprobs", results)(logits, tokens, needed)
    return chosen, ids, values
