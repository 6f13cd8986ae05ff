"""Log-probabilities of tokens under the model's own distribution: temperature 1, no filter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array, lax

from jinfer.ops import sampler_calls
from jinfer.sampling.param_types import MAX_LOGPROBS

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

type LogProbabilities = tuple[
    Float[Array, " rows"], Int[Array, "rows top"], Float[Array, "rows top"]
]


def log_probabilities(
    logits: Float[Array, "rows vocab"],
    tokens: Int[Array, " rows"],
    needed: Bool[Array, " rows"] | None = None,
) -> LogProbabilities:
    """Returns each token's log-probability; the likeliest ids and their own, likeliest first.

    Args:
        needed: mask of rows to compute; the others' values are undefined. None: all.
    """
    logits = logits.astype(jnp.float32)
    rows, count = logits.shape[0], min(MAX_LOGPROBS, logits.shape[-1])
    if sampler_calls.available():
        every = jnp.ones(rows, jnp.bool_) if needed is None else needed
        return sampler_calls.log_probabilities(logits, tokens, every, count)
    if needed is None:
        return log_probabilities_reference(logits, tokens)
    shape = (rows, count)
    nothing = jnp.zeros(rows), jnp.zeros(shape, jnp.int32), jnp.zeros(shape)
    return lax.cond(
        jnp.any(needed), lambda: log_probabilities_reference(logits, tokens), lambda: nothing
    )


def log_probabilities_reference(
    logits: Float[Array, "rows vocab"], tokens: Int[Array, " rows"]
) -> LogProbabilities:
    """Computes the same for all rows, in XLA's operations."""
    # A row at a time: XLA's order of additions depends on the number of rows.
    totals = lax.map(jax.nn.logsumexp, logits)
    logprobs = logits - totals[:, None]
    count = min(MAX_LOGPROBS, logits.shape[-1])
    # Without the barrier XLA:CPU turns a top_k that is used in part into a sort.
    top, ids = lax.optimization_barrier(lax.top_k(logprobs, count))
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    return chosen, ids, top


def log_probabilities_of(
    logits: Float[Array, "rows vocab"],
    ids: Int[Array, "rows top"],
    likeliest: Int[Array, "rows top"],
    logprobs: Float[Array, "rows top"],
) -> tuple[Int[Array, "rows top"], Float[Array, "rows top"]]:
    """Returns log-probabilities of each row's requested ids; rows without ids keep the likeliest.

    Args:
        ids: requested ids, padded with -1.
        likeliest, logprobs: results of `log_probabilities`.
    """
    ids = ids[:, : likeliest.shape[1]]
    totals = lax.map(jax.nn.logsumexp, logits.astype(jnp.float32))
    of_ids = jnp.take_along_axis(logits.astype(jnp.float32), jnp.maximum(ids, 0), axis=-1)
    nonempty = ids[:, :1] >= 0
    return jnp.where(nonempty, ids, likeliest), jnp.where(
        nonempty, of_ids - totals[:, None], logprobs
    )
