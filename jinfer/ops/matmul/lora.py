"""LoRA: adds low-rank terms of several adapters to a product, each row its own adapter's.

y = x W^T + scale (x A^T) B (Hu et al. 2021, arXiv 2106.09685, with the transpose of its B), where A
and B are those of the row's adapter. The adapters of an engine are stacked, each in a slot, padded
with zeros to one rank; rows are sorted by slot for one grouped product with each stack (Punica's
SGMV, arXiv 2310.18547), so only slots that have rows are read. W may have any format: it is not
changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jinfer.cpu import matmul_call as cpu
from jinfer.ops.matmul import dense
from jinfer.ops.matmul.dense import dense_matmul, supports_grouped_dense

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Stacks(NamedTuple):
    """The adapters of one projection, a matrix each slot.

    Attributes:
        factors: of matrices in int8: what the rows of A, and those of B, are multiplied by.
    """

    a: Float[Array, "slots rank inputs"]
    b: Float[Array, "slots rank outputs"]
    factors: Float[Array, "slots 2 rank"] | None = None

    def dequantized(self, dtype: DTypeLike) -> Stacks:
        """Converts int8 stacks to another type; others are unchanged."""
        if self.factors is None:
            return self
        a, b = (factor.astype(jnp.float32) for factor in (self.a, self.b))
        by = self.factors[..., None]
        return Stacks((a * by[:, 0]).astype(dtype), (b * by[:, 1]).astype(dtype))


class RowAdapters(NamedTuple):
    """The adapter of each row of a batch.

    Attributes:
        slots: slot of each row's adapter, from 1; 0: none.
        scales: factors of the low-rank terms.
        order: the rows sorted by slot, those without an adapter last.
        sorted_positions: index of each row in `order`.
    """

    slots: Int[Array, " rows"]
    scales: Float[Array, " rows"]
    order: Int[Array, " rows"]
    sorted_positions: Int[Array, " rows"]

    def offsets(self, count: int) -> Int[Array, " slots_1"]:
        """Returns the first index of each of `count` slots in `order`, and the end of the last."""
        upto = jnp.arange(1, count + 1, dtype=jnp.int32)
        before = (self.slots[None] < upto[:, None]) & (self.slots[None] > 0)
        counts = jnp.sum(before, axis=1, dtype=jnp.int32)
        last = jnp.sum(self.slots > 0, dtype=jnp.int32)
        return jnp.concatenate([counts, last[None]])


def row_adapters(table: Int[Array, "sequences 2"], rows: Int[Array, " rows"]) -> RowAdapters:
    """Returns the adapters of the rows of a flat batch.

    Args:
        table: each sequence's slot, from 1, and the bits of its float32 scale.
        rows: the sequence of each row; -1: padding.
    """
    own = table[jnp.maximum(rows, 0)]
    slots = jnp.where(rows >= 0, own[:, 0], 0)
    scales = lax.bitcast_convert_type(own[:, 1], jnp.float32)
    return sorted_by_slot(slots, scales)


def sorted_by_slot(slots: Int[Array, " rows"], scales: Float[Array, " rows"]) -> RowAdapters:
    """Returns the adapters of rows with these slots (0: none) and scales."""
    last = jnp.iinfo(jnp.int32).max
    order = jnp.argsort(jnp.where(slots > 0, slots, last), stable=True).astype(jnp.int32)
    sorted_positions = (
        jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=jnp.int32))
    )
    return RowAdapters(slots, scales, order, sorted_positions)


def add_lora(
    ys: Sequence[Float[Array, "*rows outputs"]],
    x: Float[Array, "*rows inputs"],
    stacks: Sequence[Stacks],
    at: RowAdapters,
) -> tuple[Float[Array, "*rows outputs"], ...]:
    """Adds the low-rank terms of the rows' adapters to `ys`; other rows keep their bits.

    Args:
        ys: products of the same vectors without adapters, float32.
        x: their left factor.
        stacks: the stacked adapters of each.
    """
    flat = x.reshape(-1, x.shape[-1])
    assert flat.shape[0] == at.slots.shape[0], "each row is a token"
    if dense.reads_16_bit_weights():
        rows = [y.reshape(-1, y.shape[-1]) for y in ys]
        parts = tuple(zip(*stacks, strict=True))
        wide = flat.astype(jnp.float32)
        sums = cpu.add_lora(wide, rows, at.slots, at.scales, at.order, *parts)
        return tuple(total.reshape(y.shape) for total, y in zip(sums, ys, strict=True))
    stacks = [stack.dequantized(x.dtype) for stack in stacks]
    terms = (_grouped if all(map(_is_grouped, stacks)) else _masked)(flat, stacks, at)
    # Selected, not added as zeros: -0.0 + 0.0 is 0.0, and terms of rows without are undefined.
    own = (at.slots > 0).reshape(*x.shape[:-1], 1)
    pairs = zip(ys, terms, strict=True)
    return tuple(jnp.where(own, y + term.reshape(y.shape), y) for y, term in pairs)


def _is_grouped(stacks: Stacks) -> bool:
    return supports_grouped_dense(stacks.a) and supports_grouped_dense(stacks.b, transposed=True)


def _grouped(x: Array, stacks: Sequence[Stacks], at: RowAdapters) -> list[Array]:
    offsets = at.offsets(stacks[0][0].shape[0])
    scales = at.scales[at.order][:, None]
    inner = dense_matmul(x[at.order], [stack.a for stack in stacks], offsets=offsets)
    terms = list[Array]()
    for part, (_, b, _) in zip(inner, stacks, strict=True):
        scaled = (part * scales).astype(x.dtype)
        terms += dense_matmul(scaled, [b], offsets=offsets, transposed=True)
    return [term[at.sorted_positions] for term in terms]


def _masked(x: Array, stacks: Sequence[Stacks], at: RowAdapters) -> list[Array]:
    """Multiplies by the matrices of all slots; each row selects its own slot's result."""
    terms = list[Array]()
    for a, b, _ in stacks:
        slots, rank, inputs = a.shape
        (inner,) = dense_matmul(x, [a.reshape(slots * rank, inputs)])
        inner = inner.reshape(-1, slots, rank) * at.scales[:, None, None]
        own = at.slots[:, None] == jnp.arange(1, slots + 1, dtype=jnp.int32)[None]
        inner = jnp.where(own[..., None], inner, 0.0).reshape(-1, slots * rank).astype(x.dtype)
        terms += dense_matmul(inner, [b.reshape(slots * rank, -1).T])
    return terms


NORM_TERMS = 4  # m, |W|^2, 2 <W, B A>, |B A|^2


def rescale(
    y: Float[Array, "*rows outputs"],
    bias: Float[Array, " outputs"] | None,
    norms: Float[Array, "slots terms outputs"],
    at: RowAdapters,
) -> Float[Array, "*rows outputs"]:
    """Rescales the products of rows with DoRA to their norms; other rows keep their bits.

    Args:
        y: (W + c B A) x + bias, float32.
        norms: `NORM_TERMS` for each slot's adapter; zeros: it has no magnitudes.
    """
    own = norms[jnp.maximum(at.slots - 1, 0)]
    length, square, twice, term = (own[:, i] for i in range(NORM_TERMS))
    scale = at.scales[:, None]
    square = square + scale * (twice + scale * term)
    there = (at.slots > 0)[:, None] & (square > 0)
    factor = length / jnp.sqrt(jnp.where(there, square, 1.0))
    plain = y.reshape(-1, y.shape[-1])
    shift = 0.0 if bias is None else bias.astype(jnp.float32)[None]
    scaled = (plain - shift) * factor + shift
    return jnp.where(there, scaled, plain).reshape(y.shape)
