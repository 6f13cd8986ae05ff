"""Mixture of experts (MoE) router module: which experts a token goes to, and with what weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jinfer.modelspec import feed_forward_blocks
from jinfer.nn.activation_taps import observed_rows, tapped_rows
from jinfer.nn.parameter import parameter
from jinfer.ops.matmul.matmul import linear
from jinfer.ops.moe_routing import route

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Router(nnx.Module):
    """Scores all experts and chooses the best, in float32 because near ties are common."""

    def __init__(self, block: feed_forward_blocks.MoESpec) -> None:
        self.block = block
        count = block.experts + block.identity_experts
        self.weight = parameter((count, block.inputs), ("experts", "hidden"), jnp.float32)
        self.bias = _vector(count) if block.router_bias else None
        self.correction = _vector(count) if block.correction_bias else None
        self.scale = _vector(count) if block.expert_scale else None

    def __call__(
        self, x: Float[Array, "rows hidden"]
    ) -> tuple[Int[Array, "rows top_k"], Float[Array, "rows top_k"]]:
        """The experts of each row and their weights."""
        bias = None if self.bias is None else self.bias[...]
        logits = linear(x.astype(jnp.float32), self.weight[...], bias)
        logits = tapped_rows("router", logits)
        correction = None if self.correction is None else self.correction[...]
        chosen, weights = route(logits, correction, self.block)
        weights = weights if self.scale is None else weights * self.scale[...][chosen]
        observed_rows("experts", lambda: chosen)
        return chosen, tapped_rows("weights", weights)


def _vector(size: int) -> nnx.Param:
    return parameter((size,), ("experts",), jnp.float32)
