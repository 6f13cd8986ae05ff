"""Offload stores: blocks in host memory and on disk, and counts of transfers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jinfer.engine.offload.disk_store import DiskStore


class HostStore:
    """Contents by key; any thread may use it.

    Attributes:
        limit: bytes of all contents, at most.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._contents: OrderedDict[str, bytes] = OrderedDict()  # LRU order
        self._lock = threading.Lock()

    def __contains__(self, key: str) -> bool:
        return key in self._contents

    def __len__(self) -> int:
        return len(self._contents)

    def get(self, key: str) -> bytes | None:
        """The content of a key, if it is there."""
        return self._contents.get(key)

    def put(self, key: str, content: bytes) -> None:
        """Stores a content that fits; others give way to it."""
        with self._lock:
            if len(content) > self.limit or key in self._contents:
                return
            self._contents[key] = content
            self.nbytes += len(content)
            while self.nbytes > self.limit:
                self.nbytes -= len(self._contents.popitem(last=False)[1])

    def touch(self, keys: Iterable[str]) -> None:
        """Makes contents the last ones to give way, the last key the very last."""
        with self._lock:
            for key in keys:
                if key in self._contents:
                    self._contents.move_to_end(key)

    def forget(self, key: str) -> None:
        """Removes a content."""
        with self._lock:
            self.nbytes -= len(self._contents.pop(key, b""))

    def clear(self) -> None:
        """Removes all."""
        with self._lock:
            self._contents.clear()
            self.nbytes = 0


def block_key(group: str, digest: bytes) -> str:
    """The key of the block of a group that ends the prefix with a hash."""
    return f"{group}\0{digest.hex()}"


@dataclass
class OffloadCounts:
    """Totals so far.

    Attributes:
        saved, saved_bytes: blocks that went to a store.
        restored, restored_bytes: blocks that came back to the device.
        lost: blocks that were looked for and were damaged, or had gone meanwhile.
    """

    saved: int = 0
    saved_bytes: int = 0
    restored: int = 0
    restored_bytes: int = 0
    lost: int = 0


@dataclass
class Stores:
    """Host memory and disk.

    Attributes:
        host, disk: None: there is no such store.
        counts: what went there and came back.
    """

    host: HostStore | None = None
    disk: DiskStore | None = None
    counts: OffloadCounts = field(default_factory=OffloadCounts)

    def has(self, key: str) -> bool:
        """Whether any store has a block."""
        in_host = self.host is not None and key in self.host
        return in_host or (self.disk is not None and key in self.disk)

    def lacks(self, key: str) -> bool:
        """Whether a block that leaves the device is in some store not yet."""
        in_host = self.host is None or key in self.host
        return not (in_host and (self.disk is None or key in self.disk))

    def put(self, key: str, content: bytes, *, evicted: bool) -> None:
        """Stores a block: on disk, and in host memory if it has left the device."""
        if evicted and self.host is not None:
            self.host.put(key, content)
        if self.disk is not None and key not in self.disk and not self.disk.put(key, content):
            return
        self.counts.saved += 1
        self.counts.saved_bytes += len(content)

    def touch(self, keys: Sequence[str]) -> None:
        """Notes the use of blocks, the most valuable last."""
        if self.host is not None:
            self.host.touch(keys)
        if self.disk is not None:
            self.disk.touch(keys)

    def forget(self, keys: Sequence[str]) -> None:
        """Remove blocks."""
        for key in keys:
            for store in (self.host, self.disk):
                if store is not None:
                    store.forget(key)
