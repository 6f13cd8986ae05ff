"""KV cache write kernel: sums split-K partial results of q, k and v, applies RoPE, and writes.

A program takes one head of one token. It reads each rotated number and its partner, so that threads
need no exchange.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from kernels_pallas.matmul.prologue import (
    Compute,
    OperandForm,
    PrologueOperand,
    Reductions,
    read_row,
    store,
)
from kernels_pallas.triton_ops import first_program_id, plt

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_LARGEST = float(np.finfo(np.float16).max)


def _refuse(x: Array) -> Array:
    raise ValueError("a program has one head of a row, not the row")


_NOTHING = Reductions(_refuse, _refuse)


class Rotation(NamedTuple):
    """RoPE angles (arXiv 2104.09864).

    Attributes:
        cos, sin: float32 [tokens, pairs].
        adjacent: the numbers of a pair are neighbours; otherwise they are `pairs` apart.
    """

    cos: Any
    sin: Any
    adjacent: bool


class HeadVectors(NamedTuple):
    """Vectors of new tokens, [tokens, heads, size].

    Attributes:
        operands: operands of `compute`, as rows of heads * size numbers.
        compute: element-wise, without reductions.
        heads, size: heads per token, numbers per head.
        rotation: None: not rotated.
        dtype: of the result.
    """

    operands: Sequence[PrologueOperand]
    compute: Compute
    heads: int
    size: int
    rotation: Rotation | None
    dtype: Any


class WriteSlots(NamedTuple):
    """Positions and block tables of a flat batch; see `batch.QueryBatch`."""

    rows: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    tables: Int[Array, "rows blocks"]


def write_kv(
    q: HeadVectors,
    k: HeadVectors,
    v: HeadVectors,
    keys: Float[Array, "blocks kv_heads block size"],
    values: Float[Array, "blocks kv_heads block size"],
    at: WriteSlots,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens heads size"], Array, Array]:
    """Returns queries, and the pools with the new keys and values; padding is not written.

    Args:
        keys, values: donated.
    """
    count, parts = at.rows.shape[0], (q, k, v)
    rotations = [[] if part.rotation is None else list(part.rotation[:2]) for part in parts]
    flat = [
        [*(operand.array.reshape(-1) for operand in part.operands), *(a.reshape(-1) for a in turn)]
        for part, turn in zip(parts, rotations, strict=True)
    ]
    operands = [array for own in flat for array in own]
    static = [_HeadConfig.of(part) for part in parts]
    places = [part.astype(jnp.int32) for part in at]
    kernel = functools.partial(_kernel, parts=static, interpret=interpret)
    before = len(places) + len(operands)
    out, keys, values = pl.pallas_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct((count * q.heads * q.size,), q.dtype),
            *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in (keys, values)),
        ],
        grid=(count, q.heads + k.heads + v.heads),
        input_output_aliases={before: 1, before + 1: 2},
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="enter_cache",
    )(*places, *operands, keys, values)
    return out.reshape(count, q.heads, q.size), keys, values


class _HeadConfig(NamedTuple):
    """Compile-time configuration of queries, keys or values."""

    forms: tuple[OperandForm, ...]
    compute: Compute
    heads: int
    size: int
    pairs: int
    adjacent: bool
    dtype: Any

    @classmethod
    def of(cls, part: HeadVectors) -> _HeadConfig:
        forms = tuple(OperandForm.of(operand) for operand in part.operands)
        turn = part.rotation
        pairs = 0 if turn is None else turn.cos.shape[-1]
        adjacent = turn is not None and turn.adjacent
        return cls(forms, part.compute, part.heads, part.size, pairs, adjacent, part.dtype)


def _kernel(
    rows_ref: Any,
    positions_ref: Any,
    tables_ref: Any,
    *refs: Any,
    parts: Sequence[_HeadConfig],
    interpret: bool,
) -> None:
    out_ref, *pools = refs[-3:]
    token, number = first_program_id(asm=not interpret), pl.program_id(1)
    begin, first = 0, 0
    for index, part in enumerate(parts):
        end = begin + len(part.forms) + (2 if part.pairs else 0)

        def compute(
            index: int = index,
            part: _HeadConfig = part,
            own: Sequence[Any] = refs[begin:end],
            first: int = first,
        ) -> None:
            head = number - first
            inner = lax.iota(jnp.int32, 1 << (part.size - 1).bit_length())
            inside = inner < part.size
            y = _vector(own, part, token, head, inner, inside)
            if index == 0:
                place = (token * part.heads + head) * part.size + inner
                store(out_ref, (place,), y.astype(part.dtype), inside, interpret)
                return
            ref = pools[index - 1]
            block, offset, known = _place(rows_ref, positions_ref, tables_ref, ref, token)
            whole = [jnp.broadcast_to(index, inner.shape) for index in (block, head, offset)]
            new = _kept(y.astype(part.dtype), ref.dtype)
            store(ref, (*whole, inner), new, inside & known, interpret)

        pl.when((number >= first) & (number < first + part.heads))(compute)
        begin, first = end, first + part.heads


def _vector(
    refs: Sequence[Any], part: _HeadConfig, token: Array, head: Array, inner: Array, inside: Array
) -> Array:
    """Returns a head's rotated numbers."""
    width, start = part.heads * part.size, head * part.size

    def at(place: Array) -> Array:
        vectors = [
            read_row(ref, form, token, width, start + place, inside)
            for ref, form in zip(refs, part.forms, strict=False)
        ]
        return jnp.broadcast_to(part.compute(vectors, _NOTHING)[0], inner.shape)

    own = at(inner)
    if not part.pairs:
        return own
    cos_ref, sin_ref = refs[len(part.forms) :]
    pairs = part.pairs
    turned = inner < 2 * pairs
    if part.adjacent:
        second, pair = inner % 2 == 1, inner // 2
        partner = inner + jnp.where(second, -1, 1)
    else:
        second, pair = inner >= pairs, inner % pairs
        partner = inner + jnp.where(second, -pairs, pairs)
    other = at(jnp.where(turned, partner, inner))
    angle = token * pairs + jnp.where(turned, pair, 0)
    cos, sin = (plt.load(ref.at[angle]) for ref in (cos_ref, sin_ref))
    x, y = own.astype(jnp.float32), other.astype(jnp.float32)
    rotated = x * cos + jnp.where(second, y * sin, -(y * sin))
    return jnp.where(turned, rotated.astype(own.dtype), own)


def _place(
    rows_ref: Any, positions_ref: Any, tables_ref: Any, pool: Any, token: Array
) -> tuple[Array, Array, Array]:
    """Returns block and offset of a token, and whether this pool has it."""
    row, position = rows_ref[token], positions_ref[token]
    rows, blocks = tables_ref.shape
    size = pool.shape[2]
    index = position // size
    known = (row >= 0) & (row < rows) & (position >= 0) & (index < blocks)
    block = tables_ref[jnp.where(known, row, 0), jnp.where(known, index, 0)]
    known &= (block >= 0) & (block < pool.shape[0])
    return jnp.where(known, block, 0), jnp.where(known, position % size, 0), known


def _kept(new: Array, dtype: Any) -> Array:
    if dtype == jnp.float16 and new.dtype != jnp.float16:
        new = jnp.clip(new.astype(jnp.float32), np.float32(-_LARGEST), np.float32(_LARGEST))
    return new.astype(dtype)
