"""State slots: allocation, forks, and snapshots that give way to sequences."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jinfer.engine.scheduling.block_manager import BlockCopy
from jinfer.engine.scheduling.state_slots import STATE, StateSlots


def test_slots_run_out() -> None:
    slots = StateSlots(2)
    one, two = slots.allocate(), slots.allocate()
    assert {one, two} == {0, 1}
    assert slots.allocate() is None
    assert slots.fork(0) is None
    assert slots.snapshot(0, b"a") is None
    slots.release(1)
    assert slots.fork(0) == BlockCopy(STATE, 0, 1)


def test_a_snapshot_is_restored_until_its_slot_is_needed() -> None:
    slots = StateSlots(3)
    slot = slots.allocate()
    assert slot is not None
    first, second = slots.snapshot(slot, b"a"), slots.snapshot(slot, b"b")
    assert first is not None
    assert second is not None
    assert slots.snapshot(slot, b"a") is None, "it is there, and now the last to go"
    assert slots.available == 2
    copy = slots.restore(b"a")
    assert copy == BlockCopy(STATE, first.target, second.target), "b's slot"
    assert not slots.has_snapshot(b"b")
    assert slots.restore(b"b") is None
    assert slots.allocate() == first.target
    assert slots.snapshots == 0
    assert slots.restore(b"a") is None


def test_a_cleared_cache_has_no_snapshots() -> None:
    slots = StateSlots(2)
    slot = slots.allocate()
    assert slot is not None
    assert slots.snapshot(slot, b"a") is not None
    slots.clear()
    assert slots.restore(b"a") is None
    assert slots.allocate() is not None
    assert slots.allocate() is None


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=40))
def test_restored_states_are_those_of_their_prefixes(
    count: int, actions: list[tuple[int, int]]
) -> None:
    """Whatever happens in between: a slot's memory is played along, as a list."""
    slots, memory = StateSlots(count), np.zeros(count, np.int64)
    held: list[int] = []

    def copied(copy: BlockCopy | None) -> None:
        if copy is not None:
            memory[copy.target] = memory[copy.source]

    for action, number in actions:
        at = number % len(held) if held else None
        if action == 0 and (slot := slots.allocate()) is not None:
            held.append(slot)
            memory[slot] = number
        elif action == 1 and at is not None:
            slots.release(held.pop(at))
        elif action == 2 and at is not None:
            copied(slots.snapshot(held[at], b"%d" % memory[held[at]]))
        elif action == 3 and at is not None and (copy := slots.fork(held[at])) is not None:
            copied(copy)
            held.append(copy.target)
        elif action == 4 and (copy := slots.restore(b"%d" % number)) is not None:
            copied(copy)
            held.append(copy.target)
            assert memory[copy.target] == number
        assert len(set(held)) == len(held)
        assert slots.available == count - len(held)
