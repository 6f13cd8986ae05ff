"""Blocks are copied within and between two places as they would be within one."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jinfer.engine.runner.steps import copy_blocks
from jinfer.ops.attention.kv_cache import BLOCK, CacheShape, LayerCache
from jinfer.parallel.block_transfer import BlockCopier, CacheMemory, gather_blocks, scatter_blocks
from jinfer.parallel.device_groups import DeviceGroup

FIRST, TOTAL = 3, 7


def at_once(program: Any, *given: Any) -> Any:
    return program(*given)


def random(rng: np.random.Generator, width: int) -> Any:
    return rng.normal(size=(TOTAL, 1, BLOCK, width)).astype(np.float32)


@pytest.mark.parametrize(
    "copies",
    [
        [(0, 1), (2, 0)],
        [(4, 5), (6, 3)],
        [(0, 4), (5, 2), (6, 3), (1, 0)],
        [(4, 0), (5, 4), (1, 6)],  # what comes from 4 is what was there before
    ],
)
def test_copies(copies: list[tuple[int, int]]) -> None:
    model: Any = SimpleNamespace(caches={"a": CacheShape(1, 2, 2), "b": CacheShape(1, 2, 0)})
    rng = np.random.default_rng(1)
    pool: Any = {
        name: LayerCache(random(rng, 2), random(rng, width)) for name, width in (("a", 2), ("b", 0))
    }
    site = DeviceGroup((jax.devices()[0],))
    programs = (
        jax.jit(partial(each, model)) for each in (copy_blocks, gather_blocks, scatter_blocks)
    )
    copy, taking, putting = programs
    place = CacheMemory(site, copy, taking, putting, at_once)
    exchange = BlockCopier({"all": FIRST}, frozenset(pool), (place, place))
    sources, targets = (
        {"all": np.array([*(copy[i] for copy in copies), 0, 0], np.int32)} for i in (0, 1)
    )
    halves = (
        jax.tree.map(lambda array: array[:FIRST], pool),
        jax.tree.map(lambda array: array[FIRST:], pool),
    )
    done = exchange(halves, sources, targets, np.int32(len(copies)))
    wanted = jax.tree.map(np.copy, pool)
    for source, target in copies:
        jax.tree.map(lambda array, s=source, t=target: array.__setitem__(t, array[s]), wanted)
    found = jax.tree.map(lambda *parts: np.concatenate(parts), *done)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
