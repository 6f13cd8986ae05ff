"""Mixture of experts (MoE) module: router and stacked expert feed-forwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jinfer.modelspec import feed_forward_blocks
from jinfer.nn.adapted_rows import adapted_rows, slots_to_build
from jinfer.nn.feed_forward import Gating
from jinfer.nn.parameter import parameter
from jinfer.nn.router import Router
from jinfer.ops import moe
from jinfer.ops.activation import activate
from jinfer.ops.matmul.lora import Stacks
from jinfer.ops.matmul.quantized import FUSED_ACTIVATIONS

if TYPE_CHECKING:
    from jaxtyping import Float


class StackedLinear(nnx.Module):
    """A projection of every expert, weight [experts, outputs, inputs], and stacks of adapters."""

    def __init__(
        self, block: feed_forward_blocks.MoESpec, axes: tuple[str, str], dtype: DTypeLike
    ) -> None:
        sizes = {"mlp": block.width, "hidden": block.inputs}
        shape = (block.experts, sizes[axes[0]], sizes[axes[1]])
        self.weight = parameter(shape, ("experts", *axes), dtype, role="matrix")
        self.bias = parameter(shape[:2], ("experts", axes[0]), dtype) if block.bias else None
        slots = slots_to_build()
        slots = slots if slots is not None and slots.experts else None
        n, rank, kind = (0, 0, "") if slots is None else (slots.count, slots.rank, slots.dtype)
        one, (outputs, inputs) = (n, block.experts, rank), shape[1:]
        a, b = (("slots", "experts", "rank", axis) for axis in (axes[1], axes[0]))
        self.lora_a = parameter((*one, inputs), a, kind) if slots else None
        self.lora_b = parameter((*one, outputs), b, kind) if slots else None
        sides, f = (n, block.experts, 2, rank), ("slots", "experts", "sides", "rank")
        self.lora_factors = parameter(sides, f, jnp.float32) if kind == "int8" else None

    def projection(self) -> moe.ExpertProjection:
        """The operation's operands."""
        bias = None if self.bias is None else self.bias[...]
        if self.lora_a is None or self.lora_b is None:
            return moe.ExpertProjection(self.weight[...], bias)
        factors = None if self.lora_factors is None else self.lora_factors[...]
        stacks = Stacks(self.lora_a[...], self.lora_b[...], factors)
        return moe.ExpertProjection(self.weight[...], bias, stacks)


class Experts(nnx.Module):
    """Feed-forwards of equal shape, their parameters stacked."""

    def __init__(self, block: feed_forward_blocks.MoESpec, dtype: DTypeLike) -> None:
        self.gated, self.gating = block.gated, Gating.of(block)
        if block.gated:
            self.gate = StackedLinear(block, ("mlp", "hidden"), dtype)
        self.up = StackedLinear(block, ("mlp", "hidden"), dtype)
        self.down = StackedLinear(block, ("hidden", "mlp"), dtype)

    def arrays(self) -> moe.ExpertWeights:
        """The operation's operands."""
        gate = self.gate.projection() if self.gated else None
        up, down = self.up.projection(), self.down.projection()
        fused = self.gating.activation if self.gating.activation in FUSED_ACTIVATIONS else "none"
        return moe.ExpertWeights(gate, up, down, self._activate, fused)

    def _activate(self, gate: Array | None, up: Array) -> Array:
        return activate(self.gating.activation, up) if gate is None else self.gating(gate, up)


class MixtureOfExperts(nnx.Module):
    """Mixture of experts: a router chooses a few feed-forwards per token (arXiv 1701.06538)."""

    def __init__(self, block: feed_forward_blocks.MoESpec, dtype: DTypeLike) -> None:
        self.router = Router(block)
        self.experts = Experts(block, dtype)

    def __call__(
        self, x: Float[Array, "*rows hidden"], routed: Float[Array, "*rows hidden"] | None = None
    ) -> Float[Array, "*rows hidden"]:
        """The block's output, to be added to the residual stream.

        Args:
            routed: what the router is given; None: x.
        """
        rows, block = x.reshape(-1, x.shape[-1]), self.router.block
        chosen, weights = self.router(rows if routed is None else routed.reshape(rows.shape))
        experts = self.experts.arrays()
        at = None if experts.up.stacks is None else adapted_rows()
        if block.weighted == "input":
            y = moe.mixture_of_weighted_inputs(rows, chosen, weights, experts, at)
            return y.reshape(x.shape)
        if block.identity_experts:
            same = chosen >= block.experts
            part = moe.sum_chosen(jnp.where(same, weights, 0.0))[:, None] * rows.astype(jnp.float32)
            chosen, weights = jnp.where(same, 0, chosen), jnp.where(same, 0.0, weights)
            y = moe.mixture_of_experts(rows, chosen, weights, experts, at)
            return (y.astype(jnp.float32) + part).astype(x.dtype).reshape(x.shape)
        return moe.mixture_of_experts(rows, chosen, weights, experts, at).reshape(x.shape)
