"""Paged attention of a flat batch: tokens of any sequences, KV cache in blocks of 64 tokens.

Block tables name each sequence's blocks; only those a query sees are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from kernels_pallas.attention import grid as pieces
from kernels_pallas.attention.kv_layout import TOKENS, PackedKV
from kernels_pallas.attention.triton import (
    KernelOperands,
    ScoreOperands,
    TokenMetadata,
    TritonConfig,
    attend_pieces,
)
from kernels_pallas.matmul.round_fp16 import round_rows
from kernels_pallas.triton_ops import DEFAULT, Backend

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class QueryBatch(NamedTuple):
    """Positions of the tokens of a flat batch, and the keys they see.

    Tokens of one sequence are adjacent: a run. Along a run the number of keys between low and last
    only rises or only falls.

    Attributes:
        rows: each token's row of `tables`; -1: padding.
        positions: of each token in its sequence.
        low, last: the first and last key a token may see: the begin of a sliding window (it may be
            negative), and the own position if attention is causal.
        tables: block tables: entry j is the block of keys from TOKENS * j. Unused entries may be
            anything.
    """

    rows: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    low: Int[Array, " tokens"]
    last: Int[Array, " tokens"]
    tables: Int[Array, "rows blocks"]


class ScoreModifiers(NamedTuple):
    """Score modifiers; a distance is the query's minus the key's position.

    Attributes:
        scale: multiplies q @ k.
        softcap: scores then become softcap * tanh(score / softcap).
        by_distance: column distance - lowest of this is then added; distances beyond its ends use
            the nearest column.
        slopes: slope * distance is then subtracted (ALiBi).
        sinks: scores that take part in the softmax and have no value.
    """

    scale: float
    softcap: float | None = None
    by_distance: Float[Array, "heads distances"] | None = None
    lowest: int = 0
    slopes: Float[Array, " heads"] | None = None
    sinks: Float[Array, " heads"] | None = None


def attend(
    q: Float[Array, "tokens heads key_dim"],
    keys: PackedKV,
    values: PackedKV | None,
    queries: QueryBatch,
    scores: ScoreModifiers,
    *,
    backend: Backend = DEFAULT,
    interpret: bool = False,
) -> Float[Array, "tokens heads value_dim"]:
    """Computes attention over the cache, which has the new tokens; the result has q's type.

    Query head h reads key head h * kv_heads // heads. Matmuls use the type of the cached keys (fp16
    for codes); queries and softmax weights are rounded to it. Queries that see no key, and padding,
    get zeros. Results are batch-invariant to the bit, and independent of block placement.

    Args:
        values: None: the keys are the values too (MLA).
        backend: "xla" gathers and dequantizes everything in the block tables; so does "triton" for
            widths that tensor cores do not take (`PackedKV.tiled`).
    """
    queries = _checked(queries, keys)
    if not kernel_supports(keys, values, backend):
        return _attend_xla(q, keys, values, queries, scores)
    return _triton(q, keys, values, queries, scores, interpret)[0]


def kernel_supports(keys: PackedKV, values: PackedKV | None, backend: Backend) -> bool:
    """Whether a back end's kernel supports these keys and values."""
    return backend == "triton" and keys.tiled and (values is None or values.tiled)


