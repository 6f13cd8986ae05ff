"""x as the products' kernels take it, made in one kernel from what it is computed from.

Norms, sums with a residual, a gate: what comes before a product is mostly computed of each row by
itself. A program takes a row, computes all of it in registers, finds its power of two and writes it
as fp16 in the order of `layout.arranged`. In XLA's operations each of these would be one kernel or
more, of a microsecond or two each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from kernels_pallas.matmul.round_fp16 import power_of, rounded
from kernels_pallas.matmul.weight_layout import Packed, arranged
from kernels_pallas.pdl import first_program_id
from kernels_pallas.triton_ops import plt

if TYPE_CHECKING:
    from jaxtyping import Float

LONGEST = 1 << 15  # numbers of a row that registers hold
_SUPERBLOCK = 1024


class Operand(NamedTuple):
    """What rows are computed from.

    Attributes:
        array: float32, bfloat16 or float16.
        kind: "full": [..., width], a row of numbers for each; "parts": [split, rows or more,
            width], which add up to that; "row": a number for each row; "vector": one row for all;
            "one": a number.
    """

    array: Any
    kind: Literal["full", "parts", "row", "vector", "one"]


class Reductions(NamedTuple):
    """Of a row to a number, which what is computed of a row is given."""

    sum: Callable[[Array], Array]
    max: Callable[[Array], Array]


# From operands to x and what else is wanted of the rows. Operands and results can be broadcast to
# each other; padding may hold anything.
type Compute = Callable[[Sequence[Array], Reductions], Sequence[Array]]


class Prepared(NamedTuple):
    """The other factor of products.

    Attributes:
        x: float16 [rows, superblocks, 16 p, 2 G].
        factors: float32 [rows], or [rows, superblocks]: what each row, or each superblock of it,
            was divided by.
    """

    x: Any
    factors: Any


def alone(values: Sequence[Array], _: Reductions) -> Sequence[Array]:
    """The `Compute` of rows that are there already."""
    return values[:1]


def fits(width: int) -> bool:
    """Whether a row is held by one program's registers."""
    return _tile(width) <= LONGEST


def prepare(
    operands: Sequence[Operand],
    compute: Compute,
    rows: int,
    like: Packed,
    extra: Sequence[Any] = (),
    *,
    apart: bool = False,
    interpret: bool = False,
) -> tuple[Prepared, tuple[Array, ...]]:
    """Computes rows, rounds them to fp16, each by its own power of two, and arranges them.

    Args:
        compute: x, then what else is wanted.
        rows: of the result.
        like: a matrix that x is multiplied with; `fits(like.inputs)`.
        extra: types of what else is wanted.
        apart: each superblock has a program, and a power of two, of its own; nothing is reduced.

    Returns:
        x, and what else is wanted: [rows, width] each.
    """
    width, superblocks = like.inputs, like.superblocks
    tile, programs = (_SUPERBLOCK, superblocks) if apart else (_tile(width), 1)
    kernel = functools.partial(
        _kernel,
        operands=tuple(Form.of(operand) for operand in operands),
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
    return Prepared(x, factors), tuple(other.reshape(rows, width) for other in others)


def prepare_reference(
    operands: Sequence[Operand], compute: Compute, rows: int, like: Packed, *, apart: bool = False
) -> tuple[Float[Array, "rows superblocks slices places"], Array, Sequence[Array]]:
    """The same in XLA's operations."""
    shapes = {"full": (rows, -1), "row": (rows, 1), "vector": (1, -1), "one": (1, 1)}

    def value(operand: Operand) -> Array:
        if operand.kind == "parts":
            return jnp.sum(operand.array[:, :rows], axis=0)
        return jnp.reshape(operand.array, shapes[operand.kind])

    full = (rows, like.inputs)

    def reduced(function: Any, x: Array) -> Array:
        return function(jnp.broadcast_to(x, full), axis=1, keepdims=True)

    reductions = Reductions(*(functools.partial(reduced, one) for one in (jnp.sum, jnp.max)))
    x, *others = compute([value(operand) for operand in operands], reductions)
    x, others = jnp.broadcast_to(x, full), [jnp.broadcast_to(other, full) for other in others]
    if not apart:
        x16, factors = rounded(x)
        return arranged(x16, like), factors, others
    padded = jnp.pad(x, ((0, 0), (0, like.padded_inputs - like.inputs)))
    x16, factors = rounded(padded.reshape(-1, _SUPERBLOCK))
    x16 = x16.reshape(rows, -1)[:, : like.inputs]
    return arranged(x16, like), factors.reshape(rows, -1), others


class Form(NamedTuple):
    """Of an operand: its kind, and of parts how many there are and their rows with padding."""

    kind: str
    split: int
    rows: int

    @classmethod
    def of(cls, operand: Operand) -> Form:
        split, rows = operand.array.shape[:2] if operand.kind == "parts" else (1, 0)
        return cls(operand.kind, split, rows)


def read_row(ref: Any, form: Form, row: Array, width: int, place: Array, inside: Array) -> Array:
    """Inside a kernel: an operand's numbers at some places of a row of `width`."""

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
    """Numbers of a row in registers: a power of two, whole superblocks."""
    return max(_SUPERBLOCK, 1 << (width - 1).bit_length())


def _kernel(
    *refs: Any,
    operands: Sequence[Form],
    compute: Compute,
    rows: int,
    like: Packed,
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
    x, *wanted = compute(values, reductions)
    x = jnp.where(inside, whole(x), np.float32(0))
    factor = power_of(jnp.max(jnp.abs(x)))
    factors_ref[row * parts + part] = factor
    p, g = like.per_code, like.columns
    x16 = (x / factor).astype(jnp.float16).reshape(-1, p, g, 8, 2, 2)
    x16 = x16.transpose(0, 1, 3, 5, 2, 4).reshape(tile)
    _store(x_ref, row * like.padded_inputs + place, x16, place < like.padded_inputs, interpret)
    for ref, other in zip(others, wanted, strict=True):
        other = jnp.broadcast_to(other, (tile,)).astype(ref.dtype)
        _store(ref, row * width + place, other, inside, interpret)


def _store(ref: Any, place: Array, value: Array, mask: Array, interpret: bool) -> None:
    # Interpreted, a masked place writes back what it read: it must not be another's.
    place = jnp.where(mask, place, ref.shape[0]) if interpret else place
    plt.store(ref.at[place], value, mask=mask)
