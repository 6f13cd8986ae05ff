"""Block transfers: launches the programs that read and write whole blocks of the KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from jinfer.engine.offload.block_bytes import PartRows, rows_of
from jinfer.engine.runner.step_key import StepKey, StepKind
from jinfer.ops.attention.kv_blocks import row_groups
from jinfer.ops.backend import backend

if TYPE_CHECKING:
    from jinfer.engine.runner.model_runner import ModelRunner

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
