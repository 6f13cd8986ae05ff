"""Log-probabilities under the model's own distribution: temperature 1, no filter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from jinfer.sampling.ranges import MAX_LOGPROBS


def log_probabilities(
    logits: Float[Array, "rows vocab"], tokens: Int[Array, " rows"]
) -> tuple[Float[Array, " rows"], Int[Array, "rows top"], Float[Array, "rows top"]]:
    """The log-probability of each token; the likeliest ids and theirs, likeliest first."""
    logits = logits.astype(jnp.float32)
    # A row at a time: XLA adds up in an order that depends on how many there are.
    totals = lax.map(jax.nn.logsumexp, logits)
    logprobs = logits - totals[:, None]
    count = min(MAX_LOGPROBS, logits.shape[-1])
    # Without the barrier XLA:CPU turns a top_k that is used in part into a sort.
    top, ids = lax.optimization_barrier(lax.top_k(logprobs, count))
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    return chosen, ids, top
