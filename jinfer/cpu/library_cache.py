"""Library cache: the folder of compiled libraries, and checks before loading them.

A library runs as this user, so it is loaded only if no other user could have written it: it and its
folder belong to the user, or to root as in a container image, and others have no write access. Its
hash is stored in the same folder, since the loader does not reject a truncated file (a full disk, a
copied cache), which would crash the process later.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

LIBRARY, _HASH = "libjinfer_cpu.so", "sha256"
_BUILDING = "building-"  # prefix of unfinished folders
_private: list[Path] = []  # this process's own folder, if there is one
_REQUIRED_BYTES = 32 << 20  # twice a library with its objects
_STALE_SECONDS = 24 * 3600.0  # age at which unfinished folders are removed


@dataclass(frozen=True)
class BuildPaths:
    """Paths of a build.

    Attributes:
        library: the library while it is built.
        installed: the library after the build.
        objects: a folder for finished object files, which outlives an interrupted build.
    """

    library: Path
    installed: Path
    objects: Path


def find(key: str) -> Path | None:
    """Finds the library of this key, if it exists and may be loaded."""
    for folder in (_cache_folder(), *_private):
        path = folder / key / LIBRARY if folder is not None else None
        if path is not None and _is_ours(path) and is_intact(path):
            return path
    return None


@contextmanager
def build_lock(key: str, waiting: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Locks the build of the library of this key; another process may just have finished it.

    Args:
        key: the library's key.
        waiting: a context for the time of waiting for another process.
    """
    # Imported lazily: not needed if the library exists.
    from filelock import FileLock, Timeout

    path = _writable_folder() / f"{_BUILDING}{key}.lock"
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        with waiting():
            lock.acquire()
    except (OSError, NotImplementedError):  # a file system without locks: built twice at worst
        pass
    try:
        yield
    finally:
        lock.release()
        with suppress(OSError):  # processes that wait for it will find the library
            path.unlink()


@contextmanager
def build_folder(key: str) -> Iterator[BuildPaths]:
    """Makes a build folder; at the end its library is installed under the key, the rest removed.

    Installation is atomic, though several processes may build at once. Objects of an interrupted
    build stay, and the next one reuses them.
    """
    parent = _writable_folder()
    _remove_stale(parent)
    scratch = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=parent))
    try:
        paths = BuildPaths(
            scratch / "build" / LIBRARY, parent / key / LIBRARY, _objects(parent, key)
        )
        paths.library.parent.mkdir()
        yield paths
        done = scratch / "done"
        done.mkdir(mode=0o700)
        os.replace(paths.library, done / LIBRARY)
        (done / LIBRARY).chmod(0o700)
        write_hash(done / LIBRARY)
        if not (_is_ours(paths.installed) and is_intact(paths.installed)):
            drop(paths.installed)
        with suppress(OSError):  # another process was faster
            done.rename(paths.installed.parent)
        shutil.rmtree(paths.objects, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        with suppress(OSError):  # an empty folder
            (parent / f"{_BUILDING}{key}").rmdir()


def _objects(parent: Path, key: str) -> Path:
    """Returns the folder of a key's objects, emptied if another user could have written to it."""
    folder = parent / f"{_BUILDING}{key}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_safe(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
    return folder


def drop(path: Path) -> None:
    """Removes a library that cannot be loaded."""
    shutil.rmtree(path.parent, ignore_errors=True)


def _is_ours(path: Path) -> bool:
    return all(_is_safe(each) for each in (path.parent.parent, path.parent, path))


def _is_safe(path: Path) -> bool:
    """Whether only this user and root can have written the file."""
    try:
        status = path.lstat()
    except OSError:
        return False
    if not hasattr(os, "geteuid"):
        return True
    closed = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return closed and not stat.S_ISLNK(status.st_mode) and status.st_uid in (os.geteuid(), 0)


def is_intact(path: Path) -> bool:
    """Whether a library still has the hash of `write_hash`."""
    try:
        return (path.parent / _HASH).read_text(encoding="utf-8") == _hash(path)
    except (OSError, UnicodeDecodeError):
        return False


def write_hash(path: Path) -> None:
    """Writes a library's hash to its folder."""
    (path.parent / _HASH).write_text(_hash(path), encoding="utf-8")


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cache_folder() -> Path | None:
    chosen = os.environ.get("JINFER_CACHE", "")
    if chosen == "off":
        return None
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # no HOME, and no passwd entry
        base = ""
    if not (chosen or base):
        return None
    return Path(chosen or Path(base) / "jinfer") / "custom_calls"


def not_cached_reason() -> str:
    """Returns the reason why a library compiled now is not cached; empty if it is."""
    return _checked_folder()[1]


def _writable_folder() -> Path:
    """Returns the cache folder if only this user can write to it, else a temporary folder."""
    return _checked_folder()[0] or _private_folder()


def _checked_folder() -> tuple[Path | None, str]:
    """Returns the cache folder, or the reason why it cannot be used."""
    folder = _cache_folder()
    if folder is None:
        off = os.environ.get("JINFER_CACHE", "") == "off"
        return None, "JINFER_CACHE=off" if off else "there is no home folder; set JINFER_CACHE"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if hasattr(os, "geteuid") and folder.lstat().st_uid == os.geteuid():
            folder.chmod(0o700)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return None, f"{folder}: {error.strerror}"
    if not _is_safe(folder):
        return None, f"{folder}: others may write to it"
    if not os.access(folder, os.W_OK):
        return None, f"{folder}: it cannot be written to"
    if free < _REQUIRED_BYTES:
        return (
            None,
            f"{folder}: {free / 1e6:.0f} MB are free, of {_REQUIRED_BYTES / 1e6:.0f} that it takes",
        )
    return folder, ""


def _private_folder() -> Path:
    """Makes a folder that is removed at the end of this process."""
    if not _private:
        _private.append(Path(tempfile.mkdtemp(prefix="jinfer-")))
        atexit.register(shutil.rmtree, _private[0], ignore_errors=True)
    return _private[0]


def _remove_stale(parent: Path) -> None:
    for path in parent.glob(f"{_BUILDING}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
