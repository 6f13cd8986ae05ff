"""Products of a mixture of experts: each row with its own expert's matrix.

Rows are sorted by expert and put into tiles of one expert each; a kernel's program reads the matrix
of its tile. So of all experts only those that were chosen are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.layout import Packed, arranged
from kernels_pallas.matmul import Backend, decoded, finish, product_of
from kernels_pallas.rounding import rounded
from kernels_pallas.tiling import SMALLEST, choose

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Groups(NamedTuple):
    """Rows sorted by expert, in tiles.

    Attributes:
        source: the row that stands at each place of the tiles; 0 where none does.
        place: where each row stands; -1 for rows without an expert.
        which: the expert of each tile, and how many rows it has.
    """

    source: Int[Array, " places"]
    place: Int[Array, " rows"]
    which: Int[Array, "2 tiles"]


def group(experts: Int[Array, " rows"], count: int, size: int) -> Groups:
    """Sorts rows into tiles of `size` places.

    Args:
        experts: of each row; outside 0..count-1 for none.
    """
    rows = experts.shape[0]
    experts = jnp.where((experts >= 0) & (experts < count), experts, count).astype(jnp.int32)
    order = jnp.argsort(experts, stable=True)
    of_each = jnp.zeros((count + 1,), jnp.int32).at[experts].add(1)
    first = jnp.cumsum(of_each) - of_each  # of each expert among the sorted rows
    in_tiles = -(-of_each[:count] // size)
    ends = jnp.cumsum(in_tiles)
    starts = jnp.append(ends - in_tiles, jnp.int32(0))
    sorted_experts = experts[order]
    places = starts[sorted_experts] * size + lax.iota(jnp.int32, rows) - first[sorted_experts]
    places = jnp.where(sorted_experts < count, places, -1)
    tiles = min(rows, rows // size + count)
    tile = lax.iota(jnp.int32, tiles)
    expert = jnp.minimum(jnp.searchsorted(ends, tile, side="right").astype(jnp.int32), count - 1)
    present = jnp.clip(of_each[expert] - (tile - starts[expert]) * size, 0, size)
    present = jnp.where(tile < ends[-1], present, 0)
    place = jnp.zeros((rows,), jnp.int32).at[order].set(places)
    to = jnp.where(place < 0, tiles * size, place)
    source = (
        jnp.zeros((tiles * size,), jnp.int32).at[to].set(lax.iota(jnp.int32, rows), mode="drop")
    )
    return Groups(source, place, jnp.stack([expert, present]))


def expert_matmul(
    x: Float[Array, "tokens inputs"],
    experts: Int[Array, " rows"],
    matrices: Sequence[Packed],
    *,
    index: Int[Array, 1] | None = None,
    gated: bool = False,
    backend: Backend = "triton",
    interpret: bool = False,
) -> tuple[Float[Array, "rows outputs"], ...]:
    """Row r is x[r * tokens // rows] times the transpose of its expert's matrix; 0 without expert.

    Args:
        x: one row for each of `experts`, or one for several in turn.
        experts: of each row; outside 0..count-1 for none.
        matrices: stacks [*stack, experts] of the same shape.
        index: which of the (flattened) leading stacks.
        gated, interpret: see `matmul`.
        backend: "triton" or "xla"; the Mosaic kernel reads one matrix a call.

    Raises:
        ValueError: there is no such backend.
    """
    if backend == "mosaic":
        raise ValueError("products of experts have no Mosaic kernel yet; use triton or xla")
    rows, count = experts.shape[0], matrices[0].words.shape[-6]
    outputs = matrices[0].outputs
    average = -(-rows // count)
    tiling = choose(
        average,
        outputs * min(rows, count),
        matrices[0].superblocks,
        smallest=outputs,
        bits=max(matrix.bits for matrix in matrices),
    )
    groups = group(experts, count, tiling.rows)
    first = jnp.int32(0) if index is None else index[0] * count
    each = rows // x.shape[0]
    if backend == "xla" or outputs < SMALLEST:
        return _each(x[groups.source // each], groups, matrices, first, gated, tiling.rows)
    x16, factors = rounded(x)
    at = groups.source // each
    which = groups.which.at[0].add(first)
    parts = product_of(backend)(
        arranged(x16, matrices[0])[at],
        factors[at],
        which,
        matrices,
        tiling,
        gated=gated and tiling.split == 1,
        interpret=interpret,
    )
    results = finish(parts, gated and tiling.split > 1)
    return tuple(_back(result, groups) for result in results)


def _each(
    x: Array, groups: Groups, matrices: Sequence[Packed], first: Array, gated: bool, size: int
) -> tuple[Array, ...]:
    """Tile by tile with its expert's matrices decoded."""

    def tile(at: tuple[Array, Array]) -> tuple[Array, ...]:
        part, expert = at
        return finish([y[None] for y in decoded(part, matrices, (first + expert)[None])], gated)

    results = lax.map(tile, (x.reshape(-1, size, x.shape[1]), groups.which[0]))
    return tuple(_back(result.reshape(-1, result.shape[-1]), groups) for result in results)


def _back(result: Array, groups: Groups) -> Array:
    """From places to rows."""
    rows = result[jnp.maximum(groups.place, 0)]
    return jnp.where((groups.place >= 0)[:, None], rows, jnp.float32(0))
