"""State pool: recurrent states of the sequences, and snapshots of states for the prefix cache.

A state (conv, SSM, delta rule, ...) sums up all tokens of a sequence so far and is overwritten by
each, so unlike a KV block it cannot be shared or cut. A sequence owns one block of the pool. A
prefix is reused by copying a *snapshot*, the state after exactly that prefix, which was taken as a
sequence came past or where it ended. Snapshots have the blocks that no sequence needs, up to a
limit if there is one. Of the lowest `RetentionPriority` that has more than a quarter of them, the
least recently used is evicted first (LRU).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from jinfer.engine.scheduling.block_pool import OnBlock, chain_hash, ignore
from jinfer.ops.attention.kv_cache import BLOCK

_SEEN = 1 << 16  # beginnings that are remembered


class RetentionPriority(IntEnum):
    """Why a snapshot is kept; the lower ones give way first."""

    PASSED = 0  # a prompt went on from here; others may part from it
    ENDED = 1  # a prompt or its answer ended here, or nearly
    SHARED = 2  # more than one prompt began like this


class Snapshot(NamedTuple):
    """The tokens of a kept state: `tokens` after whole blocks with the hash `before`."""

    before: bytes
    tokens: tuple[int, ...]

    @property
    def digest(self) -> bytes | None:
        """Hash of all its tokens, if they are whole blocks."""
        return None if self.tokens else self.before


class StatePool:
    """The blocks of recurrent states.

    Attributes:
        count: number of blocks.
        limit: number of snapshots, at most.
        on_full, on_evict: as of `BlockPool`, of snapshots at the end of a block of tokens; the copy
            that fills a kept block may not have been launched yet.
    """

    def __init__(self, count: int, limit: int | None = None) -> None:
        self.count = count
        self.limit = count if limit is None else limit
        self._free = list(range(count - 1, -1, -1))
        # Of each priority by block, in LRU order.
        self._kept = tuple(OrderedDict[int, Snapshot]() for _ in RetentionPriority)
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._after: dict[bytes, dict[tuple[int, ...], int]] = {}
        self.on_full: OnBlock = ignore
        self.on_evict: OnBlock = ignore

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated, those of snapshots included."""
        return len(self._free) + self.snapshots

    @property
    def used(self) -> int:
        """Number of blocks that sequences own."""
        return self.count - self.available

    @property
    def snapshots(self) -> int:
        """Number of snapshots."""
        return sum(map(len, self._kept))

    @property
    def share(self) -> int:
        """Snapshots that one prompt may leave on its way."""
        return max(1, self.limit // 4)

    def note(self, digest: bytes) -> None:
        """Remembers that a sequence has begun with the whole blocks with this hash."""
        self._seen[digest] = None
        self._seen.move_to_end(digest)
        if len(self._seen) > _SEEN:
            self._seen.popitem(last=False)

    def was_seen(self, digest: bytes) -> bool:
        """Whether a sequence has begun so before, as far as that is remembered."""
        return digest in self._seen

    def allocate(self) -> int | None:
        """A block for a sequence, of undefined content; None if sequences own all."""
        if self._free:
            return self._free.pop()
        return self._evict() if self.snapshots else None

    def _evict(self) -> int:
        passed, ended, shared = self._kept
        share = self.snapshots // 4
        kept = next((kept for kept in (passed, ended) if len(kept) > share), shared)
        block, snapshot = kept.popitem(last=False)
        self._forget(snapshot)
        if not snapshot.tokens:
            self.on_evict(block, snapshot.before)
        return block

    def contents(self) -> list[tuple[int, Snapshot]]:
        """Every block that has a snapshot, and of which tokens."""
        return [each for kept in self._kept for each in kept.items()]

    def content(self, block: int) -> Snapshot | None:
        """The snapshot in a block."""
        return next((kept[block] for kept in self._kept if block in kept), None)

    def lookup(self, digest: bytes) -> int | None:
        """The snapshot after the whole blocks with this hash, and no token more."""
        return self._after.get(digest, {}).get(())

    def is_idle(self, block: int) -> bool:
        """Whether a block has a snapshot."""
        return any(block in kept for kept in self._kept)

    def touch(self, block: int) -> None:
        """Makes a snapshot the last one of its priority to be evicted."""
        for kept in self._kept:
            if block in kept:
                kept.move_to_end(block)

    def forget(self, block: int) -> bool:
        """Evicts a snapshot."""
        for kept in self._kept:
            if block in kept:
                self._forget(kept.pop(block))
                self.release(block)
                return True
        return False

    def release(self, block: int) -> None:
        """A sequence's block is not needed any more."""
        self._free.append(block)

    def prefixes(self, seed: bytes, tokens: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
        """(number of tokens, block) of each snapshot of a prefix, the longest first.

        Args:
            seed: as of `BlockTables`.
            limit: tokens of the prefix, at most.
        """
        if not self.snapshots:
            return
        digests = [seed]
        for end in range(BLOCK, limit + 1, BLOCK):
            digests.append(chain_hash(digests[-1], tokens[end - BLOCK : end]))
        for index in range(len(digests) - 1, -1, -1):
            rest = tuple(tokens[index * BLOCK : limit])
            here = self._after.get(digests[index], {})
            for content in sorted(here, key=len, reverse=True):
                if index + len(content) and rest[: len(content)] == content:
                    yield index * BLOCK + len(content), here[content]

    def copy_of(self, snapshot: int) -> int | None:
        """A block to copy a snapshot to; the snapshot's own if there is no other.

        At a border two prompts have begun with it now. Who goes on from the end of an answer leaves
        a later one.
        """
        self.touch(snapshot)
        if (content := self.content(snapshot)) is not None and not content.tokens:
            self._raise(snapshot, RetentionPriority.SHARED)
        return self.allocate()

    def _raise(self, block: int, priority: RetentionPriority) -> None:
        for kept in self._kept[:priority]:
            if block in kept:
                self._kept[priority][block] = kept.pop(block)

    def keep(
        self,
        block: int,
        digests: Sequence[bytes],
        tokens: Sequence[int],
        priority: RetentionPriority = RetentionPriority.ENDED,
    ) -> None:
        """Turns a sequence's block into the snapshot after `tokens`.

        Args:
            digests: hashes of the prefixes that end with each whole block, the seed first.
        """
        whole = len(tokens) // BLOCK
        self.keep_snapshot(
            block, Snapshot(digests[whole], tuple(tokens[whole * BLOCK :])), priority
        )

    def keep_snapshot(
        self, block: int, snapshot: Snapshot, priority: RetentionPriority = RetentionPriority.ENDED
    ) -> bool:
        """`keep` of a block for a snapshot; False, the block released, where there is one."""
        known = self._after.get(snapshot.before, {}).get(snapshot.tokens)
        if known is not None or not self.limit:
            self.release(block)
            if known is not None:
                self._raise(known, priority)
            return False
        if self.snapshots == self.limit:
            self.release(self._evict())
        self._kept[priority][block] = snapshot
        self._after.setdefault(snapshot.before, {})[snapshot.tokens] = block
        if not snapshot.tokens:
            self.on_full(block, snapshot.before)
        return True

    def has(self, digests: Sequence[bytes], tokens: Sequence[int]) -> bool:
        """Whether there is a snapshot after these tokens."""
        whole = len(tokens) // BLOCK
        return tuple(tokens[whole * BLOCK :]) in self._after.get(digests[whole], {})

    def clear(self) -> None:
        """Evicts all snapshots, as when the cache's memory is lost."""
        for block, _ in self.contents():
            self.forget(block)
        self._seen.clear()

    def _forget(self, snapshot: Snapshot) -> None:
        here = self._after[snapshot.before]
        del here[snapshot.tokens]
        if not here:
            del self._after[snapshot.before]
