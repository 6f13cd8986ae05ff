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

_NEW = "new-"
_STALE = 3600.0  # seconds
CHECKSUM_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class DiskCache:
    """Entries by key.

    Attributes:
        folder: writable by this user only.
        versions: what all entries depend on: versions of the software that writes and reads them.
        limit: bytes of all entries; the least recently used are removed first.
        ending: of the entries' files.
    """

    folder: Path
    versions: str
    limit: int = 4 << 30
    ending: str = "EXC"

    def get(self, key: str, nbytes: int | None = None) -> bytes | None:
        """The content of a key; None if it is missing or invalid.

        Args:
            nbytes: that it has to have; None: any number.
        """
        path = self.folder / self.name(key)
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                found = os.fstat(file.fileno())
                ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()
                fits = nbytes is None or found.st_size == CHECKSUM_BYTES + nbytes
                content = file.read() if ours and fits and not found.st_mode & 0o022 else b""
        except OSError:
            return None
        begin, rest = content[:CHECKSUM_BYTES], content[CHECKSUM_BYTES:]
        if not hmac.compare_digest(begin, self._hash(key, rest)):
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            os.utime(path)
        return rest

    def __contains__(self, key: str) -> bool:
        """Whether there is an entry of a key, valid or not."""
        return (self.folder / self.name(key)).exists()

    def put(self, key: str, content: bytes, *, shrink: bool = True) -> bool:
        """Stores an entry if possible: a full disk or a read-only folder is no error.

        Args:
            shrink: whether older entries are removed where all take too much.

        Returns:
            Whether it is stored.
        """
        try:
            handle, name = tempfile.mkstemp(dir=self.folder, prefix=_NEW)
            try:
                with open(handle, "wb") as file:
                    file.write(self._hash(key, content))
                    file.write(content)
                os.replace(name, self.folder / self.name(key))
            except BaseException:
                os.unlink(name)
                raise
        except OSError:
            return False
        if shrink:
            self.shrink(self.limit)
        return True

    def name(self, key: str) -> str:
        """The name of a key's file."""
        return f"{self._hash(key, b'').hex()[:32]}{self.ending}"

    def _hash(self, key: str, content: bytes) -> bytes:
        digest = hashlib.sha256()
        for part in (self.versions.encode(), key.encode(), content):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.digest()

    def shrink(self, limit: int) -> dict[str, int]:
        """Removes the entries used least recently until all take no more than a limit, in bytes.

        Returns:
            The names and sizes of those that are left.
        """
        entries = dict[str, os.stat_result]()
        with suppress(OSError), os.scandir(self.folder) as found:
            for entry in found:
                with suppress(OSError):  # another process has removed it
                    about, new = entry.stat(follow_symlinks=False), entry.name.startswith(_NEW)
                    if new and time.time() - about.st_mtime > _STALE:  # of a killed process
                        os.unlink(entry.path)
                    elif entry.name.endswith(self.ending) or new:
                        entries[entry.name] = about
        total = sum(about.st_size for about in entries.values())
        for name in sorted(entries, key=lambda name: entries[name].st_mtime_ns):
            if total <= limit:
                break
            if name.endswith(self.ending):
                with suppress(OSError):
                    os.unlink(self.folder / name)
                total -= entries.pop(name).st_size
        return {n: about.st_size for n, about in entries.items() if n.endswith(self.ending)}
