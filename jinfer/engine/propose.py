"""What a draft model proposes: the likeliest tokens under the noise that the target will draw with.

Token i of a request is the greatest of its filtered log-probabilities and of noise that its seed
and i give. A draft model that adds the same noise to its own finds the same token as often as the
two distributions allow, and the second greatest is the next best guess.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int

from jinfer.engine.chosen import MAX_STEPS
from jinfer.engine.places import Tables, going
from jinfer.engine.state import State
from jinfer.engine.steps import Leaves, logits
from jinfer.model import AbstractModel
from jinfer.ops.cache import Cache
from jinfer.sampling import penalties
from jinfer.sampling.history import History
from jinfer.sampling.sampler import filtered, noisy

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
    count = rows.shape[0]
    every = jnp.arange(count, dtype=jnp.int32)
    newest = jnp.full(count, -1, jnp.int32)

    def one_more(carry: tuple[Array, Cache, State, Array]) -> tuple[Array, Cache, State, Array]:
        i, cache, state, so_far = carry
        # See `steps.decode`.
        parts, lengths = lax.optimization_barrier((leaves, state.lengths))
        state = state._replace(lengths=lengths)
        cache, out, which = logits(model, parts, cache, state, rows, newest, tables, every)
        state, likeliest = _propose(stages, state, out, which)
        return i + 1, cache, state, lax.dynamic_update_index_in_dim(so_far, likeliest, i, 0)

    def more(carry: tuple[Array, Cache, State, Array]) -> Array:
        i, _, state, _ = carry
        return (i < steps) & jnp.any(going(state, rows))

    width = min(WIDTH, model.vocab)
    none = jnp.full((MAX_STEPS, count, width), -1, jnp.int32)
    _, cache, state, tokens = lax.while_loop(more, one_more, (jnp.int32(0), cache, state, none))
    return cache, state, tokens


def _propose(
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
