"""Host store: contents of KV cache blocks in host memory, the least recently used go first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable


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
        """Make contents the last ones to give way, the last key the very last."""
        with self._lock:
            for key in keys:
                if key in self._contents:
                    self._contents.move_to_end(key)

    def forget(self, key: str) -> None:
        """Remove a content."""
        with self._lock:
            self.nbytes -= len(self._contents.pop(key, b""))

    def clear(self) -> None:
        """Remove all."""
        with self._lock:
            self._contents.clear()
            self.nbytes = 0
