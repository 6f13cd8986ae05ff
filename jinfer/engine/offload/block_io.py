"""Block transfers: launches the programs that read and write whole blocks of the KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jinfer.engine.runner.step_key import StepKey, StepKind
from jinfer.ops.attention.kv_blocks import BlockRows, row_groups
from jinfer.ops.backend import backend

if TYPE_CHECKING:
    from jinfer.engine.runner.model_runner import ModelRunner

# Rows of each part of a model: one on a device, or each of its pipeline stages. An array has
# [devices * rows, numbers], as each device of a stage has a part of every block.
type PartRows = tuple[BlockRows, ...]


def _arrays(parts: PartRows, group: str) -> Iterator[Any]:
    """The arrays of a group, in the order in which a block's bytes have them."""
    for rows in parts:
        of_group = rows.get(group, {})
        yield from (of_group[name] for name in sorted(of_group))


def block_nbytes(parts: PartRows, group: str, count: int) -> int:
    """Bytes of a block of a group.

    Args:
        count: number of rows.
    """
    arrays = _arrays(parts, group)
    return sum(one.shape[0] // count * one.shape[1] * one.dtype.itemsize for one in arrays)


def rows_nbytes(parts: PartRows) -> int:
    """Bytes of all rows."""
    arrays = (one for rows in parts for of_group in rows.values() for one in of_group.values())
    return sum(int(np.prod(one.shape)) * one.dtype.itemsize for one in arrays)


def on_host(parts: PartRows) -> PartRows:
    """The rows as arrays of the host; waits until they are computed."""
    return tuple(
        {group: {n: np.asarray(one) for n, one in of.items()} for group, of in rows.items()}
        for rows in parts
    )


def block_bytes_of(parts: PartRows, group: str, row: int, count: int) -> bytes:
    """The content of the block in a row of host arrays.

    Args:
        count: number of rows.
    """
    arrays = _arrays(parts, group)
    pieces = (one.reshape(-1, count, one.shape[-1])[:, row].tobytes() for one in arrays)
    return b"".join(pieces)


def rows_of(abstract: PartRows, contents: Mapping[str, Sequence[bytes]], count: int) -> PartRows:
    """Rows whose first ones have some contents, as arrays of the host.

    Args:
        abstract: their shapes and types.
        contents: of each group, at most `count`, each as long as `block_nbytes` says.
    """
    made: PartRows = tuple(
        {
            group: {n: np.zeros(one.shape, one.dtype) for n, one in of.items()}
            for group, of in r.items()
        }
        for r in abstract
    )
    for group, listed in contents.items():
        for row, content in enumerate(listed):
            begin = 0
            for array in _arrays(made, group):
                place = array.reshape(-1, count, array.shape[-1])[:, row]
                end = begin + place.nbytes
                place[...] = np.frombuffer(content[begin:end], array.dtype).reshape(place.shape)
                begin = end
    return made


# Blocks of each group in a call: a program for one, and one for a batch that is padded.
BATCH = 8


def transfer_steps() -> list[StepKey]:
    """The programs that transfers need."""
    kinds: tuple[StepKind, ...] = ("gather_blocks", "scatter_blocks")
    return [StepKey(kind, rows=rows) for kind in kinds for rows in (1, BATCH)]


def gather(runner: ModelRunner, blocks: Mapping[str, Sequence[int]]) -> tuple[PartRows, int]:
    """Launches a copy of some blocks of each group, at most `BATCH`.

    Returns:
        The rows, in the order of the blocks, and how many there are with padding.
    """
    count = _padded(max(map(len, blocks.values())))
    program = runner.programs.get(StepKey("gather_blocks", rows=count))
    rows: PartRows = program(runner.cache, _ids(runner, blocks, count, 0))
    if backend() != "cpu":
        for array in jax.tree.leaves(rows):
            array.copy_to_host_async()
    return rows, count


def scatter(runner: ModelRunner, contents: Mapping[str, Mapping[int, bytes]]) -> None:
    """Launches the writing of some blocks of each group, at most `BATCH`.

    Args:
        contents: group -> block -> its bytes.
    """
    count = _padded(max(map(len, contents.values())))
    program = runner.programs.get(StepKey("scatter_blocks", rows=count))
    listed = {group: list(each.values()) for group, each in contents.items()}
    rows = rows_of(runner.programs.abstract_rows(count), listed, count)
    ids = _ids(runner, {group: list(each) for group, each in contents.items()}, count, -1)
    runner.set_cache(program(runner.cache, rows, ids))


def _padded(count: int) -> int:
    return 1 if count == 1 else BATCH


def _ids(
    runner: ModelRunner, blocks: Mapping[str, Sequence[int]], count: int, filling: int
) -> dict[str, np.ndarray]:
    """Block ids of every group as programs take them."""
    ids = {}
    for group in row_groups(runner.model.caches):
        listed = blocks.get(group, ())
        ids[group] = np.full(count, filling, np.int32)
        ids[group][: len(listed)] = listed
    return ids
