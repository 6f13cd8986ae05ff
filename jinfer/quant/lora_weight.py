"""LoRA weight: weight + b a, whose low-rank term is never added to the weight.

Hu et al. 2021, arXiv 2106.09685; with a quantized weight QLoRA, arXiv 2305.14314.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from jinfer.matmul_precision import matmul

if TYPE_CHECKING:
    from jaxtyping import Float


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRankSum:
    """A matrix [outputs, inputs], or a stack of them, plus b a.

    Attributes:
        weight: an array or any kind of tensor.
        a: [*stack, rank, inputs].
        b: [*stack, outputs, rank].
    """

    weight: Any
    a: Any
    b: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return tuple(self.weight.shape)

    def __getitem__(self, index: Any) -> LowRankSum:
        """Returns the tensor itself for `...`, as Flax reads parameters."""
        if index is not Ellipsis:
            raise IndexError("a matrix of a stack is chosen where it is multiplied")
        return self

    def term(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows outputs"]:
        """Computes x a^T b^T in float32, for a single matrix, not a stack."""
        a, b = self.a.astype(jnp.float32), self.b.astype(jnp.float32)
        return matmul(matmul(x.astype(jnp.float32), a.T), b.T)
