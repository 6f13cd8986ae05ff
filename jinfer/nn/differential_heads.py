"""Differential attention (arXiv 2410.05258): half of the heads are subtracted from the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jinfer.modelspec.attention_blocks import DifferentialSpec
from jinfer.nn.parameter import parameter
from jinfer.ops.norm import normalize

if TYPE_CHECKING:
    from jaxtyping import Float


class DifferentialHeads(nnx.Module):
    """The learned factor of the subtracted heads, and the norm of the difference."""

    def __init__(self, block: DifferentialSpec, head_dim: int) -> None:
        self.block = block
        for name in ("q1", "k1", "q2", "k2"):
            vector = parameter((head_dim,), ("head_dim",), jnp.float32)
            setattr(self, f"lambda_{name}", vector)

    def __call__(
        self, out: Float[Array, "batch tokens heads width"]
    ) -> Float[Array, "batch tokens half width"]:
        """The normalized difference of the halves."""
        q1, k1, q2, k2 = (getattr(self, f"lambda_{name}")[...] for name in ("q1", "k1", "q2", "k2"))
        factor = jnp.exp(jnp.sum(q1 * k1)) - jnp.exp(jnp.sum(q2 * k2)) + self.block.init
        one, two = jnp.split(out.astype(jnp.float32), 2, axis=2)
        y = normalize(one - factor * two, None, eps=self.block.eps)
        return (y * (1 - self.block.init)).astype(out.dtype)


def paired_values(
    v: Float[Array, "batch tokens kv_heads head_dim"],
) -> Float[Array, "batch tokens kv_heads width"]:
    """Values of head j of either half: those of j in the first and in the second half."""
    both = jnp.concatenate(jnp.split(v, 2, axis=2), axis=-1)
    return jnp.concatenate([both, both], axis=2)
