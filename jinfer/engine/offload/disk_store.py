"""Disk store: KV cache blocks in a folder, found again after a restart."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from jinfer.disk_cache import CHECKSUM_BYTES, DiskCache, private_folder

FOLDER = "jinfer-prefix-cache"  # subfolder of the user's folder, which may have other files
_ROOM = 0.9  # share of the limit that is left when older contents are removed
_SCANS = 16  # scans for files of other processes while as many bytes as the limit are written
_log = logging.getLogger("jinfer")


class DiskStore:
    """A `DiskCache` of blocks, with an index in memory.

    Files of another model or version are ignored.

    Attributes:
        limit: maximum bytes of all files in the folder; the least recently used are removed.
        nbytes: bytes of all files in the folder.
        scanned: whether the index is complete.
    """

    def __init__(self, folder: Path, identity: str, limit: int) -> None:
        """Create the store's subfolder; `scan` reads its content later.

        Args:
            identity: everything that contents depend on besides their keys.

        Raises:
            NoCacheError: the subfolder cannot be created, or others can write to it.
        """
        self.limit, self.nbytes, self.scanned = limit, 0, False
        self._files = DiskCache(folder / FOLDER, identity, limit, ".kv")
        self._names: dict[str, int] = {}
        self._new = 0  # bytes written since the last scan
        self._warned = False
        private_folder(self._files.folder, repair=False)

    def __contains__(self, key: str) -> bool:
        return self._files.name(key) in self._names

    def scan(self) -> None:
        """Read which contents exist, and remove those that exceed the limit."""
        self._shrink(self.limit)
        self.scanned = True

    def get(self, key: str, nbytes: int) -> bytes | None:
        """Read the content of a key; None if it is missing or damaged. A damaged one is removed.

        Args:
            nbytes: its size.
        """
        content = self._files.get(key, nbytes)
        if content is None:
            self.nbytes -= self._names.pop(self._files.name(key), 0)
        return content

    def put(self, key: str, content: bytes) -> bool:
        """Store a content, if there is room on the disk; return whether it is stored."""
        size, name = len(content) + CHECKSUM_BYTES, self._files.name(key)
        if self.nbytes + size > self.limit:
            self._shrink(int(_ROOM * self.limit) - size)
        elif self._new > self.limit // _SCANS:
            self._shrink(self.limit - size)
        if self.nbytes + size > self.limit:
            return False
        if not self._files.put(key, content, shrink=False):
            if not self._warned:
                _log.warning("%s cannot be written to; is the disk full?", self._files.folder)
            self._warned = True
            return False
        self._new += size
        self.nbytes += size - self._names.get(name, 0)
        self._names[name] = size
        return True

    def touch(self, keys: Iterable[str]) -> None:
        """Mark contents as used most recently, the last key most recently of all."""
        for key in keys:
            if (name := self._files.name(key)) in self._names:
                with suppress(OSError):
                    os.utime(self._files.folder / name)

    def forget(self, key: str) -> None:
        """Remove a content."""
        name = self._files.name(key)
        self.nbytes -= self._names.pop(name, 0)
        with suppress(OSError):
            os.unlink(self._files.folder / name)

    def _shrink(self, limit: int) -> None:
        self._new = 0
        self._names = self._files.shrink(limit)
        self.nbytes = sum(self._names.values())
