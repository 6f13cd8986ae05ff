"""Feed-forward blocks: MLP, gated MLP (SwiGLU, GeGLU), and single activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jinfer.modelspec import feed_forward_blocks
from jinfer.modelspec.feed_forward_blocks import CLAMPED
from jinfer.nn.activation_taps import is_tapped, tapped
from jinfer.nn.parameter import parameter
from jinfer.nn.projections import Linear, project
from jinfer.ops.activation import activate, xielu
from jinfer.ops.gaussian_sparsity import gaussian_sparsity
from jinfer.ops.matmul.matmul import gated_linear

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class Gating:
    """GLU: activation(gate) * up; the clamped ones are defined on both, clamped_swiglu by gpt-oss's
    model card, clamped_silu by Step 3.7's.

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
        """The gating of a block."""
        return cls(block.activation, block.alpha, block.limit, block.offset)

    def __call__(
        self, gate: Float[Array, "*shape"], up: Float[Array, "*shape"]
    ) -> Float[Array, "*shape"]:
        """The input of the down-projection."""
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
        """The function of x."""
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
        """The block's output, to be added to the residual stream."""
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
        self.gate = Linear(block.inputs, block.width, inner, dtype, ("mlp", "hidden"))
        self.up = Linear(block.inputs, block.width, inner, dtype, ("mlp", "hidden"))
        self.down = Linear(block.width, block.inputs, bool(block.bias), dtype, ("hidden", "mlp"))

    def __call__(self, x: Float[Array, "*rows hidden"]) -> Float[Array, "*rows hidden"]:
        """The block's output, to be added to the residual stream."""
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
