"""Draft model, on the device: proposes the likeliest tokens under the target's Gumbel noise.

Token i of a request maximizes its filtered log-probability plus noise that depends on the request's
seed and on i alone. A draft model that adds the same noise to its own log-probabilities finds the
same token as often as the two distributions allow; its second best is the next best guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jinfer.engine.runner.device_state import State
from jinfer.nn.abstract_model import AbstractModel
from jinfer.sampling import penalties
from jinfer.sampling.sampler import add_gumbel_noise, apply_samplers
from jinfer.sampling.token_history import History

if TYPE_CHECKING:
    from jaxtyping import Int

WIDTH = 4  # tokens proposed for each position


def finish_propose(
    stages: Sequence[str],
    state: State,
    results: Mapping[str, Array],
    sampled: Int[Array, " sequences"],
    *_: Any,
) -> tuple[State, Int[Array, "sequences width"]]:
    """`propose_next` with the results of a forward pass."""
    return propose_next(stages, state, results["logits"], sampled)


def no_proposals(model: AbstractModel, count: int) -> Int[Array, "sequences width"]:
    """Proposals for empty rows."""
    return jnp.full((count, min(WIDTH, model.vocab)), -1, jnp.int32)


def propose_next(
    stages: Sequence[str], state: State, logits: Array, rows: Array
) -> tuple[State, Int[Array, "sequences width"]]:
    """The likeliest tokens of some state rows, likeliest first; the first is appended to the state.

    Args:
        stages: sampling stages that these sequences may need.
    """
    sampler, progress = (
        jax.tree.map(lambda p: p[rows], p) for p in (state.sampler, state.progress)
    )
    lengths = state.lengths[rows]
    logits = logits[:, : 32 * state.mask.shape[1]]  # some vocabularies are padded
    past = History(state.history, rows, lengths, state.prompts[rows])
    allowed = penalties.masked(logits.astype(jnp.float32), state.mask, rows, state.masked[rows])
    scores = add_gumbel_noise(
        apply_samplers(allowed, sampler, progress, past, stages), sampler, progress
    )
    # Without the barrier XLA:CPU turns a top_k that is used in part into a sort.
    best, tokens = lax.optimization_barrier(lax.top_k(scores, min(WIDTH, scores.shape[1])))
    there = rows < state.lengths.shape[0] - 1
    state = state._replace(
        history=state.history.at[rows, lengths].set(tokens[:, 0], mode="drop"),
        lengths=state.lengths.at[rows].add(there.astype(jnp.int32)),
        progress=state.progress._replace(drawn=state.progress.drawn.at[rows].add(1)),
    )
    return state, jnp.where(there[:, None] & (best > -jnp.inf), tokens, -1)
