"""Attention of a few new tokens over a long cache.

Each program takes all query heads that share a key head, as rows of one tensor-core tile, and a
part of the sequence; the parts are merged exactly. Only keys that some query sees are read.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas.rounding import rounded
from kernels_pallas.tiling import MULTIPROCESSORS

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

_KEYS = 64  # of a step of the loop
_ROWS = 64  # at most, of a tile
_LEAST_PART = 256  # keys
_NEVER = -1e30  # a score that no key has: -inf would make NaN of differences
_BLOCK = 32  # numbers of a row of the cache that share a scale


class Kept(NamedTuple):
    """Keys or values of all slots.

    Attributes:
        codes: [slots, kv_heads, length, d] of a floating type or int8; or uint8 [..., d / 2], where
            byte j has number j in its low and number j + d / 2 in its high four bits, both plus 8.
        scales: float16 [slots, kv_heads, length, d / 32] where codes are integers.
    """

    codes: Any
    scales: Any | None = None

    @property
    def dim(self) -> int:
        """d: numbers of a row."""
        return int(self.codes.shape[-1]) * self.halves

    @property
    def halves(self) -> int:
        """Numbers that share a byte."""
        return 2 if self.codes.dtype == jnp.uint8 else 1


class Partial(NamedTuple):
    """Attention over a part of the keys.

    Attributes:
        out: weighted sum of values, not yet divided by `total`.
        highest: largest score of each row; very low where it saw no key.
        total: sum of exp(score - highest).
    """

    out: Float[Array, "batch tokens heads value_dim"]
    highest: Float[Array, "batch tokens heads"]
    total: Float[Array, "batch tokens heads"]


class _Static(NamedTuple):
    """What a kernel is compiled for."""

    scale: float
    softcap: float | None
    tree: bool
    length: int
    key_dims: tuple[int, int]  # halves, numbers of a half
    value_dims: tuple[int, int]
    parts: int
    tokens: int


def attend(
    q: Float[Array, "batch tokens heads key_dim"],
    keys: Kept,
    values: Kept,
    slots: Int[Array, " batch"],
    low: Int[Array, "batch tokens"],
    last: Int[Array, "batch tokens"],
    *,
    scale: float,
    softcap: float | None = None,
    tree: Bool[Array, "batch tokens tokens"] | None = None,
    backend: Literal["triton", "xla"] = "triton",
    interpret: bool = False,
) -> Partial:
    """Attention over the cache, with the new tokens already in it.

    Query head h reads key head h * kv_heads // heads.

    Args:
        slots: the slot of each sequence.
        low, last: the first and the last key that a query may see: a window's, and its own place
            where attention is causal. `last` is below the cache's length.
        scale: multiplies the scores.
        softcap: then they become softcap * tanh(score / softcap).
        tree: the newest keys are those from max(last) - tokens + 1 on; which of them a query sees.
    """
    # Tensor cores take 16 numbers of a row at once.
    even = all(part.dim // part.halves % 16 == 0 for part in (keys, values))
    run = _triton if backend == "triton" and even else _plain
    static = _Static(
        float(scale),
        softcap,
        tree is not None,
        keys.codes.shape[2],
        (keys.halves, keys.dim // keys.halves),
        (values.halves, values.dim // values.halves),
        _parts(q.shape[0] * keys.codes.shape[1], keys.codes.shape[2]),
        q.shape[1],
    )
    low, last = jnp.maximum(low, 0).astype(jnp.int32), last.astype(jnp.int32)
    return run(q, keys, values, slots.astype(jnp.int32), low, last, tree, static, interpret)


def with_sinks(part: Partial, sinks: Float[Array, " heads"] | None = None) -> Array:
    """The attention's result: divided by the sum, which sinks (scores without value) take part in.

    A query that sees no key gets zeros.
    """
    total, out = part.total, part.out
    if sinks is not None:
        score = jnp.broadcast_to(sinks.astype(jnp.float32)[None, None], total.shape)
        highest = jnp.maximum(part.highest, score)
        scale = jnp.exp(part.highest - highest)
        total, out = total * scale + jnp.exp(score - highest), out * scale[..., None]
    return out / jnp.where(total > 0, total, jnp.float32(1))[..., None]


def _parts(programs: int, length: int) -> int:
    """Parts of the sequence, so that every multiprocessor has some."""
    wanted = -(-2 * MULTIPROCESSORS // programs)
    return max(1, min(wanted, -(-length // _LEAST_PART)))


def _triton(
    q: Array,
    keys: Kept,
    values: Kept,
    slots: Array,
    low: Array,
    last: Array,
    tree: Array | None,
    static: _Static,
    interpret: bool,
) -> Partial:
    batch, tokens, heads, _ = q.shape
    kv_heads = keys.codes.shape[1]
    group = heads // kv_heads
    size = min(_ROWS, max(16, _power_of_two(group * tokens)))
    rows = -(-group * tokens // size) * size
    spare = rows - group * tokens

    factors, q = _factored(q, keys.codes.dtype)
    q_rows = _pad(_grouped(q, kv_heads), spare, 2)
    factor_rows = _pad(_grouped(factors[..., None], kv_heads)[..., 0], spare, 2)
    low_rows = _pad(jnp.tile(low, (1, group)), spare, 1)
    last_rows = _pad(jnp.tile(last, (1, group)), spare, 1, -1)
    span = jnp.stack([jnp.min(low, axis=1), jnp.max(last, axis=1) + 1], axis=1)
    sees = jnp.ones((1, 1, 1), jnp.int32)
    if tree is not None:
        sees = _pad(jnp.tile(tree.astype(jnp.int32), (1, group, 1)), spare, 1)

    lead = (batch, kv_heads, static.parts, rows)
    per_row = jax.ShapeDtypeStruct(lead, jnp.float32)
    kept = [[part for part in both if part is not None] for both in (keys, values)]
    outs = jax.ShapeDtypeStruct((*lead, values.dim), jnp.float32)
    out, highest, total = pl.pallas_call(
        functools.partial(_kernel, static=static, size=size, count=len(kept[0])),
        out_shape=[outs, per_row, per_row],
        grid=(batch * kv_heads, rows // size, static.parts),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="decode_attention",
    )(slots, span, low_rows, last_rows, sees, factor_rows, q_rows, *kept[0], *kept[1])

    most = jnp.max(highest, axis=2)
    scale = jnp.exp(highest - most[:, :, None])
    part = Partial(
        jnp.sum(out * scale[..., None], axis=2),
        most,
        jnp.sum(total * scale, axis=2),
    )

    def back(rows: Array) -> Array:
        """[batch, kv_heads, rows, ...] -> [batch, tokens, heads, ...]."""
        rest = rows.shape[3:]
        rows = rows[:, :, : group * tokens].reshape(batch, heads, tokens, *rest)
        return jnp.swapaxes(rows, 1, 2)

    return Partial(*(back(field) for field in part))


def _kernel(
    slots_ref: Any,
    span_ref: Any,
    low_ref: Any,
    last_ref: Any,
    sees_ref: Any,
    factor_ref: Any,
    q_ref: Any,
    *refs: Any,
    static: _Static,
    size: int,
    count: int,
) -> None:
    *kept, out_ref, highest_ref, total_ref = refs
    keys, values = kept[:count], kept[count:]
    kv_heads = q_ref.shape[1]
    b, head = pl.program_id(0) // kv_heads, pl.program_id(0) % kv_heads
    first, part = pl.program_id(1) * size, pl.program_id(2)
    rows = pl.ds(first, size)
    slot = slots_ref[b]
    low, last, factor = low_ref[b, rows], last_ref[b, rows], factor_ref[b, head, rows]
    end = span_ref[b, 1]
    begin = span_ref[b, 0] // _KEYS * _KEYS
    steps = (jnp.maximum(end - begin, 0) + _KEYS - 1) // _KEYS
    each = (steps + static.parts - 1) // static.parts
    begin = begin + part * each * _KEYS
    q = [q_ref[b, head, rows, pl.ds(*piece)] for piece in _pieces(static.key_dims)]

    def step(i: Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
        outs, highest, total = state
        start = begin + i * _KEYS
        place = start + lax.iota(jnp.int32, _KEYS)
        there = place < end
        where = (slot, head, pl.ds(start, _KEYS))
        scores = jnp.zeros((size, _KEYS), jnp.float32)
        for left, right in zip(q, _load(keys, where, there, static.key_dims), strict=True):
            scores += _dot(left, right, trans_b=True)
        scores *= factor[:, None] * np.float32(static.scale)
        if static.softcap is not None:
            scores = np.float32(static.softcap) * _tanh(scores / np.float32(static.softcap))
        sees = (place[None, :] >= low[:, None]) & (place[None, :] <= last[:, None])
        if static.tree:
            node = place - (end - static.tokens)
            newest = jnp.broadcast_to(((node >= 0) & there)[None], (size, _KEYS))
            at_row = first + lax.broadcasted_iota(jnp.int32, (size, _KEYS), 0)
            at_node = jnp.broadcast_to(jnp.clip(node, 0, static.tokens - 1)[None], (size, _KEYS))
            seen = plt.load(sees_ref.at[b, at_row, at_node], mask=newest, other=np.int32(1))
            sees = sees & (seen > 0)
        scores = jnp.where(sees, scores, np.float32(_NEVER))
        most = jnp.maximum(highest, jnp.max(scores, axis=1))
        weights = jnp.where(sees, jnp.exp(scores - most[:, None]), np.float32(0))
        scale = jnp.exp(highest - most)
        pieces = _load(values, where, there, static.value_dims)
        outs = tuple(
            out * scale[:, None] + _dot(weights.astype(piece.dtype), piece)
            for out, piece in zip(outs, pieces, strict=True)
        )
        return outs, most, total * scale + jnp.sum(weights, axis=1)

    pieces = _pieces(static.value_dims)
    zeros = tuple(jnp.zeros((size, width), jnp.float32) for _, width in pieces)
    lowest = jnp.full((size,), _NEVER, jnp.float32)
    state = (zeros, lowest, jnp.zeros((size,), jnp.float32))
    outs, highest, total = lax.fori_loop(0, jnp.clip(steps - part * each, 0, each), step, state)
    for out, piece in zip(outs, pieces, strict=True):
        out_ref[b, head, part, rows, pl.ds(*piece)] = out
    highest_ref[b, head, part, rows] = highest
    total_ref[b, head, part, rows] = total


def _pieces(dims: tuple[int, int]) -> list[tuple[int, int]]:
    """(start, width) of the tiles that a row is read in, whose widths are powers of two."""
    halves, dim = dims
    widths = [1 << bit for bit in reversed(range(dim.bit_length())) if dim >> bit & 1] * halves
    return [(sum(widths[:i]), width) for i, width in enumerate(widths)]


def _load(refs: Any, where: tuple[Any, ...], there: Array, dims: tuple[int, int]) -> list[Array]:
    """Rows of keys or values as floating numbers, a tile [keys, width] for each piece."""
    tiles = []
    halves, dim = dims
    for start, width in _pieces(dims):
        tile = _rows(refs[0], where, there, start % dim, width)
        if halves == 2:
            tile = _half(tile >> np.uint8(4) if start >= dim else tile & np.uint8(15), 8)
        elif tile.dtype == jnp.int8:
            tile = _half(lax.bitcast_convert_type(tile, jnp.uint8) ^ np.uint8(128), 128)
        if len(refs) == 2:
            scales = _rows(refs[1], where, there, start // _BLOCK, width // _BLOCK)
            shape = (_KEYS, width // _BLOCK, _BLOCK)
            full = lax.broadcast_in_dim(scales, shape, (0, 1)).reshape(_KEYS, width)
            tile = tile * full
        tiles.append(tile)
    return tiles


def _half(codes: Array, zero: int) -> Array:
    """uint8 codes minus `zero` in fp16, by its bits: conversions have a sixth of the rate."""
    bits = codes.astype(jnp.uint16) | np.uint16(0x6400)  # 1024 + code
    return lax.bitcast_convert_type(bits, jnp.float16) - np.float16(1024 + zero)


def _rows(ref: Any, where: tuple[Any, ...], there: Array, start: int, width: int) -> Array:
    mask = jnp.broadcast_to(there[:, None], (_KEYS, width))
    at = ref.at[(*where, pl.ds(start, width))]
    return plt.load(at, mask=mask, other=np.zeros((), ref.dtype))


def _dot(a: Array, b: Array, trans_b: bool = False) -> Array:
    exact = False if a.dtype == jnp.float32 else None
    return plt.dot(a, b, trans_b=trans_b, allow_tf32=exact)


def _tanh(x: Array) -> Array:
    return 1 - 2 / (jnp.exp(2 * x) + 1)


def _plain(
    q: Array,
    keys: Kept,
    values: Kept,
    slots: Array,
    low: Array,
    last: Array,
    tree: Array | None,
    static: _Static,
    interpret: bool,
) -> Partial:
    """The same over the whole cache at once."""
    del interpret
    kv_heads = keys.codes.shape[1]
    k, v = (decode(part)[slots] for part in (keys, values))
    place = jnp.arange(static.length, dtype=jnp.int32)[None, None]
    sees = (place >= low[..., None]) & (place <= last[..., None])
    end = jnp.max(last, axis=1)[:, None, None] + 1
    v = jnp.where((place < end)[:, 0, None, :, None], v, 0)
    if tree is not None:
        node = place - (end - static.tokens)
        at = jnp.broadcast_to(jnp.clip(node, 0, static.tokens - 1), sees.shape)
        sees &= (node < 0) | jnp.take_along_axis(tree, at, axis=2)
    batch, tokens, heads, dim = q.shape
    grouped = q.astype(jnp.float32).reshape(batch, tokens, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum("btkgd,bkld->btkgl", grouped, k, precision="highest") * static.scale
    if static.softcap is not None:
        scores = static.softcap * jnp.tanh(scores / static.softcap)
    sees = sees[:, :, None, None]
    scores = jnp.where(sees, scores, _NEVER)
    highest = jnp.max(scores, axis=-1)
    weights = jnp.where(sees, jnp.exp(scores - highest[..., None]), 0)
    out = jnp.einsum("btkgl,bkld->btkgd", weights, v, precision="highest")
    lead = (batch, tokens, heads)
    total = jnp.sum(weights, axis=-1).reshape(lead)
    return Partial(out.reshape(*lead, -1), highest.reshape(lead), total)


def decode(kept: Kept) -> Float[Array, "slots kv_heads length d"]:
    """Keys or values in full, float32."""
    codes, scales = kept
    if scales is None:
        return jnp.asarray(codes).astype(jnp.float32)
    if codes.dtype == jnp.uint8:
        codes = jnp.concatenate([codes & np.uint8(15), codes >> np.uint8(4)], axis=-1)
        codes = codes.astype(jnp.int8) - np.int8(8)
    return codes.astype(jnp.float32) * jnp.repeat(scales.astype(jnp.float32), _BLOCK, axis=-1)


def _factored(q: Array, dtype: Any) -> tuple[Array, Array]:
    """q in the type that it is multiplied in, and what each of its rows was divided by."""
    if dtype in (jnp.bfloat16, jnp.float32):
        return jnp.ones(q.shape[:-1], jnp.float32), q.astype(dtype)
    q16, factors = rounded(q.reshape(-1, q.shape[-1]))
    return factors.reshape(q.shape[:-1]), q16.reshape(q.shape)


def _grouped(rows: Array, kv_heads: int) -> Array:
    """[batch, tokens, heads, d] -> [batch, kv_heads, heads / kv_heads * tokens, d]."""
    batch, tokens, heads, dim = rows.shape
    return jnp.swapaxes(rows, 1, 2).reshape(batch, kv_heads, heads // kv_heads * tokens, dim)


def _pad(array: Array, count: int, axis: int, value: int = 0) -> Array:
    width = [(0, 0)] * array.ndim
    width[axis] = (0, count)
    return jnp.pad(array, width, constant_values=value)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