def attend_partial(
    q: Float[Array, "tokens heads key_dim"],
    keys: PackedKV,
    values: PackedKV | None,
    queries: QueryBatch,
    scores: ScoreModifiers,
    *,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Computes attention over the blocks in this pool by a kernel; table entries may be -1.

    Args:
        keys, values: of a supported width.
        scores: without sinks.

    Returns:
        Float32: weighted sums of values [tokens, heads, value_dim], not normalized; per query
            [tokens, heads] the maximum score, -inf if it saw no key, and the sum of weights.
    """
    queries = _checked(queries, keys)
    out, highest, total = _triton(q, keys, values, queries, scores, interpret, partial=True)
    return out, jnp.where(total == 0, -jnp.inf, highest), total


def _checked(queries: QueryBatch, keys: PackedKV) -> QueryBatch:
    """Marks invalid rows as padding, and limits keys to the tables."""
    if keys.data.shape[2] != TOKENS:
        raise ValueError(f"blocks of {keys.data.shape[2]} tokens: the kernel reads {TOKENS}")
    limit = queries.tables.shape[1] * TOKENS - 1
    rows, positions, low, last = (part.astype(jnp.int32) for part in queries[:4])
    rows = jnp.where(rows < queries.tables.shape[0], rows, -1)
    last = jnp.where(rows >= 0, jnp.minimum(last, limit), -1)
    return QueryBatch(rows, positions, low, last, queries.tables.astype(jnp.int32))


def _triton(
    q: Array,
    keys: PackedKV,
    values: PackedKV | None,
    queries: QueryBatch,
    scores: ScoreModifiers,
    interpret: bool,
    *,
    partial: bool = False,
) -> tuple[Array, ...]:
    """Computes results, or their partial sums, by the Triton-style kernels."""
    count, heads, _ = q.shape
    kv_heads = keys.data.shape[1]
    least = pieces.least_span(keys, values, heads // kv_heads)
    tables = queries.tables
    shape = pieces.AttentionShape(
        count, tables.shape[0], tables.shape[1] * TOKENS, kv_heads, heads // kv_heads
    )
    # A window that begins before the sequence has the splits of a full window.
    power = pieces.split_powers(queries.low, queries.last, least)
    runs = pieces.runs(queries.rows, power)
    dtype, numbers = jnp.float32 if partial else q.dtype, keys.to_tile_order(q)
    factors, numbers = _factored(numbers, keys.tile_type)
    changes = ScoreOperands(factors, _f32(scores.slopes), _f32(scores.by_distance))
    launches = pieces.plan_launches(shape, keys, values, least)
    short = runs.length <= launches[0].max_tokens
    outs: list[Any] = []
    for index, launch in enumerate(launches):
        chosen = runs.real if len(launches) == 1 else runs.real & (short if index == 0 else ~short)
        tokens = TokenMetadata(
            queries.rows,
            queries.positions,
            jnp.maximum(queries.low, 0),
            jnp.where(chosen, queries.last, -1),
            power,
            jnp.cumsum(chosen, dtype=jnp.int32) - 1,
        )
        static = TritonConfig(
            keys=keys,
            values=values,
            heads=heads,
            scale=float(scores.scale),
            softcap=scores.softcap,
            lowest=scores.lowest,
            launch=launch,
            splits=pieces.max_splits(shape, least),
            asm=not interpret,
            partial=partial,
        )
        operands = KernelOperands(
            pieces.first_tokens(runs, chosen, launch),
            tokens,
            tables,
            numbers.reshape(count * heads, -1),
            changes,
            _f32(scores.sinks),
            keys.operands(),
            None if values is None else values.operands(),
        )
        these = attend_pieces(operands, static, dtype, interpret=interpret)
        if not outs and launch.parts > 1:  # the merge kernel has written zeros for the others
            outs = list(these)
            continue
        before = outs or [jnp.zeros((), part.dtype) for part in these]
        outs = [
            jnp.where(chosen.reshape(-1, *[1] * (new.ndim - 1)), new, old)
            for new, old in zip(these, before, strict=True)
        ]
    return (keys if values is None else values).from_tile_order(outs[0]), *outs[1:]


def _attend_xla(
    q: Array, keys: PackedKV, values: PackedKV | None, queries: QueryBatch, scores: ScoreModifiers
) -> Array:
    """Computes the same in XLA, over all blocks of the tables at once."""
    count, heads, dim = q.shape
    kv_heads = keys.data.shape[1]
    own = queries.tables[jnp.maximum(queries.rows, 0)]

    def gathered(part: PackedKV) -> Array:
        """[tokens, kv_heads, length, dim]."""
        blocks = part.dequantized().at[own].get(mode="clip")
        return blocks.swapaxes(1, 2).reshape(count, kv_heads, -1, part.dim)

    k = gathered(keys)
    v = k if values is None else gathered(values)
    place = jnp.arange(k.shape[2], dtype=jnp.int32)[None]
    sees = (place >= queries.low[:, None]) & (place <= queries.last[:, None])
    v = jnp.where(sees[:, None, :, None], v, 0)
    grouped = q.astype(jnp.float32).reshape(count, kv_heads, heads // kv_heads, dim)
    products = jnp.einsum("tkgd,tkld->tkgl", grouped, k, precision="highest")
    s = products.reshape(count, heads, -1) * scores.scale
    if scores.softcap is not None:
        s = scores.softcap * jnp.tanh(s / scores.softcap)
    distance = queries.positions[:, None] - place
    if scores.by_distance is not None:
        column = jnp.clip(distance - scores.lowest, 0, scores.by_distance.shape[1] - 1)
        s += scores.by_distance.astype(jnp.float32)[:, column].swapaxes(0, 1)
    if scores.slopes is not None:
        far = distance[:, None].astype(jnp.float32)
        s -= scores.slopes.astype(jnp.float32)[None, :, None] * far
    s = jnp.where(sees[:, None], s, -jnp.inf)
    highest = jnp.max(s, axis=-1, keepdims=True)
    if scores.sinks is not None:
        sinks = scores.sinks.astype(jnp.float32)[None, :, None]
        highest = jnp.maximum(highest, sinks)
    highest = jnp.where(jnp.isfinite(highest), highest, 0)
    weights = jnp.exp(s - highest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if scores.sinks is not None:
        total += jnp.exp(sinks - highest)
    weights = (weights / jnp.where(total == 0, 1, total)).reshape(*products.shape)
    out = jnp.einsum("tkgl,tkld->tkgd", weights, v, precision="highest")
    return out.reshape(count, heads, -1).astype(q.dtype)


def _factored(q: Array, dtype: Any) -> tuple[Array | None, Array]:
    """Returns q in the type of the matmul, and the power of two that divided each line."""
    if dtype in (jnp.bfloat16, jnp.float32):
        return None, q.astype(dtype)
    q16, factors = round_rows(q.reshape(-1, q.shape[-1]))
    return factors, q16.reshape(q.shape)


def _f32(numbers: Array | None) -> Array | None:
    return None if numbers is None else numbers.astype(jnp.float32)
