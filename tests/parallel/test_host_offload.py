"""Cache blocks that are copied within and between two memories equal copies within one."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jinfer.engine.runner.step_table import int32
from jinfer.engine.runner.steps import copy_blocks
from jinfer.ops.attention.kv_cache import BLOCK, CacheShape, LayerCache
from jinfer.parallel.device_groups import DeviceGroup
from jinfer.parallel.host_offload import HostKVCache, SplitPools
from jinfer.parallel.stage_programs import Launcher, ProgramTable, StepCalls

FIRST, TOTAL = 3, 7


@pytest.mark.parametrize(
    "copies",
    [
        [(0, 1), (2, 0)],
        [(4, 5), (6, 3)],
        [(0, 4), (5, 2), (6, 3), (1, 0)],
        [(4, 0), (5, 4), (1, 6)],  # block 4 is read before it is written
    ],
)
def test_copies(copies: list[tuple[int, int]]) -> None:
    model: Any = SimpleNamespace(caches={"a": CacheShape(1, 2, 2), "b": CacheShape(1, 2, 0)})
    rng = np.random.default_rng(1)

    def random(width: int) -> Any:
        return rng.normal(size=(TOTAL, 1, BLOCK, width)).astype(np.float32)

    pool: Any = {name: LayerCache(random(2), random(width)) for name, width in (("a", 2), ("b", 0))}
    group = DeviceGroup((jax.devices()[0],))
    stage: Any = SimpleNamespace(
        host=group, device_group=group, kind="", model=SimpleNamespace(model=model)
    )
    compile_calls = StepCalls(True, ProgramTable(), Launcher(False), lambda tree, *_: tree)
    copy = partial(HostKVCache({"all": TOTAL}, {"all": TOTAL - FIRST}).copy, thread="", stage=stage)
    copy = partial(copy, function=partial(copy_blocks, model))
    halves = SplitPools(
        jax.tree.map(lambda array: array[:FIRST], pool),
        jax.tree.map(lambda array: array[FIRST:], pool),
    )
    sources, targets = (
        {"all": np.array([*(copy[i] for copy in copies), 0, 0], np.int32)} for i in (0, 1)
    )
    ids, abstract = {"all": int32(len(copies) + 2)}, group.abstract(halves)
    copy(compile_calls, cache=abstract, sources=ids, targets=ids, count=int32())
    calls = replace(compile_calls, compiling=False)
    count = np.int32(len(copies))
    done = copy(calls, cache=halves, sources=sources, targets=targets, count=count)
    expected = jax.tree.map(np.copy, pool)
    for source, target in copies:
        jax.tree.map(lambda array, s=source, t=target: array.__setitem__(t, array[s]), expected)
    found = jax.tree.map(lambda *parts: np.concatenate(parts), *done)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
