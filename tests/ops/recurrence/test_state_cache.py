"""State cache: slots are copied for forks and snapshots, saved and restored."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.ops.recurrence import state_cache
from jinfer.ops.recurrence.state_cache import copy_slots, read_slot, write_slot
from tests.arrays import on_device
from tests.ops.recurrence.cases import CASES, Piece
from tests.ops.recurrence.test_recurrences import Player

SHAPES = {"a.conv": (3, 5), "a.scan": (2, 4, 8), "b.scan": (7,)}


def numbered(slots: int) -> state_cache.StateCache:
    """Tables of which no two numbers are alike."""
    whole = state_cache.zero_states(SHAPES, slots)
    return {
        name: on_device(np.arange(table.size, dtype=np.float32).reshape(table.shape))
        for name, table in whole.items()
    }


def test_sizes() -> None:
    shapes = state_cache.abstract_states(SHAPES, 6)
    assert {name: one.shape for name, one in shapes.items()} == {
        name: (6, *shape) for name, shape in SHAPES.items()
    }
    assert state_cache.slot_bytes(SHAPES) == 4 * (15 + 64 + 7)
    assert all(one.dtype == jnp.float32 for one in shapes.values())


def test_slots_are_copied_in_order() -> None:
    states, expected = numbered(4), numbered(4)
    sources, targets = (on_device(each, np.int32) for each in ([0, 2, 0], [2, 3, 1]))
    copied = jax.jit(copy_slots)(states, sources, targets, on_device(2, np.int32))
    for name, table in copied.items():
        np.testing.assert_array_equal(table, np.asarray(expected[name])[[0, 1, 0, 0]])


def test_a_saved_slot_is_restored() -> None:
    states, one, two = numbered(3), on_device(1, np.int32), on_device(2, np.int32)
    saved = jax.tree.map(np.asarray, jax.jit(read_slot)(states, one))
    moved = jax.jit(write_slot)(states, two, saved)
    for name, table in moved.items():
        np.testing.assert_array_equal(table, np.asarray(numbered(3)[name])[[0, 1, 1]])


@pytest.mark.parametrize("name", ["short_conv", "ssd", "rwkv4"])
def test_a_fork_goes_on_as_its_source(name: str) -> None:
    """Two continuations of one prefix: each as if it had been computed alone."""
    case = CASES[name]
    one, two = case.draw(20, 1), case.draw(20, 2)
    for key in two:
        two[key][:12] = one[key][:12]
    forked = Player(case, [one, two])
    forked.batch([Piece(0, 0, 12)], 24)
    copies = (on_device([slot], np.int32) for slot in forked.slots[:2])
    count = on_device(1, np.int32)
    forked.table = jax.jit(copy_slots)({"x": forked.table}, *copies, count)["x"]
    forked.batch([Piece(1, 12, 20), Piece(0, 12, 20)], 24)
    for sequence, inputs in enumerate((one, two)):
        alone = Player(case, [inputs])
        alone.batch([Piece(0, 0, 20)], 24)
        got = np.stack([forked.results[sequence][position] for position in range(12, 20)])
        np.testing.assert_allclose(got, alone.outputs(0)[12:], rtol=1e-5, atol=1e-5)
