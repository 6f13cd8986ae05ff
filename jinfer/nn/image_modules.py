"""Image modules: the grid of patches, positions on it (tables, 2-d RoPE), merging of neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike

from jinfer.modelspec import image_blocks
from jinfer.modelspec.position_blocks import GridRopeSpec
from jinfer.nn.parameter import parameter
from jinfer.nn.positions import CosSin, Rotary
from jinfer.ops.reductions import rounded
from jinfer.ops.rope import rotate

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["sizes", "rows", "columns"],
    meta_fields=["group"],
)
@dataclass(frozen=True)
class PatchGrid:
    """The place of each patch of some tiles, which are padded at their ends.

    Attributes:
        sizes: rows and columns of each tile.
        rows, columns: of each patch.
        group: patches come in groups of so many rows and columns; 1: row by row.
    """

    sizes: Int[Array, "tiles 2"]
    rows: Int[Array, "tiles patches"]
    columns: Int[Array, "tiles patches"]
    group: int = 1

    @classmethod
    def of(cls, sizes: Int[Array, "tiles 2"], patches: int, group: int = 1) -> PatchGrid:
        """Makes the grid of tiles of these sizes, padded to so many patches."""
        numbers = jnp.arange(patches, dtype=jnp.int32)[None]
        block, inner = numbers // group**2, numbers % group**2
        across = jnp.maximum(sizes[:, 1:] // group, 1)
        rows = block // across * group + inner // group
        return cls(sizes, rows, block % across * group + inner % group, group)

    @property
    def counts(self) -> Int[Array, " tiles"]:
        """Patches of each tile."""
        return self.sizes[:, 0] * self.sizes[:, 1]

    def merged(self, size: int, tokens: int) -> PatchGrid:
        """Makes the grid, row by row, whose patches are `size` x `size` of these."""
        return PatchGrid.of(self.sizes // size, tokens)

    def index(self, rows: Array, columns: Array) -> Array:
        """Returns the number of the patch [tiles, ...] at these rows and columns."""
        across, size = self.sizes[:, 1].reshape(-1, *(1,) * (rows.ndim - 1)), self.group
        block = rows // size * (across // size) + columns // size
        return block * size**2 + rows % size * size + columns % size


class ClassToken(nnx.Module):
    """Puts a learned vector in front of the patches."""

    def __init__(self, block: image_blocks.ClassTokenSpec, dtype: DTypeLike) -> None:
        self.weight = parameter((block.width,), ("hidden",), dtype)

    def __call__(self, x: Float[Array, "tiles tokens hidden"]) -> Float[Array, "tiles more hidden"]:
        """[weight, x]."""
        first = jnp.broadcast_to(self.weight[...].astype(x.dtype), (x.shape[0], 1, x.shape[2]))
        return jnp.concatenate([first, x], axis=1)


class DropTokens(nnx.Module):
    """Drops the first tokens."""

    def __init__(self, block: image_blocks.DropTokensSpec, dtype: DTypeLike) -> None:
        self.count = block.count

    def __call__(self, x: Float[Array, "tiles tokens hidden"]) -> Float[Array, "tiles less hidden"]:
        """x[:, count:]."""
        return x[:, self.count :]


class LearnedVector(nnx.Module):
    """A learned vector."""

    def __init__(self, block: image_blocks.LearnedVectorSpec, dtype: DTypeLike) -> None:
        self.weight = parameter((block.width,), ("hidden",), dtype)

    def __call__(self, x: Float[Array, "tiles tokens width"]) -> Float[Array, "1 1 hidden"]:
        """Returns the vector, whatever `x` is."""
        return self.weight[...].astype(x.dtype)[None, None]


class GridPositions(nnx.Module):
    """Learned positions of a square grid, resized to the grid of each tile."""

    def __init__(self, block: image_blocks.GridPositionsSpec, dtype: DTypeLike) -> None:
        self.block = block
        self.weight = parameter((block.rows, block.width), ("positions", "hidden"), dtype)

    def __call__(self, grid: PatchGrid) -> Float[Array, "tiles tokens hidden"]:
        """Returns the position of each patch, after that of the class token if the table has it."""
        weight, side, row = self.weight[...], self.block.side, self.block.class_row
        table = weight[1:] if row == "first" else weight[: side**2]
        sizes = grid.sizes[:, :, None]
        vertical = self._taps(grid.rows, sizes[:, 0])
        horizontal = self._taps(grid.columns, sizes[:, 1])
        found = _weighted_rows(table.astype(jnp.float32), side, vertical, horizontal)
        if row != "none":
            own = weight[0 if row == "first" else -1].astype(jnp.float32)
            own = jnp.broadcast_to(own, (found.shape[0], 1, found.shape[2]))
            found = jnp.concatenate([own, found], axis=1)
        return found.astype(weight.dtype)

    def _taps(self, places: Array, count: Array) -> tuple[Array, Array]:
        """Returns the rows [tiles, patches, taps] of the table along an axis, and their weights.

        Args:
            places: row or column of each patch.
            count: rows or columns of each tile, [tiles, 1].
        """
        side, block = self.block.side, self.block
        if block.resize == "nearest":
            rows = jnp.minimum(places * side // jnp.maximum(count, 1), side - 1)[..., None]
            return rows, jnp.ones(rows.shape, jnp.float32)
        at, many = places.astype(jnp.float32), jnp.maximum(count, 1).astype(jnp.float32)
        if block.antialias:
            return _antialiased_taps(at, side / many, side, block.resize)
        if block.corners:
            center = at * ((side - 1) / jnp.maximum(many - 1, 1))
        else:
            center = rounded((at + 0.5) * (side / many)) - 0.5
        if block.resize == "linear":
            center = jnp.maximum(center, 0)
        first = jnp.floor(center)
        least, most = (0, 2) if block.resize == "linear" else (-1, 3)
        reach = jnp.arange(least, most, dtype=jnp.int32)[None, None]
        rows = first.astype(jnp.int32)[..., None] + reach
        distance = (center - first)[..., None] - reach.astype(jnp.float32)
        weights = _kernel(distance, block.resize)
        return jnp.clip(rows, 0, side - 1), weights


def _antialiased_taps(at: Array, scale: Array, side: int, resize: str) -> tuple[Array, Array]:
    """All rows of the table, weighted by a kernel as wide as a patch if that is more than a row."""
    wide = jnp.maximum(scale, 1)[..., None]
    center = rounded((at + 0.5) * scale)[..., None]
    rows = jnp.arange(side, dtype=jnp.float32)[None, None]
    support = wide * (1 if resize == "linear" else 2)
    first = jnp.maximum(jnp.floor(center - support + 0.5), 0)
    seen = (rows >= first) & (rows < jnp.floor(center + support + 0.5))
    weights = jnp.where(seen, _kernel((rows - center + 0.5) / wide, resize, -0.5), 0)
    index = jnp.broadcast_to(jnp.arange(side, dtype=jnp.int32), weights.shape)
    return index, weights / jnp.sum(weights, axis=-1, keepdims=True)


def _kernel(distance: Array, resize: str, a: float = -0.75) -> Array:
    """The weight of a value at a distance: a triangle, or Keys' cubic convolution."""
    x = jnp.abs(distance)
    if resize == "linear":
        return jnp.maximum(1 - x, 0)
    near = rounded((rounded((a + 2) * x) - (a + 3)) * rounded(x * x)) + 1
    far = rounded((rounded(a * x) - 5 * a) * x) + 8 * a
    far = rounded(far * x) - 4 * a
    return jnp.where(x <= 1, near, jnp.where(x < 2, far, 0))


