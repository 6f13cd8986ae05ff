"""Attention of new tokens over a long cache.

Each program takes query heads that share a key head, as rows of a tensor-core tile, and a part of
the keys that these rows see; the parts are merged exactly. Only such keys are read.
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

from kernels_pallas.kept import Kept, load
from kernels_pallas.rounding import rounded
from kernels_pallas.tiling import MULTIPROCESSORS

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

_ROWS = 64  # at most, of a tile
_SUMS = 64  # numbers of the result that a thread's registers hold beside all else
_WIDE = 256  # numbers of a value that four warps hold; eight hold more
_BOTH = 768  # numbers of a key and a value, of which shared memory holds 64 twice
_LEAST_PART = 256  # keys
_NEVER = -1e30  # a score that no key has: -inf would make NaN of differences
_FAR = 1 << 30  # beyond every place


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


class Alibi(NamedTuple):
    """What is subtracted from scores: slope * (position of the query - place of the key).

    Attributes:
        slopes: of each head, float32.
        positions: of the queries.
    """

    slopes: Float[Array, " heads"]
    positions: Int[Array, "batch tokens"]


class _Call(NamedTuple):
    """What is to be computed, in the order of `attend`'s arguments."""

    q: Array
    keys: Kept
    values: Kept | None
    slots: Array
    low: Array
    last: Array
    scale: float
    softcap: float | None
    alibi: Alibi | None
    tree: Array | None


class _Tile(NamedTuple):
    """What a program takes at a time."""

    rows: int
    keys: int
    warps: int


class _Static(NamedTuple):
    """What a kernel is compiled for; of keys and values their form."""

    keys: Kept
    values: Kept | None
    scale: float
    softcap: float | None
    alibi: bool
    tree: bool
    tokens: int
    tile: _Tile
    parts: int
    asm: bool


def attend(
    q: Float[Array, "batch tokens heads key_dim"],
    keys: Kept,
    values: Kept | None,
    slots: Int[Array, " batch"],
    low: Int[Array, "batch tokens"],
    last: Int[Array, "batch tokens"],
    *,
    scale: float,
    softcap: float | None = None,
    alibi: Alibi | None = None,
    tree: Bool[Array, "batch tokens tokens"] | None = None,
    backend: Literal["triton", "xla"] = "triton",
    interpret: bool = False,
) -> Partial:
    """Attention over the cache, with the new tokens already in it.

    Query head h reads key head h * kv_heads // heads. Products are of the type in which keys are
    kept, codes as fp16; queries and the softmax's weights are rounded to it.

    Args:
        values: None: the keys are the values too.
        slots: the slot of each sequence.
        low, last: the first and the last key that a query may see: a window's, and its own place
            where attention is causal.
        scale: multiplies the scores.
        softcap: then they become softcap * tanh(score / softcap).
        alibi: then this is subtracted.
        tree: the newest keys are those from max(last) - tokens + 1 on; which of them a query sees.
        backend: "xla" decodes the whole cache; so does "triton" where rows are of no width that
            tensor cores take (`Kept.tiled`).
    """
    low = jnp.maximum(low, 0).astype(jnp.int32)
    last = jnp.minimum(last, keys.data.shape[2] - 1).astype(jnp.int32)
    slots = slots.astype(jnp.int32)
    call = _Call(q, keys, values, slots, low, last, float(scale), softcap, alibi, tree)
    tiled = keys.tiled and (values is None or values.tiled)
    return _triton(call, interpret) if backend == "triton" and tiled else _plain(call)


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


