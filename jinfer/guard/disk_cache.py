"""Disk cache: hash-checked entries in a folder of the user's.

Each entry begins with a hash of its key and content. An entry that is damaged, truncated, of
another key, or writable by other users is removed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_NEW, _END = "new-", "EXC"
_STALE = 3600.0  # seconds
_HASH = hashlib.sha256().digest_size


@dataclass(frozen=True)
class DiskCache:
    """Entries by key.

    Attributes:
        folder: writable by this user only.
        versions: what all entries depend on: versions of the software that writes and reads them.
        limit: bytes of all entries; the least recently used are removed first.
    """

    folder: Path
    versions: str
    limit: int = 4 << 30

    def get(self, key: str) -> bytes | None:
        """The content of a key; None if it is missing or invalid."""
        path = self._path(key)
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                found = os.fstat(file.fileno())
                ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()
                content = file.read() if ours and not found.st_mode & 0o022 else b""
        except OSError:
            return None
        begin, rest = content[:_HASH], content[_HASH:]
        if not hmac.compare_digest(begin, self._hash(key, rest)):
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            os.utime(path)
        return rest

    def put(self, key: str, content: bytes) -> None:
        """Stores an entry if possible: a full disk or a read-only folder is no error."""
        with suppress(OSError):
            handle, name = tempfile.mkstemp(dir=self.folder, prefix=_NEW)
            try:
                with open(handle, "wb") as file:
                    file.write(self._hash(key, content) + content)
                os.replace(name, self._path(key))
            except BaseException:
                os.unlink(name)
                raise
            self._shrink()

    def _path(self, key: str) -> Path:
        return self.folder / f"{self._hash(key, b'').hex()[:32]}{_END}"

    def _hash(self, key: str, content: bytes) -> bytes:
        digest = hashlib.sha256()
        for part in (self.versions.encode(), key.encode(), content):
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.digest()

    def _shrink(self) -> None:
        for left in self.folder.glob(f"{_NEW}*"):  # of a process that was killed
            if time.time() - left.stat().st_mtime > _STALE:
                left.unlink(missing_ok=True)
        entries = [(entry.stat(), entry) for entry in self.folder.glob(f"*{_END}")]
        total = sum(found.st_size for found, _ in entries)
        for found, entry in sorted(entries, key=lambda one: one[0].st_mtime):
            if total <= self.limit:
                return
            entry.unlink(missing_ok=True)
            total -= found.st_size
