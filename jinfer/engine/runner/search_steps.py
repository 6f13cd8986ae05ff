"""Search steps, on the device: next beams of beam search, candidates of contrastive search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array, lax

from jinfer.nn.abstract_model import AbstractModel
from jinfer.sampling.contrastive_score import candidates, contrastive_choice

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def best_beams(
    model: AbstractModel, out: Float[Array, "beams vocab"], scores: Float[Array, " beams"]
) -> tuple[Int[Array, " top"], Int[Array, " top"], Float[Array, " top"]]:
    """Beam, token and score of the best continuations, from the logits after each beam.

    Args:
        scores: sum of the log-probabilities of each beam.
    """
    each = mask_never_sampled(jax.nn.log_softmax(out, axis=-1), model)
    sums = each + scores[:, None]
    # Without the barrier XLA:CPU turns a top_k that is used in part into a sort.
    best, which = lax.optimization_barrier(lax.top_k(sums.reshape(-1), 2 * out.shape[0]))
    return which // sums.shape[1], which % sums.shape[1], best


def best_candidate(
    model: AbstractModel,
    results: Mapping[str, Float[Array, "k width"]],
    length: Int[Array, ""],
    past: Float[Array, "context hidden"],
    probabilities: Float[Array, " k"],
    alpha: Float[Array, ""],
) -> tuple[Array, Array, Array, Array]:
    """Results of `steps.contrastive_choice`, from the candidates' logits and hidden states."""
    hidden = results["hidden"].astype(jnp.float32)
    best = contrastive_choice(probabilities, hidden, past, length, alpha)
    past = lax.dynamic_update_slice_in_dim(past, hidden[best][None], length, 0)
    ids, likely = candidates(
        mask_never_sampled(results["logits"][best][None], model), hidden.shape[0]
    )
    return past, best, ids[0], likely[0]


def mask_never_sampled(
    logits: Float[Array, "batch vocab"], model: AbstractModel
) -> Float[Array, "batch vocab"]:
    """The logits, -inf for tokens that are never sampled."""
    if not model.never:
        return logits
    return logits.at[:, jnp.array(model.never, jnp.int32)].set(-jnp.inf)
