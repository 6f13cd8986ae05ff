"""Block transfers of pipeline stages: their parts of KV cache blocks, for prefix cache offload.

Each stage has rows of its own, and each of its devices its part of every row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from jinfer.engine.runner.step_table import row_ids
from jinfer.ops.attention.kv_blocks import (
    BlockRows,
    abstract_rows,
    gather_rows,
    row_groups,
    scatter_rows,
)
from jinfer.parallel.device_groups import DeviceGroup
from jinfer.parallel.stage_programs import CompiledStage, StageCompiler

type Launch = Callable[..., Any]


def abstract_stage_rows(compiler: StageCompiler, count: int) -> tuple[BlockRows, ...]:
    """The shapes and types of all stages' rows."""
    return tuple(_abstract_rows(compiler, n, count) for n in range(len(compiler.stages)))


def _abstract_rows(compiler: StageCompiler, number: int, count: int) -> BlockRows:
    """The shapes and types of a stage's rows, those of all its devices one after the other."""
    stage = compiler.stages[number]
    rows = abstract_rows(stage.model.model.caches, compiler.cache(stage), count)
    sharded: BlockRows = stage.device_group.abstract_shards(rows)
    return sharded


def _compiled(compiler: StageCompiler, number: int, count: int, kind: str) -> CompiledStage:
    stage = compiler.stages[number]
    shapes, own = stage.model.model.caches, compiler.cache(stage)

    def make() -> CompiledStage:
        ids = (row_ids(stage.model.model, count),)
        if kind == "gather":
            function = partial(gather_rows, shapes)
            return compiler.compile_stage(stage, function, (), (own,), ids, True)
        both = own, _abstract_rows(compiler, number, count)
        return compiler.compile_stage(stage, partial(scatter_rows, shapes), 0, both, ids, True)

    return compiler.cached((kind, stage.kind, count), make)


def make_gather(compiler: StageCompiler, launch: Launch, count: int) -> Callable[..., Any]:
    """The program "gather_blocks" of all stages.

    Args:
        launch: launches a stage's program.
    """
    numbers = range(len(compiler.stages))
    made = [_compiled(compiler, number, count, "gather").program for number in numbers]

    def run(caches: Any, ids: Any) -> tuple[BlockRows, ...]:
        return tuple(
            launch(f"stage {number}", made[number], cache, _own(compiler, number, ids))
            for number, cache in enumerate(caches)
        )

    return run


def make_scatter(compiler: StageCompiler, launch: Launch, count: int) -> Callable[..., Any]:
    """The program "scatter_blocks" of all stages; arguments as of `make_gather`."""
    numbers = range(len(compiler.stages))
    made = [_compiled(compiler, number, count, "scatter").program for number in numbers]

    def run(caches: Any, rows: tuple[BlockRows, ...], ids: Any) -> Any:
        changed = []
        for number, (cache, part) in enumerate(zip(caches, rows, strict=True)):
            here = _on_devices(compiler.stages[number].device_group, part)
            own = _own(compiler, number, ids)
            changed.append(launch(f"stage {number}", made[number], cache, here, own))
        return tuple(changed)

    return run


def _own(compiler: StageCompiler, number: int, ids: Any) -> Any:
    """The ids of the groups that a stage has."""
    groups = row_groups(compiler.stages[number].model.model.caches)
    return {group: ids[group] for group in groups}


def _on_devices(device_group: DeviceGroup, rows: BlockRows) -> BlockRows:
    """Rows of the host, each device's part on that device."""
    parts = len(device_group.devices)
    placed: BlockRows = jax.tree.map(
        lambda array: device_group.join_shards(np.split(array, parts)), rows
    )
    return placed
