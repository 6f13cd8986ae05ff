"""Reordered inputs (GPTQ's activation order, `desc_act`): a quantized matrix and a permutation.

GPTQ may round inputs in the order of their magnitudes, and groups follow that order: adjacent
inputs have no common scale, but inputs sorted by group do. So the matrix is stored with its inputs
sorted, and activations are sorted in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jinfer.quant.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ReorderedTensor:
    """A matrix [outputs, inputs], or a stack of them: input order[i] is input i of `rounded`.

    Attributes:
        order: int32 [*stack, inputs], a permutation.
        rounded: the matrix with its inputs in this order.
    """

    order: Any
    rounded: QuantizedTensor

    @property
    def stack(self) -> tuple[int, ...]:
        """Leading axes: experts."""
        return self.rounded.stack

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, without padding."""
        return self.rounded.shape

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.rounded.nbytes + int(self.order.size) * int(self.order.dtype.itemsize)

    def __getitem__(self, index: Any) -> ReorderedTensor:
        """Returns a matrix of a stack; `...`: the tensor itself."""
        if index is Ellipsis:
            return self
        if not self.stack:
            raise IndexError("a single matrix has no stack to choose from; use take for rows")
        return jax.tree.map(lambda part: part[index], self)

    def sorted_inputs(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows inputs"]:
        """Reorders the rows that a single matrix is multiplied by to the inputs of `rounded`."""
        return jnp.take(x, self.order, axis=-1, mode="clip")

    def dequantize(self, dtype: Any = np.float32) -> Float[Array, "*stack outputs inputs"]:
        """Dequantizes the matrix, with its inputs in the model's order."""
        return self._in_place(self.rounded.dequantize(dtype))

    def take(self, rows: Int[Array, "*shape"], dtype: Any) -> Float[Array, "*shape inputs"]:
        """Looks up embeddings: dequantized rows of the matrix."""
        xp = np if isinstance(self.order, np.ndarray) else jnp
        return xp.take(self.rounded.take(rows, dtype), xp.argsort(self.order), axis=-1)

    def _in_place(self, values: Any) -> Any:
        xp: Any = np if isinstance(self.order, np.ndarray) else jnp
        back = xp.argsort(self.order, axis=-1)[..., None, :]
        return xp.take_along_axis(values, back, axis=-1)


def abstract_reordered(rounded: QuantizedTensor) -> ReorderedTensor:
    """Returns a `ReorderedTensor` of `jax.ShapeDtypeStruct`s."""
    shape = (*rounded.stack, rounded.inputs)
    return ReorderedTensor(jax.ShapeDtypeStruct(shape, np.int32), rounded)
