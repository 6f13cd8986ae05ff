"""Where the compiled library is kept, and which files may be loaded from there.

What is loaded runs as this user, so a file is used only if nobody else could have written it: it
and its folder belong to the user, or to root as in a container image, and others cannot write to
them. Its hash stands beside it, for a file that was cut short (a full disk, a copied cache) would
not be refused by the loader but end the process later.
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
_BUILDING = "building-"  # begins the names of unfinished folders
_private: list[Path] = []  # this process's folder, once there is one
_ROOM = 32 << 20  # bytes of a library with its objects, and as much again
_STALE = 24 * 3600.0  # seconds after which nobody comes back for what was left unfinished


@dataclass(frozen=True)
class Place:
    """Where a library is built, and where it is once the build is done.

    Attributes:
        objects: a folder for what the compiler has finished, which outlives an interrupted build.
    """

    library: Path
    kept: Path
    objects: Path


def find(key: str) -> Path | None:
    """The library of this key, if there is one that may be used."""
    for folder in (_cache_folder(), *_private):
        path = folder / key / LIBRARY if folder is not None else None
        if path is not None and _is_ours(path) and is_whole(path):
            return path
    return None


@contextmanager
def alone(key: str, waiting: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """No other process builds the library of this key meanwhile; one that did may have left it.

    Args:
        waiting: what another one that is building it is waited for inside of.
    """
    # Here: where the library is made already nobody needs it.
    from filelock import FileLock, Timeout

    path = _writable_folder() / f"{_BUILDING}{key}.lock"
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        with waiting():
            lock.acquire()
    except (OSError, NotImplementedError):  # a file system without locks: some build it twice
        pass
    try:
        yield
    finally:
        lock.release()
        with suppress(OSError):  # who waits for it finds the library
            path.unlink()


@contextmanager
def place(key: str) -> Iterator[Place]:
    """A folder to build in; at the end its library is kept under the key, and the rest removed.

    The library is there whole or not at all, though several processes may build at once. Objects
    stay where the build is interrupted, and the next one begins with them.
    """
    parent = _writable_folder()
    _remove_stale(parent)
    scratch = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=parent))
    try:
        place = Place(scratch / "build" / LIBRARY, parent / key / LIBRARY, _objects(parent, key))
        place.library.parent.mkdir()
        yield place
        done = scratch / "done"
        done.mkdir(mode=0o700)
        os.replace(place.library, done / LIBRARY)
        (done / LIBRARY).chmod(0o700)
        write_hash(done / LIBRARY)
        if not (_is_ours(place.kept) and is_whole(place.kept)):
            drop(place.kept)
        with suppress(OSError):  # another process was faster
            done.rename(place.kept.parent)
        shutil.rmtree(place.objects, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        with suppress(OSError):  # an empty one
            (parent / f"{_BUILDING}{key}").rmdir()


def _objects(parent: Path, key: str) -> Path:
    """The folder of a key's objects; one that another user could have written to is not used."""
    folder = parent / f"{_BUILDING}{key}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_safe(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
    return folder


def drop(path: Path) -> None:
    """Removes a library that cannot be used."""
    shutil.rmtree(path.parent, ignore_errors=True)


def _is_ours(path: Path) -> bool:
    return all(_is_safe(each) for each in (path.parent.parent, path.parent, path))


def _is_safe(path: Path) -> bool:
    """Whether nobody but this user and root can have written it."""
    try:
        status = path.lstat()
    except OSError:
        return False
    if not hasattr(os, "geteuid"):
        return True
    closed = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return closed and not stat.S_ISLNK(status.st_mode) and status.st_uid in (os.geteuid(), 0)


def is_whole(path: Path) -> bool:
    """Whether a library is as it was when `write_hash` was called."""
    try:
        return (path.parent / _HASH).read_text(encoding="utf-8") == _hash(path)
    except (OSError, UnicodeDecodeError):
        return False


def write_hash(path: Path) -> None:
    """Writes a library's hash beside it."""
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
    except RuntimeError:  # no HOME, and no entry of the user's
        base = ""
    if not (chosen or base):
        return None
    return Path(chosen or Path(base) / "jinfer") / "custom_calls"


def unkept() -> str:
    """Why what is compiled now is for this process alone; empty where it is kept for others."""
    return _folder_to_keep()[1]


def _writable_folder() -> Path:
    """The cache folder if it can be written to and only by this user, else one for this process."""
    return _folder_to_keep()[0] or _private_folder()


def _folder_to_keep() -> tuple[Path | None, str]:
    """The cache folder, or why it cannot be used."""
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
    if free < _ROOM:
        return None, f"{folder}: {free / 1e6:.0f} MB are free, of {_ROOM / 1e6:.0f} that it takes"
    return folder, ""


def _private_folder() -> Path:
    """For this process, and gone with it."""
    if not _private:
        _private.append(Path(tempfile.mkdtemp(prefix="jinfer-")))
        atexit.register(shutil.rmtree, _private[0], ignore_errors=True)
    return _private[0]


def _remove_stale(parent: Path) -> None:
    for path in parent.glob(f"{_BUILDING}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE:
                shutil.rmtree(path, ignore_errors=True)
