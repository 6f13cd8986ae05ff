"""KV cache blocks: copy-on-write, and blocks as rows of a buffer (prefix cache offload).

A block of a group is spread over the pools of all its attentions. A row holds the whole block
contiguously, so a transfer between device and host is one copy for any number of layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jinfer.cpu.build_library import custom_call
from jinfer.ops.attention.kv_cache import ENCODER, Cache, CacheShapes
from jinfer.ops.backend import has_cpu_calls

if TYPE_CHECKING:
    from jaxtyping import Int


def copy_blocks(
    arrays: Sequence[Array],
    sources: Int[Array, " copies"],
    targets: Int[Array, " copies"],
    count: Int[Array, ""],
) -> Sequence[Array]:
    """Copies blocks of the arrays.

    Args:
        sources, targets: block ids, copied in order, so that a copy can itself be copied.
        count: number of valid entries.
    """
    if not arrays or not has_cpu_calls():
        return copy_blocks_reference(arrays, sources, targets, count)
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    in_place = {3 + i: i for i in range(len(shapes))}
    return custom_call("jinfer_copy_blocks", shapes, in_place)(sources, targets, count, *arrays)


def copy_blocks_reference(
    arrays: Sequence[Array],
    sources: Int[Array, " copies"],
    targets: Int[Array, " copies"],
    count: Int[Array, ""],
) -> Sequence[Array]:
    """`copy_blocks` in XLA operations."""

    def copied(i: Array, array: Array) -> Array:
        block = lax.dynamic_index_in_dim(array, sources[i], keepdims=False)
        return lax.dynamic_update_index_in_dim(array, block, targets[i], 0)

    def copy_next(i: Array, arrays: Sequence[Array]) -> Sequence[Array]:
        return jax.tree.map(lambda array: copied(i, array), arrays)

    return lax.fori_loop(0, count, copy_next, list(arrays))


# Group -> name of a dtype -> [rows, numbers]: each row is a block of the group.
type BlockRows = dict[str, dict[str, Any]]


def row_groups(shapes: CacheShapes) -> list[str]:
    """Returns the groups whose blocks become rows: all but the encoder's."""
    return sorted({shape.group for shape in shapes.values()} - {ENCODER})


def _pools(shapes: CacheShapes, cache: Cache, group: str) -> tuple[list[Any], Any]:
    """Returns the arrays of a group in their order in a row, and their tree structure."""
    named = {name: cache[name] for name in sorted(cache) if shapes[name].group == group}
    arrays, tree = jax.tree.flatten(named)
    return arrays, tree


def abstract_rows(shapes: CacheShapes, cache: Cache, count: int) -> BlockRows:
    """Returns the shapes and types of `count` rows of each group.

    Args:
        cache: abstract.
    """
    rows: BlockRows = {}
    for group in row_groups(shapes):
        numbers: dict[str, tuple[int, Any]] = {}
        for pool in _pools(shapes, cache, group)[0]:
            before, _ = numbers.get(pool.dtype.name, (0, None))
            numbers[pool.dtype.name] = before + prod(pool.shape[1:]), pool.dtype
        rows[group] = {
            name: jax.ShapeDtypeStruct((count, total), dtype)
            for name, (total, dtype) in numbers.items()
            if total
        }
    return rows


def gather_rows(
    shapes: CacheShapes, cache: Cache, ids: Mapping[str, Int[Array, " rows"]]
) -> BlockRows:
    """Copies blocks of each group to rows; an id out of range gives an arbitrary block."""
    rows: BlockRows = {}
    for group, blocks in ids.items():
        parts: dict[str, list[Array]] = {}
        for pool in _pools(shapes, cache, group)[0]:
            if pool.size:
                gathered = pool.at[blocks].get(mode="clip")
                parts.setdefault(pool.dtype.name, []).append(gathered.reshape(len(blocks), -1))
        rows[group] = {name: jnp.concatenate(arrays, axis=1) for name, arrays in parts.items()}
    return rows


def scatter_rows(
    shapes: CacheShapes, cache: Cache, rows: BlockRows, ids: Mapping[str, Int[Array, " rows"]]
) -> Cache:
    """Writes rows to blocks of the cache; rows with a negative id are dropped."""
    changed = dict(cache)
    for group, blocks in ids.items():
        arrays, tree = _pools(shapes, cache, group)
        begins = dict.fromkeys(rows[group], 0)
        for index, pool in enumerate(arrays):
            if pool.size:
                name, begin = pool.dtype.name, begins[pool.dtype.name]
                begins[name] = begin + prod(pool.shape[1:])
                part = rows[group][name][:, begin : begins[name]]
                targets = jnp.where(blocks >= 0, blocks, pool.shape[0])
                written = part.reshape(len(blocks), *pool.shape[1:])
                arrays[index] = pool.at[targets].set(written, mode="drop")
        changed |= jax.tree.unflatten(tree, arrays)
    return changed
