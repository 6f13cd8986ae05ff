"""Fused matmul prologue kernel: norm, residual sum or gate, rounding to fp16 and layout of x.

Operations before a matmul are mostly row-wise. A program takes a row, computes it in registers,
finds its power-of-two scale and writes it as fp16 in the order of `weight_layout.arrange_inputs`.
As XLA operations these would be several kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from kernels_pallas.matmul.round_fp16 import row_scale
from kernels_pallas.matmul.weight_layout import PackedMatrix
from kernels_pallas.triton_ops import first_program_id, plt

LONGEST = 1 << 15  # max width of a row in registers
_SUPERBLOCK = 1024


class PrologueOperand(NamedTuple):
    """An input of the computation of rows.

    Attributes:
        array: float32, bfloat16 or float16.
        kind: "full": [..., width], one row each; "parts": [split, rows or more, width], partial
            sums of that; "row": one number per row; "vector": one row for all; "one": one number.
    """

    array: Any
    kind: Literal["full", "parts", "row", "vector", "one"]


class Reductions(NamedTuple):
    """Row reductions available to the computation."""

    sum: Callable[[Array], Array]
    max: Callable[[Array], Array]


# From operands to x and further results. Operands and results broadcast to each other; padding may
# hold anything.
type Compute = Callable[[Sequence[Array], Reductions], Sequence[Array]]


class PreparedRows(NamedTuple):
    """The prepared x operand of matmuls.

    Attributes:
        x: float16 [rows, superblocks, 16 p, 2 G].
        factors: float32 [rows], or [rows, superblocks]: the divisor of each row, or of each
            superblock of it.
    """

    x: Any
    factors: Any


def identity(values: Sequence[Array], _: Reductions) -> Sequence[Array]:
    """The identity, a `Compute` for existing rows."""
    return values[:1]


def fits(width: int) -> bool:
    """Whether one program's registers hold a row."""
    return _tile(width) <= LONGEST


def prepare_rows(
    operands: Sequence[PrologueOperand],
    compute: Compute,
    rows: int,
    like: PackedMatrix,
    extra: Sequence[Any] = (),
    *,
    apart: bool = False,
    interpret: bool = False,
) -> tuple[PreparedRows, tuple[Array, ...]]:
    """Computes rows, rounds them to fp16 with a power-of-two scale each, and arranges them.

    Args:
        compute: x, then further results.
        rows: of the result.
        like: a matrix that x is multiplied by; `fits(like.inputs)`.
        extra: types of the further results.
        apart: each superblock has its own program and scale; without reductions.

    Returns:
        x, and the further results: [rows, width] each.
    """
    width, superblocks = like.inputs, like.superblocks
    tile, programs = (_SUPERBLOCK, superblocks) if apart else (_tile(width), 1)
    kernel = functools.partial(
        _kernel,
        operands=tuple(OperandForm.of(operand) for operand in operands),
        compute=compute,
        rows=rows,
        like=like,
        tile=tile,
        interpret=interpret,
    )
    shapes = [
        jax.ShapeDtypeStruct((rows * superblocks * _SUPERBLOCK,), jnp.float16),
        jax.ShapeDtypeStruct((rows * programs,), jnp.float32),
        *(jax.ShapeDtypeStruct((rows * width,), dtype) for dtype in extra),
    ]
    warps = max(4, min(16, tile // 512))
    x, factors, *others = pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid=(rows, programs),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="prepare_rows",
    )(*(operand.array.reshape(-1) for operand in operands))
    x = x.reshape(rows, superblocks, like.per_code * 16, 2 * like.columns)
    factors = factors.reshape(rows, superblocks) if apart else factors
    return PreparedRows(x, factors), tuple(extra.reshape(rows, width) for extra in others)


class OperandForm(NamedTuple):
    """Static form of an operand: its kind, and for parts their number and padded rows."""

    kind: str
    split: int
    rows: int

    @classmethod
    def of(cls, operand: PrologueOperand) -> OperandForm:
        split, rows = operand.array.shape[:2] if operand.kind == "parts" else (1, 0)
        return cls(operand.kind, split, rows)


def read_row(
    ref: Any, form: OperandForm, row: Array, width: int, place: Array, inside: Array
) -> Array:
    """Loads, in a kernel, an operand's numbers at some positions of a row of `width`."""

    def line(number: Any) -> Array:
        return plt.load(ref.at[number * width + place], mask=inside, other=np.zeros((), ref.dtype))

    match form.kind:
        case "full":
            return line(row)
        case "parts":
            parts = [line(part * form.rows + row) for part in range(form.split)]
            return functools.reduce(jnp.add, parts)
        case "vector":
            return line(0)
        case _:
            return ref[row if form.kind == "row" else 0]


def _tile(width: int) -> int:
    """Returns the numbers of a row in registers: a power of two, whole superblocks."""
    return max(_SUPERBLOCK, 1 << (width - 1).bit_length())


def _kernel(
    *refs: Any,
    operands: Sequence[OperandForm],
    compute: Compute,
    rows: int,
    like: PackedMatrix,
    tile: int,
    interpret: bool,
) -> None:
    row, width = first_program_id(asm=not interpret), like.inputs
    part, parts = pl.program_id(1), pl.num_programs(1)
    x_ref, factors_ref, *others = refs[len(operands) :]
    place = part * tile + lax.iota(jnp.int32, tile)
    inside = place < width

    def whole(x: Array) -> Array:
        return jnp.broadcast_to(x, (tile,)).astype(jnp.float32)

    def reduced(function: Any, neutral: float, x: Array) -> Array:
        return function(jnp.where(inside, whole(x), np.float32(neutral))).astype(x.dtype)

    reductions = Reductions(
        functools.partial(reduced, jnp.sum, 0.0), functools.partial(reduced, jnp.max, -np.inf)
    )
    values = [
        read_row(ref, form, row, width, place, inside)
        for ref, form in zip(refs, operands, strict=False)
    ]
    x, *extra_outputs = compute(values, reductions)
    x = jnp.where(inside, whole(x), np.float32(0))
    factor = row_scale(jnp.max(jnp.abs(x)))
    factors_ref[row * parts + part] = factor
    p, g = like.per_code, like.columns
    x16 = (x / factor).astype(jnp.float16).reshape(-1, p, g, 8, 2, 2)
    x16 = x16.transpose(0, 1, 3, 5, 2, 4).reshape(tile)
    to = (row * like.padded_inputs + place,)
    store(x_ref, to, x16, place < like.padded_inputs, interpret)
    for ref, extra in zip(others, extra_outputs, strict=True):
        extra = jnp.broadcast_to(extra, (tile,)).astype(ref.dtype)
        store(ref, (row * width + place,), extra, inside, interpret)


def store(ref: Any, places: tuple[Array, ...], value: Array, mask: Array, interpret: bool) -> None:
    """Writes, in a kernel, some numbers of an array."""
    first, *others = places
    # A masked index must not alias another: interpret mode writes back the numbers it read.
    first = jnp.where(mask, first, ref.shape[0]) if interpret else first
    plt.store(ref.at[(first, *others)], value, mask=mask)
