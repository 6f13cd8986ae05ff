"""Grouped matmul (MoE) with plain matrices, as a Triton-style Pallas kernel.

On a GPU XLA (0.12) implements `jax.lax.ragged_dot` as a matmul of every row with every expert: it
writes x once per expert and reads all matrices.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from kernels_pallas.matmul.grouped_quantized import expert_tiles
from kernels_pallas.pdl import first_program_id
from kernels_pallas.triton_ops import plt

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_LEAST, _MOST_ROWS = 16, 64  # of a tile: the least tensor cores take, the most registers hold
_OUTPUTS = 64  # of a tile
_BYTES = 128  # read at once from each row of a tile


def takes(matrices: Array, *, transposed: bool = False) -> bool:
    """Whether `grouped_dense_matmul` supports these matrices [experts, outputs, inputs]."""
    _, outputs, inputs = _sizes(matrices, transposed)
    return outputs >= _LEAST and _step(matrices, inputs) >= _LEAST


def grouped_dense_matmul(
    x: Float[Array, "rows inputs"],
    offsets: Int[Array, " experts_1"],
    matrices: Float[Array, "experts outputs inputs"],
    *,
    transposed: bool = False,
    interpret: bool = False,
) -> Float[Array, "rows outputs"]:
    """Each row times the transpose of its expert's matrix, in float32.

    Operands have x's type if the matrices have it too, otherwise full float32.

    Args:
        offsets: int32; rows offsets[i] .. offsets[i + 1] - 1 use matrix i; others are undefined.
        matrices: see `takes`.
        transposed: they are [experts, inputs, outputs] instead.
        interpret: runs the kernel without a GPU, slowly.
    """
    rows, (count, outputs, inputs) = x.shape[0], _sizes(matrices, transposed)
    share = -(-rows // count)
    size = min(max(_LEAST, 1 << (share - 1).bit_length()), _MOST_ROWS)
    tile = min(_OUTPUTS, 1 << (outputs.bit_length() - 1))
    which = expert_tiles(offsets, rows, size)
    return pl.pallas_call(
        functools.partial(
            _kernel,
            size=size,
            tile=tile,
            step=_step(matrices, inputs),
            transposed=transposed,
            asm=not interpret,
        ),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), jnp.float32),
        grid=(-(-outputs // tile), which.shape[1]),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="dense_experts",
    )(which, x, matrices)


def _sizes(matrices: Any, transposed: bool) -> tuple[int, int, int]:
    """Experts, outputs and inputs."""
    experts, outputs, inputs = matrices.shape
    return (experts, inputs, outputs) if transposed else (experts, outputs, inputs)


def _step(matrices: Array, inputs: int) -> int:
    """Inputs read at once: a power of two that divides all."""
    return int(min(_BYTES // matrices.dtype.itemsize, inputs & -inputs))


def _kernel(
    which_ref: Any,
    x_ref: Any,
    matrices_ref: Any,
    out_ref: Any,
    *,
    size: int,
    tile: int,
    step: int,
    transposed: bool,
    asm: bool,
) -> None:
    number = first_program_id(asm=asm)
    expert, row, present = (which_ref[i, pl.program_id(1)] for i in range(3))
    _, outputs, inputs = _sizes(matrices_ref, transposed)
    # The last tile begins earlier if outputs do not divide.
    start = jnp.minimum(number * tile, outputs - tile)
    same = x_ref.dtype == matrices_ref.dtype

    @pl.when(present > 0)
    def compute() -> None:
        rows, columns = pl.ds(row, size), pl.ds(start, tile)
        there = lax.iota(jnp.int32, size) < present
        read = jnp.broadcast_to(there[:, None], (size, step))

        def add(i: Array, total: Array) -> Array:
            part = pl.ds(i * step, step)
            # Masked rows cost no memory traffic.
            left = plt.load(x_ref.at[rows, part], mask=read, other=np.zeros((), x_ref.dtype))
            read_at = (part, columns) if transposed else (columns, part)
            right = plt.load(matrices_ref.at[expert, *read_at])
            if not same:
                left, right = left.astype(jnp.float32), right.astype(jnp.float32)
            exact = False if left.dtype == jnp.float32 else None
            return total + plt.dot(left, right, trans_b=not transposed, allow_tf32=exact)

        total = lax.fori_loop(0, inputs // step, add, jnp.zeros((size, tile), jnp.float32))
        written = jnp.broadcast_to(there[:, None], total.shape)
        plt.store(out_ref.at[rows, columns], total, mask=written)
