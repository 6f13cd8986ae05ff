"""Quantized matmul on a GPU, as one primitive of a traced function.

`jinfer.ops.fusion.fuse_gpu` finds the primitive, and fuses the prologue that computes its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jinfer.ops.backend import interpreted
from kernels_pallas import Backend
from kernels_pallas.matmul.quantized import matmul
from kernels_pallas.matmul.weight_layout import PackedMatrix

if TYPE_CHECKING:
    from jaxtyping import Float, Int

PACKED_MATMUL = Primitive("packed_product")
PACKED_MATMUL.multiple_results = True


def packed_matmul(
    x: Float[Array, "rows inputs"],
    matrices: Sequence[PackedMatrix],
    *,
    index: Int[Array, " 1"] | None = None,
    gated: bool = False,
    backend: Backend = "triton",
) -> tuple[Float[Array, "rows outputs"], ...]:
    """Computes `kernels_pallas.matmul.quantized.matmul` with the kernels of a back end."""
    leaves, tree = jax.tree.flatten((tuple(matrices), index))
    how = {"gated": gated, "backend": backend, "interpret": interpreted()}
    return tuple(PACKED_MATMUL.bind(x, *leaves, tree=tree, **how))


def _product(x: Array, *leaves: Any, tree: Any, **how: Any) -> tuple[Array, ...]:
    matrices, index = jax.tree.unflatten(tree, leaves)
    return matmul(x, matrices, index=index, **how)


@PACKED_MATMUL.def_abstract_eval
def _shapes(x: Any, *leaves: Any, tree: Any, gated: bool, **_: Any) -> list[ShapedArray]:
    matrices, _ = jax.tree.unflatten(tree, leaves)
    results = matrices[:1] if gated else matrices
    return [ShapedArray((x.shape[0], matrix.outputs), jnp.dtype(jnp.float32)) for matrix in results]


PACKED_MATMUL.def_impl(jax.jit(_product, static_argnames=("tree", "gated", "backend", "interpret")))
mlir.register_lowering(PACKED_MATMUL, mlir.lower_fun(_product, multiple_results=True))
