"""Folder of the cache of quantized weights: finding entries, adding them, and making room.

An entry is a folder with a native checkpoint, named by a digest of all that its numbers depend on.
It gets its name when it is complete. A digest of its files' sizes, and of a part of every megabyte,
lies beside them: an entry that does not match it is damaged, and removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jinfer.loader.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from jinfer.loader.checkpoint.native_checkpoint import NativeCheckpoint

MOST_BYTES = 64 << 30  # of all entries; those that were used least recently go first
_ROOM = 1 << 30  # bytes that an entry leaves free on the disk
_MARK = "sampled"
_UNFINISHED = "making-"
_STALE = 24 * 3600.0  # seconds after which one of these was left by a process that was killed
_EVERY, _SAMPLE = 1 << 20, 1 << 12
_SHARD = re.compile(r"(.*)-\d+-of-\d+(\.\w+)")


class NotCached(Exception):
    """Why there can be no entry, in a few words."""


class NotWanted(NotCached):
    """The user wants none."""


def key_of(checkpoint: Checkpoint, *depends: Any) -> str:
    """The name of an entry.

    Args:
        depends: all that its numbers depend on beside the checkpoint's files, each of which has a
            `repr` that says all of it.
    """
    said: list[Any] = [_identity(path) for path in _files(checkpoint.path)]
    said += checkpoint.merged
    return hashlib.sha256(repr((said, depends)).encode()).hexdigest()[:40]


def _files(path: Path) -> list[Path]:
    """The files that a checkpoint may have been read from."""
    if path.is_dir():
        return sorted(each for each in path.iterdir() if each.is_file())
    if path.name.endswith(".index.json"):
        return _files(path.parent)
    if shard := _SHARD.fullmatch(path.name):
        return sorted(path.parent.glob(f"{shard[1]}-*-of-*{shard[2]}"))
    return [path]


def _identity(path: Path) -> tuple[Any, ...]:
    found = path.stat()
    return str(path.resolve()), found.st_size, found.st_mtime_ns


def folder() -> Path:
    """Where entries are: $JINFER_CACHE or the user's cache folder, and in it "weights".

    Raises:
        NotCached: there is no such folder that is the user's alone and can be written to.
    """
    path = _place()
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise NotCached(f"{path} is not a folder of yours")
        if found.st_mode & 0o077:
            path.chmod(0o700)
            if found.st_mode & 0o022:  # others may have written what is in it
                for each in path.iterdir():
                    _remove(each)
    except OSError as error:
        raise NotCached(f"{path} cannot be used: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise NotCached(f"{path} cannot be written to")
    return path


def _place() -> Path:
    chosen = os.environ.get("JINFER_CACHE", "")
    if chosen == "off":
        raise NotWanted("JINFER_CACHE is off")
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise NotCached("there is no home folder; set JINFER_CACHE") from None
    return (Path(chosen).expanduser() if chosen else Path(base) / "jinfer") / "weights"


def find(parent: Path, key: str) -> NativeCheckpoint | None:
    """An entry, if there is one that is whole; one that is not is removed."""
    entry = parent / key
    if not entry.is_dir():
        return None
    try:
        if (entry / _MARK).read_text(encoding="utf-8") == _sampled(entry):
            found = open_checkpoint(entry)
            if isinstance(found, NativeCheckpoint):
                with suppress(OSError):
                    os.utime(entry)
                return found
    except (OSError, UnicodeDecodeError, CheckpointError):
        pass
    _remove(entry)
    return None


def make(parent: Path, key: str, nbytes: int, write: Callable[[Path], None]) -> NativeCheckpoint:
    """A new entry.

    Args:
        nbytes: that it takes, about.
        write: writes its files to a folder.

    Raises:
        NotCached: there is no room for it.
    """
    _make_room(parent, nbytes)
    with _unfinished(parent) as scratch:
        write(scratch)
        (scratch / _MARK).write_text(_sampled(scratch), encoding="utf-8")
        for path in scratch.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        entry = parent / key
        _remove(entry)
        with suppress(OSError):  # another process was faster
            scratch.rename(entry)
    found = find(parent, key)
    if found is None:
        raise NotCached(f"{entry} cannot be read back")
    return found


@contextmanager
def _unfinished(parent: Path) -> Iterator[Path]:
    for path in parent.glob(f"{_UNFINISHED}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE:
                _remove(path)
    scratch = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=parent))
    try:
        yield scratch
    finally:
        _remove(scratch)


def _make_room(parent: Path, nbytes: int) -> None:
    """Removes the entries used least recently until a new one fits."""
    entries = sorted(
        (path for path in parent.iterdir() if not path.name.startswith(_UNFINISHED)),
        key=lambda path: path.stat().st_mtime,
    )
    sizes = [sum(file.stat().st_size for file in path.rglob("*")) for path in entries]
    total = sum(sizes)
    for path, size in zip(entries, sizes, strict=True):
        free = shutil.disk_usage(parent).free
        if total + nbytes <= MOST_BYTES and free >= nbytes + _ROOM:
            break
        _remove(path)
        total -= size
    if nbytes > MOST_BYTES or shutil.disk_usage(parent).free < nbytes + _ROOM:
        raise NotCached(f"{parent} has no room for {nbytes / 2**30:.1f} GiB")


def _sampled(entry: Path) -> str:
    """A digest of the files' names, sizes, ends, and of a part of every megabyte."""
    digest = hashlib.sha256()
    for path in sorted(entry.iterdir()):
        if path.name == _MARK:
            continue
        size = path.stat().st_size
        digest.update(json.dumps([path.name, size]).encode())
        with path.open("rb") as file:
            for begin in (*range(0, size, _EVERY), max(0, size - _SAMPLE)):
                file.seek(begin)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
