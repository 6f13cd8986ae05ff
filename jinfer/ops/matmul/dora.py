"""DoRA: rows of a weight with an adapter's term in it, scaled to lengths of their own.

y = m / |W + c B A| * (W + c B A) x + bias, the norm that of each row (Liu et al. 2024, arXiv
2402.09353). |W + c B A|^2 is a polynomial in c, the scale that a request names: its coefficients
are found once, when the adapter is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jinfer.ops.matmul.lora import RowAdapters

if TYPE_CHECKING:
    from jaxtyping import Float

NORM_TERMS = 4  # m, |W|^2, 2 <W, B A>, |B A|^2


def rescale(
    y: Float[Array, "*rows outputs"],
    bias: Float[Array, " outputs"] | None,
    norms: Float[Array, "slots terms outputs"],
    at: RowAdapters,
) -> Float[Array, "*rows outputs"]:
    """The products of rows with DoRA, at their rows' lengths; the others keep their bits.

    Args:
        y: (W + c B A) x + bias, float32.
        norms: `NORM_TERMS` of each slot's adapter; zeros: it has no magnitudes.
    """
    own = norms[jnp.maximum(at.slots - 1, 0)]
    length, square, twice, term = (own[:, i] for i in range(NORM_TERMS))
    scale = at.scales[:, None]
    square = square + scale * (twice + scale * term)
    there = (at.slots > 0)[:, None] & (square > 0)
    factor = length / jnp.sqrt(jnp.where(there, square, 1.0))
    plain = y.reshape(-1, y.shape[-1])
    shift = 0.0 if bias is None else bias.astype(jnp.float32)[None]
    scaled = (plain - shift) * factor + shift
    return jnp.where(there, scaled, plain).reshape(y.shape)
