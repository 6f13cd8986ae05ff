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
    wanted: Bool[Array, " rows"] | None = None,
) -> LogProbabilities:
    """The log-probability of each token; the likeliest ids and theirs, likeliest first.

    Args:
        wanted: for which rows; the others' values are undefined. None: for all.
    """
    logits = logits.astype(jnp.float32)
    rows, count = logits.shape[0], min(MAX_LOGPROBS, logits.shape[-1])
    if sampler_calls.available():
        every = jnp.ones(rows, jnp.bool_) if wanted is None else wanted
        return sampler_calls.log_probabilities(logits, tokens, every, count)
    if wanted is None:
        return log_probabilities_reference(logits, tokens)
    shape = (rows, count)
    nothing = jnp.zeros(rows), jnp.zeros(shape, jnp.int32), jnp.zeros(shape)
    return lax.cond(
        jnp.any(wanted), lambda: log_probabilities_reference(logits, tokens), lambda: nothing
    )


def log_probabilities_reference(
    logits: Float[Array, "rows vocab"], tokens: Int[Array, " rows"]
) -> LogProbabilities:
    """The same for all rows, in XLA's operations."""
    # A row at a time: XLA adds up in an order that depends on how many there are.
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
    """The log-probabilities of some ids of each row; of rows without any, the likeliest, as given.

    Args:
        ids: then -1.
        likeliest, logprobs: as of `log_probabilities`.
    """
    ids = ids[:, : likeliest.shape[1]]
    totals = lax.map(jax.nn.logsumexp, logits.astype(jnp.float32))
    of_ids = jnp.take_along_axis(logits.astype(jnp.float32), jnp.maximum(ids, 0), axis=-1)
    some = ids[:, :1] >= 0
    return jnp.where(some, ids, likeliest), jnp.where(some, of_ids - totals[:, None], logprobs)
