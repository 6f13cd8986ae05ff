"""Disk cache: where caches are on disk, and entries that are complete, intact and the user's own.

An entry is a file (`DiskCache`: programs, KV cache blocks) or a folder (`FolderCache`: libraries,
quantized weights). It is written under a temporary name and renamed when it is complete, so a
killed process leaves no partial entry. A hash detects truncated and damaged entries. Libraries and
programs are code: files and folders that another user could have written are not used. Keys are
hashes of what entries are made from, such as source files.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

NEW = "new-"  # prefix of unfinished files and folders
CHECKSUM_BYTES = hashlib.sha256().digest_size
_STALE_SECONDS = 24 * 3600.0  # age at which unfinished files and folders are removed
_DIGEST = "digest"  # file of a folder's digest, inside the folder
_EVERY = 1 << 20  # bytes of which a sampled digest reads the first few


class NoCacheError(Exception):
    """Nothing can be cached; the message is the reason, in a few words."""


class CacheOffError(NoCacheError):
    """The user has switched caches off."""


def cache_folder(name: str) -> Path:
    """Find the folder of a cache: in $JINFER_CACHE, or in `jinfer` in the user's cache folder.

    The folder need not exist.

    Raises:
        NoCacheError: the user has no home folder.
        CacheOffError: JINFER_CACHE=off.
    """
    chosen = os.environ.get("JINFER_CACHE", "")
    if chosen == "off":
        raise CacheOffError("JINFER_CACHE=off")
    try:
        if chosen:
            return Path(chosen).expanduser() / name
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jinfer" / name
    except RuntimeError:
        raise NoCacheError("there is no home folder; set JINFER_CACHE") from None


def private_folder(folder: Path, *, repair: bool = True) -> Path:
    """Create a folder that only this user can access, if it does not exist.

    Args:
        repair: close an existing folder that others can access, after removing its content if
            they could have written it; False: reject a folder that others can write to.

    Returns:
        The folder.

    Raises:
        NoCacheError: it cannot be created or written to, or belongs to another user.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise NoCacheError(f"{folder} is not a folder of yours")
        shared = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
        if shared and not repair:
            raise NoCacheError(f"{folder} can be written to by other users; use a private folder")
        if repair and status.st_mode & 0o077:
            folder.chmod(0o700)
            for path in folder.iterdir() if shared else ():
                remove(path)
    except OSError as error:
        raise NoCacheError(f"{folder} cannot be used: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise NoCacheError(f"{folder} cannot be written to")
    return folder


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file that gets its name when the block ends, so that no reader sees a part of it.

    Raises:
        OSError: it cannot be written.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{NEW}{path.name[:100]}.")
    try:
        with open(handle, "wb") as file:
            yield file
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def remove(path: Path) -> None:
    """Remove a file or a folder as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def is_private(path: Path) -> bool:
    """Whether only this user and root can have written a file or the names in a folder."""
    try:
        status = path.lstat()
    except OSError:
        return False
    closed = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return closed and not stat.S_ISLNK(status.st_mode) and status.st_uid in (os.geteuid(), 0)


@dataclass(frozen=True)
class DiskCache:
    """Entries that are files. Each begins with a hash of key, versions and content.

    An entry that is damaged, truncated, of another key, or writable by other users is removed.

    Attributes:
        folder: writable by this user only.
        versions: versions of the software that writes and reads the entries.
        limit: bytes of all entries; the least recently used are removed first.
        ending: suffix of the entries' files.
    """

    folder: Path
    versions: str
    limit: int = 4 << 30
    ending: str = "EXC"

    def get(self, key: str, nbytes: int | None = None) -> bytes | None:
        """Read the content of a key; None if it is missing or invalid.

        Args:
            nbytes: size that it must have; None: any.
        """
        path = self.folder / self.name(key)
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                status = os.fstat(file.fileno())
                own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
                fits = nbytes is None or status.st_size == CHECKSUM_BYTES + nbytes
                data = file.read() if own and fits and not status.st_mode & 0o022 else b""
        except OSError:
            return None
        checksum, content = data[:CHECKSUM_BYTES], data[CHECKSUM_BYTES:]
        if not hmac.compare_digest(checksum, self._hash(key, content)):
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            os.utime(path)
        return content

    def __contains__(self, key: str) -> bool:
        """Whether a key has an entry, valid or not."""
        return (self.folder / self.name(key)).exists()

    def put(self, key: str, content: bytes, *, shrink: bool = True) -> bool:
        """Store an entry if possible: a full disk or a read-only folder is no error.

        Args:
            shrink: remove older entries where all together exceed the limit.

        Returns:
            Whether it is stored.
        """
        try:
            with whole_file(self.folder / self.name(key)) as file:
                file.write(self._hash(key, content))
                file.write(content)
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
        """Remove the least recently used entries until the rest takes no more than a limit.

        Args:
            limit: bytes.

        Returns:
            Names and sizes of the remaining entries.
        """
        entries = dict[str, os.stat_result]()
        with suppress(OSError), os.scandir(self.folder) as found:
            for entry in found:
                with suppress(OSError):  # another process has removed it
                    status, new = entry.stat(follow_symlinks=False), entry.name.startswith(NEW)
                    if new and time.time() - status.st_mtime > _STALE_SECONDS:
                        os.unlink(entry.path)
                    elif entry.name.endswith(self.ending) or new:
                        entries[entry.name] = status
        total = sum(status.st_size for status in entries.values())
        for name in sorted(entries, key=lambda name: entries[name].st_mtime_ns):
            if total <= limit:
                break
            if name.endswith(self.ending):
                with suppress(OSError):
                    os.unlink(self.folder / name)
                total -= entries.pop(name).st_size
        return {n: status.st_size for n, status in entries.items() if n.endswith(self.ending)}


@dataclass(frozen=True)
class FolderCache:
    """Entries that are folders of files, each with a digest of all files.

    Attributes:
        folder: the folder of the entries.
        limit: bytes of all entries; the least recently used are removed first.
        sample: bytes of each megabyte that the digest covers, besides names and sizes; None: all.
    """

    folder: Path
    limit: int
    sample: int | None = None

    def find(self, key: str) -> Path | None:
        """Find the folder of a key; None if it is missing or invalid.

        A damaged entry is removed. An entry that others could have written is ignored.
        """
        entry = self.folder / key
        try:
            if not all(map(is_private, (self.folder, entry, *entry.iterdir()))):
                return None
        except OSError:
            return None
        if not is_intact(entry, self.sample):
            self.drop(key)
            return None
        with suppress(OSError):  # a read-only cache, as in a container image
            os.utime(entry)
        return entry

    def drop(self, key: str) -> None:
        """Remove an entry."""
        remove(self.folder / key)

    @contextmanager
    def new(self, key: str) -> Iterator[Path]:
        """Give an empty folder, which becomes the key's entry when the block ends."""
        scratch = Path(tempfile.mkdtemp(prefix=NEW, dir=self.folder))
        try:
            yield scratch
            write_digest(scratch, self.sample)
            for path in scratch.iterdir():
                path.chmod(path.stat().st_mode & ~0o022)
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            if self.find(key) is None:
                self.drop(key)
            with suppress(OSError):  # another process was faster
                scratch.rename(self.folder / key)
        finally:
            remove(scratch)

    @contextmanager
    def lock(
        self, key: str, waiting: Callable[[], AbstractContextManager[object]]
    ) -> Iterator[None]:
        """Keep other processes from making the entry of a key; one may just have made it.

        Args:
            waiting: context for the time of waiting for another process.
        """
        # Imported here: not needed if the entry exists.
        from filelock import FileLock, Timeout

        path = self.folder / f"{NEW}{key}.lock"
        lock = FileLock(path)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            with waiting():
                lock.acquire()
        except (OSError, NotImplementedError):  # a file system without locks: made twice at worst
            pass
        try:
            yield
        finally:
            lock.release()
            with suppress(OSError):  # processes that wait for it will find the entry
                path.unlink()

    def make_room(self, nbytes: int, spare: int = 0) -> None:
        """Remove the least recently used entries until a new one fits, and unfinished old ones.

        Args:
            nbytes: size of the new entry, approximately.
            spare: bytes that it must leave free on the disk.

        Raises:
            NoCacheError: there is no room.
        """
        entries = list[tuple[float, int, Path]]()
        for path in self.folder.iterdir():
            with suppress(OSError):  # another process has removed it
                modified = path.stat().st_mtime
                if not path.name.startswith(NEW):
                    size = sum(file.stat().st_size for file in path.rglob("*"))
                    entries.append((modified, size, path))
                elif time.time() - modified > _STALE_SECONDS:
                    remove(path)
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if self._fits(total, nbytes, spare):
                break
            remove(path)
            total -= size
        if not self._fits(total, nbytes, spare):
            raise NoCacheError(f"{self.folder} has no room for {nbytes / 2**30:.2f} GiB")

    def _fits(self, total: int, nbytes: int, spare: int) -> bool:
        free = shutil.disk_usage(self.folder).free
        return total + nbytes <= self.limit and free >= nbytes + spare


def is_intact(folder: Path, sample: int | None = None) -> bool:
    """Whether the files of a folder still have the digest of `write_digest`."""
    try:
        return (folder / _DIGEST).read_text(encoding="utf-8") == _digest(folder, sample)
    except (OSError, UnicodeDecodeError):
        return False


def write_digest(folder: Path, sample: int | None = None) -> None:
    """Write the digest of a folder's files into the folder.

    Args:
        sample: as of `FolderCache`.
    """
    (folder / _DIGEST).write_text(_digest(folder, sample), encoding="utf-8")


def _digest(folder: Path, sample: int | None) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name == _DIGEST or not path.is_file():
            continue
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(json.dumps([path.name, size]).encode())
            if sample is None:
                digest.update(hashlib.file_digest(file, "sha256").digest())
                continue
            for begin in (*range(0, size, _EVERY), max(0, size - sample)):
                file.seek(begin)
                digest.update(file.read(sample))
    return digest.hexdigest()


def files_below(folder: Path, *endings: str) -> list[str]:
    """List a folder's files with these endings, at any depth, sorted by path components.

    Takes a fifth of the time of `Path.rglob`.
    """
    found = list[str]()
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found += [os.path.join(where, name) for name in names if name.endswith(endings)]
    return sorted(found, key=lambda path: path.split(os.sep))


def content_of(path: str | Path) -> bytes:
    """Read a file without a buffer."""
    with open(path, "rb", buffering=0) as file:
        return file.readall()
