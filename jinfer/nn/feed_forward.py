"""Feed-forward blocks: MLP, gated MLP (SwiGLU, GeGLU), mixture of experts (MoE), activations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jinfer.modelspec import feed_forward_blocks
from jinfer.modelspec.feed_forward_blocks import CLAMPED
from jinfer.nn.activation_taps import is_tapped, observed_rows, tapped, tapped_rows
from jinfer.nn.lora_rows import row_adapters, slots_to_build
from jinfer.nn.parameter import parameter
from jinfer.nn.projections import Linear, project
from jinfer.ops import moe
from jinfer.ops.activation import activate, xielu
from jinfer.ops.matmul.lora import Stacks
from jinfer.ops.matmul.matmul import gated_linear, linear
from jinfer.ops.matmul.quantized import FUSED_ACTIVATIONS
from jinfer.ops.moe import route
from jinfer.ops.reductions import gaussian_sparsity

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True)
class Gating:
    """GLU: activation(gate) * up; clamped_swiglu is gpt-oss's, clamped_silu Step 3.7's.

    Attributes:
        activation: a `jinfer.modelspec.feed_forward_blocks.GatedActivation`.
        alpha, limit, offset: of clamped_swiglu; clamped_silu has the limit alone.
    """

    activation: str
    alpha: float
    limit: float
    offset: float

    @classmethod
    def of(cls, block: feed_forward_blocks.GatedMLPSpec | feed_forward_blocks.MoESpec) -> Gating:
        """Returns the gating of a block."""
        return cls(block.activation, block.alpha, block.limit, block.offset)

    def __call__(
        self, gate: Float[Array, "*shape"], up: Float[Array, "*shape"]
    ) -> Float[Array, "*shape"]:
        """Computes the input of the down-projection."""
        if self.activation not in CLAMPED:
            return activate(self.activation, gate) * up
        up = jnp.clip(up, -self.limit, self.limit)
        if self.activation == "clamped_silu":
            return jnp.minimum(activate("silu", gate), self.limit) * up
        gate = jnp.minimum(gate, self.limit)
        wide = gate.astype(jnp.float32)
        up = up + self.offset if self.offset else up
        return up * (wide * activate("sigmoid", self.alpha * wide)).astype(gate.dtype)


class Activation(nnx.Module):
    """An activation function as a module."""

    def __init__(self, block: feed_forward_blocks.ActivationSpec, dtype: DTypeLike) -> None:
        self.function = block.function

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Applies the function."""
        return activate(self.function, x)


class MLP(nnx.Module):
    """down(activation(up(x)))."""

    def __init__(self, block: feed_forward_blocks.MLPSpec, dtype: DTypeLike) -> None:
        self.activation = block.activation
        if block.activation == "xielu":
            self.alpha_p = parameter((1,), ("scalar",), jnp.float32)
            self.alpha_n = parameter((1,), ("scalar",), jnp.float32)
        self.up = Linear(block.inputs, block.width, block.bias, dtype, ("mlp", "hidden"))
        self.down = Linear(block.width, block.inputs, block.bias, dtype, ("hidden", "mlp"))

    def __call__(self, x: Float[Array, "*rows hidden"]) -> Float[Array, "*rows hidden"]:
        """Computes the block's output, which is added to the residual stream."""
        up = tapped("up", self.up(x))
        if self.activation == "xielu":
            hidden = xielu(up, self.alpha_p[...], self.alpha_n[...])
        else:
            hidden = activate(self.activation, up)
        return self.down(tapped("hidden", hidden))


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, block: feed_forward_blocks.GatedMLPSpec, dtype: DTypeLike) -> None:
        self.gating, self.threshold = Gating.of(block), block.deviations
        inner = block.bias is True
        build = partial(Linear, dtype=dtype, bounded=block.bounded)
        self.gate = build(block.inputs, block.width, inner, axes=("mlp", "hidden"))
        self.up = build(block.inputs, block.width, inner, axes=("mlp", "hidden"))
        self.down = build(block.width, block.inputs, bool(block.bias), axes=("hidden", "mlp"))

    def __call__(self, x: Float[Array, "*rows hidden"]) -> Float[Array, "*rows hidden"]:
        """Computes the block's output, which is added to the residual stream."""
        if self.threshold is not None:
            gate, up = self._projected(x)
            hidden = self.gating(gaussian_sparsity(gate, self.threshold), up)
            return self.down(tapped("hidden", hidden))
        if self.gate.is_plain and self.up.is_plain and not is_tapped("gate", "up"):
            gate, up = self.gate.weight[...], self.up.weight[...]
            if (y := gated_linear(x, gate, up, self.gating.activation)) is not None:
                return self.down(tapped("hidden", y))
        return self.down(tapped("hidden", self.gating(*self._projected(x))))

    def _projected(self, x: Array) -> tuple[Array, Array]:
        gate, up = project(x, (self.gate, self.up))
        return tapped("gate", gate), tapped("up", up)


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
        """Returns the experts of each row and their weights."""
        bias = None if self.bias is None else self.bias[...]
        logits = linear(x.astype(jnp.float32), self.weight[...], bias)
        if (cap := self.block.router_softcap) is not None:
            logits = cap * activate("tanh", logits / cap)
        logits = tapped_rows("router", logits)
        correction = None if self.correction is None else self.correction[...]
        chosen, weights = route(logits, correction, self.block)
        weights = weights if self.scale is None else weights * self.scale[...][chosen]
        observed_rows("experts", lambda: chosen)
        return chosen, tapped_rows("weights", weights)


def _vector(size: int) -> nnx.Param:
    return parameter((size,), ("experts",), jnp.float32)


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
        """Returns the operation's operands."""
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
        """Returns the operation's operands."""
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
        """Computes the block's output, which is added to the residual stream.

        Args:
            routed: the router's input; None: x.
        """
        rows, block = x.reshape(-1, x.shape[-1]), self.router.block
        chosen, weights = self.router(rows if routed is None else routed.reshape(rows.shape))
        experts = self.experts.arrays()
        at = None if experts.up.stacks is None else row_adapters()
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
