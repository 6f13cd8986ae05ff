"""What the device keeps of the sequences that run: their tokens, their limits, their samplers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

from jinfer.sampling.sampler import Progress, Sampler, empty_progress, empty_sampler


class State(NamedTuple):
    """A row for each slot, and one more that padding uses.

    Attributes:
        history: the tokens of each sequence, those included that are not in the cache yet.
        lengths: how many of them there are.
        prompts: how many of them were asked.
        limits: how many there may be in the end.
        encoded: tokens of the encoder's output that each sequence sees.
        ended: whether the last token ended the sequence.
        logprobs: whether log-probabilities are wanted.
        sampler, progress: how the next token is chosen.
    """

    history: Int[Array, "rows context"]
    lengths: Int[Array, " rows"]
    prompts: Int[Array, " rows"]
    limits: Int[Array, " rows"]
    encoded: Int[Array, " rows"]
    ended: Bool[Array, " rows"]
    logprobs: Bool[Array, " rows"]
    sampler: Sampler
    progress: Progress


def empty_state(slots: int, context: int, vocab: int) -> State:
    """Nobody runs."""
    rows = slots + 1
    none = jnp.zeros(rows, jnp.int32)
    no = jnp.zeros(rows, jnp.bool_)
    history = jnp.zeros((rows, context), jnp.int32)
    sampler, progress = empty_sampler(rows, vocab), empty_progress(rows)
    return State(history, none, none, none, none, no, no, sampler, progress)


def state_row(
    tokens: Sequence[int],
    context: int,
    *,
    prompt: int,
    limit: int,
    encoded: int,
    logprobs: bool,
    sampler: Sampler,
    progress: Progress,
) -> State:
    """The row of one sequence, in NumPy."""
    history = np.zeros((1, context), np.int32)
    history[0, : len(tokens)] = tokens
    counts = (len(tokens), prompt, limit, encoded)
    return State(
        history,
        *(np.array([count], np.int32) for count in counts),
        np.zeros(1, np.bool_),
        np.array([logprobs]),
        sampler,
        progress,
    )


def admit(state: State, row: State, slot: Int[Array, ""]) -> State:
    """The state with a sequence in a slot."""
    return jax.tree.map(
        lambda all, one: jax.lax.dynamic_update_slice_in_dim(all, one, slot, 0), state, row
    )
