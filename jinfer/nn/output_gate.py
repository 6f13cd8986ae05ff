"""Gate on the outputs of attention's heads, before `o` (arXiv 2505.06708)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jinfer.modelspec import attention_blocks
from jinfer.nn.forward_context import split_heads
from jinfer.nn.parameter import parameter
from jinfer.nn.projections import Linear
from jinfer.ops.activation import activate

if TYPE_CHECKING:
    from jaxtyping import Float


class GatedHeads(nnx.Module):
    """What attentions with a gate have in common: their parameters `gate` and `gate_bias`."""

    def build_gate(
        self,
        spec: attention_blocks.OutputGateSpec,
        inputs: int,
        heads: int,
        width: int,
        dtype: DTypeLike,
    ) -> None:
        """Args:
        width: of the outputs of all heads.
        """
        outputs = width if spec.per == "element" else heads
        self.gate = Linear(inputs, outputs, spec.bias is True, dtype, ("heads", "hidden"))
        if spec.bias == "head":
            self.gate_bias = parameter((heads,), ("heads",), dtype)

    def gated(
        self,
        spec: attention_blocks.OutputGateSpec,
        out: Float[Array, "batch tokens heads width"],
        x: Float[Array, "batch tokens inputs"],
    ) -> Float[Array, "batch tokens heads width"]:
        """The heads' outputs, gated by a projection of x."""
        gate = split_heads(self.gate(x), out.shape[2])
        if spec.bias == "head":
            gate = gate + self.gate_bias[...][None, None, :, None]
        factors = activate(spec.activation, gate)
        return out * (factors * spec.scale if spec.scale != 1 else factors)