def _triton(call: _Call, interpret: bool) -> Partial:
    """By the kernel."""
    q, keys = call.q, call.keys
    values = keys if call.values is None else call.values
    batch, tokens, heads, _ = q.shape
    kv_heads = keys.data.shape[1]
    group = heads // kv_heads
    tile = _tile(group * tokens, keys, call.values)
    tiles = -(-group * tokens // tile.rows)
    spare = tiles * tile.rows - group * tokens

    def by_head(numbers: Array) -> Array:
        """[batch, tokens, heads, ...] -> [batch, kv_heads, rows, ...]."""
        rest = numbers.shape[3:]
        rows = jnp.swapaxes(numbers, 1, 2).reshape(batch, kv_heads, group * tokens, *rest)
        return _pad(rows, spare, 2)

    def by_token(numbers: Array, fill: int = 0) -> Array:
        """[batch, tokens, ...] -> [batch, rows, ...]."""
        times = (1, group, *(1 for _ in numbers.shape[2:]))
        return _pad(jnp.tile(numbers, times), spare, 1, fill)

    def from_rows(rows: Array) -> Array:
        """[batch, kv_heads, rows, ...] -> [batch, tokens, heads, ...]."""
        rest = rows.shape[3:]
        rows = rows[:, :, : group * tokens].reshape(batch, heads, tokens, *rest)
        return jnp.swapaxes(rows, 1, 2)

    factors, q = _factored(keys.arranged(q), keys.tile_type)
    operands = [call.slots, by_token(call.low, _FAR), by_token(call.last, -1)]
    operands += [by_head(factors), by_head(q)]
    if call.tree is not None:
        operands.append(jnp.max(call.last, axis=1) + 1 - jnp.int32(tokens))
        operands.append(by_token(call.tree.astype(jnp.int32)))
    if call.alibi is not None:
        slopes = jnp.repeat(call.alibi.slopes.astype(jnp.float32), tokens)
        operands.append(_pad(slopes.reshape(kv_heads, -1), spare, 1))
        operands.append(by_token(call.alibi.positions.astype(jnp.int32)))
    operands += keys.operands() + ([] if call.values is None else call.values.operands())

    parts = _parts(batch * kv_heads * tiles, keys.data.shape[2])
    static = _Static(
        keys=keys,
        values=call.values,
        scale=call.scale,
        softcap=call.softcap,
        alibi=call.alibi is not None,
        tree=call.tree is not None,
        tokens=tokens,
        tile=tile,
        parts=parts,
        asm=not interpret,
    )
    lead = (batch, kv_heads, parts, tiles * tile.rows)
    width = sum(count for _, count in values.spans())
    per_row = jax.ShapeDtypeStruct(lead, jnp.float32)
    out, highest, total = pl.pallas_call(
        functools.partial(_kernel, static=static),
        out_shape=[jax.ShapeDtypeStruct((*lead, width), jnp.float32), per_row, per_row],
        grid=(batch * kv_heads, tiles, parts),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=2),
        interpret=interpret,
        name="decode_attention",
    )(*operands)

    most = jnp.max(highest, axis=2)
    share = jnp.exp(highest - most[:, :, None])
    out = values.restored(jnp.sum(out * share[..., None], axis=2))
    total = jnp.sum(total * share, axis=2)
    return Partial(from_rows(out), from_rows(most), from_rows(total))


