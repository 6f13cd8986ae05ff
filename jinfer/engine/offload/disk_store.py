"""Disk store: contents of KV cache blocks in a folder, found again after a restart."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from jinfer.sandbox.disk_cache import CHECKSUM_BYTES, DiskCache

FOLDER = "jinfer-prefix-cache"  # in the folder that is given: what else is there is not ours
_ROOM = 0.9  # share of the limit that is left when older contents are removed
# How often others' files are looked for, who may share the folder, while as much as the limit is
# written.
_LOOKS = 16
_log = logging.getLogger("jinfer")


class FolderRefusedError(OSError):
    """A folder that contents are not kept in; the message is the reason, without the folder."""


class DiskStore:
    """Contents by key, each a file with a checksum over itself and all that it depends on.

    A file gets its name when it is complete. Damaged files are removed, those that another model
    or version has written are not looked at.

    Attributes:
        limit: bytes of all files in the folder, at most; the least recently used are removed.
        nbytes: of all files in the folder.
        scanned: whether it is known what there is.
    """

    def __init__(self, folder: Path, identity: str, limit: int) -> None:
        """Makes a folder of its own in a folder, if there is none; looks for files in `scan`.

        Args:
            identity: all that contents depend on besides their keys.

        Raises:
            FolderRefusedError: it cannot be had, or others can write to it.
        """
        self.limit, self.nbytes, self.scanned = limit, 0, False
        self._files = DiskCache(folder / FOLDER, identity, limit, ".kv")
        self._names: dict[str, int] = {}
        self._new = 0  # bytes written since the folder was looked at
        self._warned = False
        _check(self._files.folder)

    def __contains__(self, key: str) -> bool:
        return self._files.name(key) in self._names

    def scan(self) -> None:
        """Finds out what there is, and removes what is too much."""
        self._shrink(self.limit)
        self.scanned = True

    def get(self, key: str, nbytes: int) -> bytes | None:
        """The content of a key; None if it is missing or damaged, and then it is removed.

        Args:
            nbytes: that it has.
        """
        content = self._files.get(key, nbytes)
        if content is None:
            self.nbytes -= self._names.pop(self._files.name(key), 0)
        return content

    def put(self, key: str, content: bytes) -> bool:
        """Stores a content, if there is room on the disk."""
        size, name = len(content) + CHECKSUM_BYTES, self._files.name(key)
        if self.nbytes + size > self.limit:
            self._shrink(int(_ROOM * self.limit) - size)
        elif self._new > self.limit // _LOOKS:
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
        """Makes contents the last ones to be removed, the last key the very last."""
        for key in keys:
            if (name := self._files.name(key)) in self._names:
                with suppress(OSError):
                    os.utime(self._files.folder / name)

    def forget(self, key: str) -> None:
        """Removes a content."""
        name = self._files.name(key)
        self.nbytes -= self._names.pop(name, 0)
        with suppress(OSError):
            os.unlink(self._files.folder / name)

    def _shrink(self, limit: int) -> None:
        self._new = 0
        self._names = self._files.shrink(limit)
        self.nbytes = sum(self._names.values())


def _check(folder: Path) -> None:
    """Makes a folder; raises `FolderRefusedError` unless it is this user's alone to write to."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
    except OSError as error:
        raise FolderRefusedError(f"cannot be made: {error.strerror}") from None
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise FolderRefusedError("can be written to by other users; give a folder of yours alone")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FolderRefusedError("cannot be written to")
