"""What a draft model proposes: the likeliest tokens under the noise that the target will draw with.

Token i of a request is the greatest of its filtered log-probabilities and of noise that its seed
and i give. A draft model that adds the same noise to its own finds the same token as often as the
two distributions allow, and the second greatest is the next best guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array, lax

from jinfer.engine.runner.device_state import State
from jinfer.engine.runner.flat_batch import Tables
from jinfer.engine.runner.steps import Leaves, repeat
from jinfer.nn.abstract_model import AbstractModel
from jinfer.ops.attention.kv_cache import Cache
from jinfer.sampling import penalties
from jinfer.sampling.sampler import filtered, noisy
from jinfer.sampling.token_history import History

if TYPE_CHECKING:
    from jaxtyping import Int

WIDTH = 4  # tokens proposed for each place


def propose(
    model: AbstractModel,
    stages: Sequence[str],
    leaves: Leaves,
    cache: Cache,
    state: State,
    rows: Int[Array, " sequences"],
    tables: Tables,
    steps: Int[Array, ""],
) -> tuple[Cache, State, Int[Array, "steps sequences width"]]:
    """The likeliest next tokens of sequences, each place after the likeliest of the one before.

    Args:
        stages: of sampling, that these sequences may need.
        rows: their slots; -1: none.
        steps: places; not above `MAX_STEPS`.

    Returns:
        The likeliest tokens of each place first; -1 where there is none.
    """
    none, proposes = nobody(model, rows.shape[0]), partial(likeliest, stages)
    return repeat(model, proposes, none, leaves, cache, state, rows, tables, steps)


def nobody(model: AbstractModel, count: int) -> Int[Array, "sequences width"]:
    """What is proposed of nobody."""
    return jnp.full((count, min(WIDTH, model.vocab)), -1, jnp.int32)


def likeliest(
    stages: Sequence[str], state: State, logits: Array, rows: Array
) -> tuple[State, Int[Array, "sequences width"]]:
    """The likeliest tokens of some rows of the state, which takes the first of them."""
    sampler, progress = (
        jax.tree.map(lambda p: p[rows], p) for p in (state.sampler, state.progress)
    )
    lengths = state.lengths[rows]
    logits = logits[:, : 32 * state.mask.shape[1]]  # some vocabularies are padded
    past = History(state.history, rows, lengths, state.prompts[rows])
    allowed = penalties.masked(logits.astype(jnp.float32), state.mask, rows, state.masked[rows])
    scores = noisy(filtered(allowed, sampler, progress, past, stages), sampler, progress)
    # Without the barrier XLA:CPU turns a top_k that is used in part into a sort.
    best, tokens = lax.optimization_barrier(lax.top_k(scores, min(WIDTH, scores.shape[1])))
    there = rows < state.lengths.shape[0] - 1
    state = state._replace(
        history=state.history.at[rows, lengths].set(tokens[:, 0], mode="drop"),
        lengths=state.lengths.at[rows].add(there.astype(jnp.int32)),
        progress=state.progress._replace(drawn=state.progress.drawn.at[rows].add(1)),
    )
    return state, jnp.where(there[:, None] & (best > -jnp.inf), tokens, -1)