def _weighted_rows(
    table: Float[Array, "positions hidden"],
    side: int,
    vertical: tuple[Array, Array],
    horizontal: tuple[Array, Array],
) -> Float[Array, "tiles patches hidden"]:
    """Sums the rows of a table with the products of the weights of both axes, one after another."""
    (down, of_down), (across, of_across) = vertical, horizontal
    taps = down.shape[-1]

    def add(number: Array, total: Array) -> Array:
        i, j = number // taps, number % taps
        chosen = table[
            lax.dynamic_index_in_dim(down, i, -1, False) * side
            + lax.dynamic_index_in_dim(across, j, -1, False)
        ]
        weight = lax.dynamic_index_in_dim(of_down, i, -1, False) * lax.dynamic_index_in_dim(
            of_across, j, -1, False
        )
        return total + rounded(weight[..., None] * chosen)

    if taps == 1:
        return table[down[..., 0] * side + across[..., 0]]
    empty = jnp.zeros((*down.shape[:2], table.shape[1]), jnp.float32)
    return lax.fori_loop(0, taps**2, add, empty)


class GridRotary(Rotary):
    """RoPE in two dimensions."""

    block: GridRopeSpec  # type: ignore[assignment]

    def __init__(self, block: GridRopeSpec) -> None:
        self.block, self.has_factors = block, False

    def __call__(
        self, x: Float[Array, "tiles tokens width"], cos_sin: CosSin, size: int
    ) -> Float[Array, "tiles tokens width"]:
        """Rotates each head by the row and the column of the patch."""
        pairs = self.block.pairs
        if pairs != "quarters":
            return rotate(x, *cos_sin, size=size, adjacent=pairs == "adjacent")
        # Each half of a head is like a head that is rotated by one coordinate.
        halves, half = x.reshape(*x.shape[:2], -1, 2, size // 2), size // 2
        turned = []
        for i in range(2):
            cos, sin = (jnp.split(part, 2, axis=-1)[i] for part in cos_sin)
            one = rotate(
                halves[..., i, :].reshape(*x.shape[:2], -1), cos, sin, size=half, adjacent=False
            )
            turned.append(one.reshape(*halves.shape[:3], half))
        return jnp.stack(turned, axis=3).reshape(x.shape)

    def grid_cos_sin(self, grid: PatchGrid, tokens: int) -> CosSin:
        """Computes the angles of patches, and of tokens in front of them, which are not rotated."""
        block = self.block
        series = np.arange(0, block.dim // 4, dtype=np.float64)[None, None] * 2
        exponents = [series, series + 1 if block.shifted else series]
        places = [grid.rows, grid.columns] if block.order == "row" else [grid.columns, grid.rows]
        both = [
            rounded(
                (place + block.offset).astype(jnp.float32)[..., None]
                * (block.theta ** (-exponent / (block.dim // 2))).astype(np.float32)
            )
            for place, exponent in zip(places, exponents, strict=True)
        ]
        if block.interleaved:
            angles = jnp.stack(both, axis=-1).reshape(*both[0].shape[:2], -1)
        else:
            angles = jnp.concatenate(both, axis=-1)
        angles = jnp.pad(angles, ((0, 0), (tokens - angles.shape[1], 0), (0, 0)))
        return CosSin(jnp.cos(angles), jnp.sin(angles))


class GridWindows(NamedTuple):
    """The windows of `size` x `size` patches of some tiles, as texts of an attention.

    Attributes:
        lengths: patches of each window, fewer at the edges of a grid.
        numbers: window of each patch; beyond the last one for padding.
        places: place of each patch in its window.
        size: patches on a side.
    """

    lengths: Int[Array, " windows"]
    numbers: Int[Array, "tiles patches"]
    places: Int[Array, "tiles patches"]
    size: int

    @classmethod
    def of(cls, grid: PatchGrid, size: int) -> GridWindows:
        """Divides the grids."""
        tiles, patches = grid.rows.shape
        # As many as a grid of so many patches can have: a narrow one has most.
        most = patches // size**2 + (grid.group + patches // grid.group) // size + 2
        across = -(-grid.sizes[:, 1:] // size)
        rows, columns = jnp.divmod(jnp.arange(most, dtype=jnp.int32)[None], across)
        heights = jnp.clip(grid.sizes[:, :1] - rows * size, 0, size)
        widths = jnp.clip(grid.sizes[:, 1:] - columns * size, 0, size)
        own = grid.rows // size * across + grid.columns // size
        width = jnp.minimum(grid.sizes[:, 1:] - grid.columns // size * size, size)
        first = jnp.arange(tiles, dtype=jnp.int32)[:, None] * most
        padding = jnp.arange(patches, dtype=jnp.int32)[None] >= grid.counts[:, None]
        numbers = jnp.where(padding, tiles * most, first + own)
        places = grid.rows % size * width + grid.columns % size
        return cls((heights * widths).reshape(-1), numbers, places, size)

    def split(self, x: Float[Array, "tiles patches heads dim"]) -> Array:
        """Moves patches to their windows, [windows, size^2, heads, dim]."""
        empty = jnp.zeros((len(self.lengths), self.size**2, *x.shape[2:]), x.dtype)
        return empty.at[self.numbers, self.places].set(x, mode="drop")

    def join(self, x: Float[Array, "windows places heads dim"]) -> Array:
        """Moves patches back, [tiles, patches, heads, dim]."""
        return x.at[self.numbers, self.places].get(mode="fill", fill_value=0)


class Merge(nnx.Module):
    """Concatenates the vectors of neighbouring patches."""

    def __init__(self, block: image_blocks.MergeSpec, dtype: DTypeLike) -> None:
        self.block = block

    def __call__(
        self, x: Float[Array, "tiles patches width"], grid: PatchGrid
    ) -> Float[Array, "tiles merged wide"]:
        """Returns the vectors of the merged grid, row by row."""
        size = self.block.size
        if grid.group == size:
            parts = x.reshape(x.shape[0], -1, size**2, x.shape[2])
        else:
            parts = self._gathered(x, grid)
        if self.block.channels == "first":
            parts = parts.swapaxes(2, 3)
        return parts.reshape(*parts.shape[:2], -1)

    def _gathered(self, x: Array, grid: PatchGrid) -> Array:
        """The vectors [tiles, merged, neighbours, width]."""
        size = self.block.size
        merged = grid.merged(size, x.shape[1] // size**2)
        inner = np.arange(size**2, dtype=np.int32)[None, None]
        rows = merged.rows[..., None] * size + inner // size
        index = grid.index(rows, merged.columns[..., None] * size + inner % size)
        flat = jnp.minimum(index, x.shape[1] - 1).reshape(x.shape[0], -1, 1)
        return jnp.take_along_axis(x, flat, axis=1).reshape(*index.shape, x.shape[2])
