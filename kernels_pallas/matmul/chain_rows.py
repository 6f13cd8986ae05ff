"""Inside the persistent kernel: x of a link, row by row, and its rounding to fp16.

A warp group takes whole rows where the link reduces them, otherwise superblocks of rows, each with
a power of two of its own. Results are in global memory in the order that slices have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from kernels_pallas.matmul.chain import SUPERBLOCK, ChainLink
from kernels_pallas.matmul.prologue import Reductions
from kernels_pallas.matmul.round_fp16 import row_scale
from kernels_pallas.mosaic_common import plgpu
from kernels_pallas.ptx import arranged_store


class RowOperand(NamedTuple):
    """An operand in global memory: its reference, and its kind as in `PrologueOperand`."""

    ref: Any
    kind: str


class RowTargets(NamedTuple):
    """Where rows go: references to global memory.

    Attributes:
        x: float16 [superblocks, rows, 1024].
        highest: float32 [superblocks, rows], magnitudes that x is scaled by.
        extra: [rows, width] of each further result.
    """

    x: Any
    highest: Any
    extra: Sequence[Any]


def row_tasks(link: ChainLink, rows: int) -> int:
    """Number of tasks of a link: rows, or superblocks of rows."""
    return rows if link.reduces else rows * link.superblocks


def compute_rows(
    link: ChainLink,
    task: Array,
    operands: Sequence[RowOperand],
    to: RowTargets,
    *,
    keeps_extra: Array,
    interpret: bool,
) -> None:
    """One task, by one warp group.

    Args:
        keeps_extra: whether the further results are written too.
    """
    parts = 1 if link.reduces else link.superblocks
    row, first = lax.div(task, parts), lax.rem(task, parts)
    size = link.superblocks * SUPERBLOCK // parts
    columns = pl.ds(pl.multiple_of(first * size, size), size)
    values = [_read(operand, row, columns) for operand in operands]
    x, *extra = link.compute(values, Reductions(_whole(jnp.sum, size), _whole(jnp.max, size)))
    x = _spread(x, size).astype(jnp.float32)
    highest = jnp.max(jnp.abs(x))
    for n in range(size // SUPERBLOCK):
        to.highest[first + n, row] = highest
    _store(to.x, first, row, x / row_scale(_spread(highest, size)), interpret)

    @pl.when(keeps_extra)
    def keep() -> None:
        for ref, value in zip(to.extra, extra, strict=True):
            ref[row, columns] = _spread(value, size).astype(ref.dtype)


def _read(operand: RowOperand, row: Array, columns: Any) -> Array:
    """An operand's numbers of a row: a vector, or one number for all of it."""
    ref = operand.ref

    def line(at: Any) -> Array:
        return plgpu.layout_cast(at[...], plgpu.Layout.WG_STRIDED((columns.size,), vec_size=4))

    match operand.kind:
        case "full":
            return line(ref.at[row, columns])
        case "parts":
            total = line(ref.at[0, row, columns])
            for part in range(1, ref.shape[0]):
                total = total + line(ref.at[part, row, columns])
            return total
        case "vector":
            return line(ref.at[columns])
        case _:
            value: Array = ref[row if operand.kind == "row" else 0]
            return value


def _whole(function: Any, size: int) -> Any:
    def reduced(x: Array) -> Array:
        return function(_spread(x, size).astype(jnp.float32)).astype(x.dtype)

    return reduced


def _spread(x: Array, size: int) -> Array:
    return x if x.ndim else jnp.broadcast_to(x, (size,))


def _store(ref: Any, first: Array, row: Array, x: Array, interpret: bool) -> None:
    count = x.shape[0] // SUPERBLOCK
    target = ref.at[pl.ds(first, count), row]
    if not interpret:
        arranged_store(target, x)
        return
    x16 = x.astype(jnp.float16).reshape(count, SUPERBLOCK // 32, 8, 2, 2)
    target[...] = x16.transpose(0, 2, 4, 1, 3).reshape(count, SUPERBLOCK)