def _kernel(*refs: Any, static: _Static) -> None:
    *inputs, out_ref, highest_ref, total_ref = refs
    slots_ref, low_ref, last_ref, factor_ref, q_ref, *others = inputs
    others.reverse()
    kv_heads = q_ref.shape[1]
    b, head = pl.program_id(0) // kv_heads, pl.program_id(0) % kv_heads
    first, part = pl.program_id(1) * static.tile.rows, pl.program_id(2)
    rows = pl.ds(first, static.tile.rows)
    low, last = low_ref[b, rows], last_ref[b, rows]
    factor = factor_ref[b, head, rows] * np.float32(static.scale)
    slot = slots_ref[b]
    newest: Any = others.pop()[b] if static.tree else None
    tree_ref = others.pop() if static.tree else None
    slope: Any = others.pop()[head, rows] if static.alibi else None
    position: Any = others.pop()[b, rows] if static.alibi else None
    keys = [others.pop() for _ in range(static.keys.arrays)]
    values = others[::-1]

    # The keys that some row sees, in steps that begin at multiples of their size.
    size = static.tile.keys
    lowest, end = jnp.min(low), jnp.max(last) + 1
    begin = lowest // size * size
    steps = (jnp.maximum(end - begin, 0) + size - 1) // size
    each = (steps + static.parts - 1) // static.parts
    begin = begin + part * each * size
    q = [q_ref[b, head, rows, pl.ds(*span)] for span in static.keys.spans()]

    def step(i: Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
        outs, highest, total = state
        start = begin + i * size
        place = start + lax.iota(jnp.int32, size)
        there = (place >= lowest) & (place < end)
        where = (slot, head, pl.ds(start, size))
        k = load(static.keys, keys, where, there, asm=static.asm)
        scores = jnp.zeros((static.tile.rows, size), jnp.float32)
        for left, right in zip(q, k, strict=True):
            scores += _dot(left, right, trans_b=True)
        scores *= factor[:, None]
        if static.softcap is not None:
            scores = np.float32(static.softcap) * _tanh(scores / np.float32(static.softcap))
        if static.alibi:
            distance = position[:, None] - place[None, :]
            scores -= slope[:, None] * distance.astype(jnp.float32)
        sees = (place[None, :] >= low[:, None]) & (place[None, :] <= last[:, None])
        if static.tree:
            sees &= _seen_in_tree(tree_ref, b, first, place - newest, there, static)
        scores = jnp.where(sees, scores, np.float32(_NEVER))
        most = jnp.maximum(highest, jnp.max(scores, axis=1))
        weights = jnp.where(sees, jnp.exp(scores - most[:, None]), np.float32(0))
        scale = jnp.exp(highest - most)
        v = k
        if static.values is not None:
            v = load(static.values, values, where, there, asm=static.asm)
        outs = tuple(
            out * scale[:, None] + _dot(weights.astype(tile.dtype), tile)
            for out, tile in zip(outs, v, strict=True)
        )
        return outs, most, total * scale + jnp.sum(weights, axis=1)

    spans = (static.keys if static.values is None else static.values).spans()
    zeros = tuple(jnp.zeros((static.tile.rows, count), jnp.float32) for _, count in spans)
    lowest_scores = jnp.full((static.tile.rows,), _NEVER, jnp.float32)
    state = (zeros, lowest_scores, jnp.zeros((static.tile.rows,), jnp.float32))
    outs, highest, total = lax.fori_loop(0, jnp.clip(steps - part * each, 0, each), step, state)
    for out, span in zip(outs, spans, strict=True):
        out_ref[b, head, part, rows, pl.ds(*span)] = out
    highest_ref[b, head, part, rows] = highest
    total_ref[b, head, part, rows] = total


def _seen_in_tree(
    ref: Any, b: Array, first: Array, node: Array, there: Array, static: _Static
) -> Array:
    """Which keys the rows of a tile see [rows, keys]; those before the newest, all."""
    shape = (static.tile.rows, static.tile.keys)
    newest = jnp.broadcast_to(((node >= 0) & there)[None], shape)
    row = first + lax.broadcasted_iota(jnp.int32, shape, 0)
    at = jnp.broadcast_to(jnp.clip(node, 0, static.tokens - 1)[None], shape)
    return plt.load(ref.at[b, row, at], mask=newest, other=np.int32(1)) > 0


def _dot(a: Array, b: Array, trans_b: bool = False) -> Array:
    exact = False if a.dtype == jnp.float32 else None
    return plt.dot(a, b, trans_b=trans_b, allow_tf32=exact)


def _tanh(x: Array) -> Array:
    return 1 - 2 / (jnp.exp(2 * x) + 1)


def _plain(call: _Call) -> Partial:
    """The same over the whole cache at once."""
    batch, tokens, heads, dim = call.q.shape
    kv_heads, length = call.keys.data.shape[1:3]
    k = call.keys.decoded()[call.slots]
    v = k if call.values is None else call.values.decoded()[call.slots]
    place = jnp.arange(length, dtype=jnp.int32)[None, None]
    sees = (place >= call.low[..., None]) & (place <= call.last[..., None])
    v = jnp.where(jnp.any(sees, axis=1)[:, None, :, None], v, 0)
    if call.tree is not None:
        node = place - (jnp.max(call.last, axis=1)[:, None, None] + 1 - jnp.int32(tokens))
        at = jnp.broadcast_to(jnp.clip(node, 0, tokens - 1), sees.shape)
        sees &= (node < 0) | jnp.take_along_axis(call.tree, at, axis=2)
    grouped = call.q.astype(jnp.float32)
    grouped = grouped.reshape(batch, tokens, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum("btkgd,bkld->btkgl", grouped, k, precision="highest") * call.scale
    if call.softcap is not None:
        scores = call.softcap * jnp.tanh(scores / call.softcap)
    if call.alibi is not None:
        slopes = call.alibi.slopes.astype(jnp.float32).reshape(1, 1, kv_heads, -1, 1)
        distance = (call.alibi.positions[..., None] - place).astype(jnp.float32)
        scores -= slopes * distance[:, :, None, None]
    sees = sees[:, :, None, None]
    scores = jnp.where(sees, scores, _NEVER)
    highest = jnp.max(scores, axis=-1)
    weights = jnp.where(sees, jnp.exp(scores - highest[..., None]), 0)
    out = jnp.einsum("btkgl,bkld->btkgd", weights, v, precision="highest")
    lead = (batch, tokens, heads)
    total = jnp.sum(weights, axis=-1).reshape(lead)
    return Partial(out.reshape(*lead, -1), highest.reshape(lead), total)


def _factored(q: Array, dtype: Any) -> tuple[Array, Array]:
    """q in the type that it is multiplied in, and what each of its rows was divided by."""
    if dtype in (jnp.bfloat16, jnp.float32):
        return jnp.ones(q.shape[:-1], jnp.float32), q.astype(dtype)
    q16, factors = rounded(q.reshape(-1, q.shape[-1]))
    return factors.reshape(q.shape[:-1]), q16.reshape(q.shape)


def _tile(rows: int, keys: Kept, values: Kept | None) -> _Tile:
    """As much as registers and shared memory hold; at least 16 rows, which tensor cores take."""
    read = [keys] if values is None else [keys, values]
    if any(part.tile_type == jnp.float32 for part in read):
        return _Tile(16, 32, 4)  # without tensor cores: more rows would cost as much more
    width = sum(count for _, count in read[-1].spans())
    warps = 4 if width <= _WIDE else 8
    fitting = 1 << max(0, (_SUMS * 32 * warps // width).bit_length() - 1)
    step = 64 if sum(part.dim for part in read) <= _BOTH else 32
    return _Tile(max(16, min(_ROWS, fitting, 1 << (rows - 1).bit_length())), step, warps)


def _parts(programs: int, length: int) -> int:
    """Parts of the sequence, so that every multiprocessor has some."""
    wanted = -(-2 * MULTIPROCESSORS // programs)
    return max(1, min(wanted, -(-length // _LEAST_PART)))


def _pad(array: Array, count: int, axis: int, value: int = 0) -> Array:
    width = [(0, 0)] * array.ndim
    width[axis] = (0, count)
    return jnp.pad(array, width, constant_values=value)
