"""State slots: which slot of the state cache each sequence has, and snapshots for the prefix cache.

A recurrence's state cannot be cut to a shorter prefix, so a prefix can be reused only where its
state was copied to a slot of its own: a snapshot, found by the hash of the prefix. A snapshot is
read by copying it. Slots that no sequence has hold snapshots until they are needed; the least
recently used is evicted first (LRU).
"""

from __future__ import annotations

from collections import OrderedDict

from jinfer.engine.scheduling.block_manager import BlockCopy

STATE = "state"  # the group of copies between slots


class StateSlots:
    """Allocates slots.

    Attributes:
        count: number of slots.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._taken: set[int] = set()
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # LRU order

    @property
    def available(self) -> int:
        """Number of slots that can be allocated."""
        return self.count - len(self._taken)

    @property
    def snapshots(self) -> int:
        """Number of snapshots."""
        return len(self._snapshots)

    def allocate(self) -> int | None:
        """A slot for a sequence; None if all have one."""
        slot = self._take()
        if slot is not None:
            self._taken.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """A sequence no longer needs its slot."""
        self._taken.remove(slot)
        self._free.append(slot)

    def fork(self, slot: int) -> BlockCopy | None:
        """A copy of a sequence's state to a new slot; None if there is no slot."""
        target = self.allocate()
        return None if target is None else BlockCopy(STATE, slot, target)

    def snapshot(self, slot: int, digest: bytes) -> BlockCopy | None:
        """The copy that makes a snapshot of a sequence's state.

        Args:
            digest: hash of the prefix whose state the slot holds.

        Returns:
            None if there is one already, or no slot.
        """
        if digest in self._snapshots:
            self._snapshots.move_to_end(digest)
            return None
        target = self._take()
        if target is None:
            return None
        self._snapshots[digest] = target
        return BlockCopy(STATE, slot, target)

    def has_snapshot(self, digest: bytes) -> bool:
        """Whether `restore` finds the prefix with this hash."""
        return digest in self._snapshots

    def restore(self, digest: bytes) -> BlockCopy | None:
        """A copy of a snapshot to a new sequence's slot; None without snapshot or slot.

        Copies run in the order in which they were requested, before anything else is computed: one
        that overwrites this snapshot later does no harm.
        """
        source = self._snapshots.get(digest)
        if source is None:
            return None
        self._snapshots.move_to_end(digest)
        target = self.allocate()
        return None if target is None else BlockCopy(STATE, source, target)

    def clear(self) -> None:
        """Forgets all snapshots, as when the state cache's memory is lost."""
        self._free.extend(self._snapshots.values())
        self._snapshots.clear()

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        return self._snapshots.popitem(last=False)[1] if self._snapshots else None
