"""Library cache: the folder of compiled libraries, and the files of a build.

A library runs as this user, so it is loaded only if no other user could have written it. The loader
does not reject a truncated file (a full disk, a copied cache), which would crash the process later:
so all of it has a hash.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from jinfer.disk_cache import (
    NEW,
    FolderCache,
    NoCacheError,
    cache_folder,
    is_private,
    private_folder,
    remove,
)

LIBRARY = "libjinfer_cpu.so"
_LIMIT = 2 << 30  # bytes of all libraries
_REQUIRED_BYTES = 32 << 20  # twice a library with its objects
_private: list[Path] = []  # this process's own folder, if there is one


@dataclass(frozen=True)
class BuildPaths:
    """Paths of a build.

    Attributes:
        library: the library while it is built.
        objects: a folder for finished object files, which outlives an interrupted build.
    """

    library: Path
    objects: Path


def find(key: str) -> Path | None:
    """Find the library of a key that may be loaded."""
    folders = [*_private]
    with suppress(NoCacheError):
        folders.insert(0, cache_folder("libraries"))
    entries = (FolderCache(folder, _LIMIT).find(key) for folder in folders)
    return next((entry / LIBRARY for entry in entries if entry is not None), None)


def drop(path: Path) -> None:
    """Remove a library that cannot be loaded."""
    remove(path.parent)


def writable_cache() -> tuple[FolderCache, str]:
    """The cache, or one for this process alone with the reason why libraries cannot be kept."""
    try:
        cache = FolderCache(private_folder(cache_folder("libraries")), _LIMIT)
        cache.make_room(_REQUIRED_BYTES)
    except NoCacheError as reason:
        return FolderCache(_private_folder(), _LIMIT), str(reason)
    return cache, ""


@contextmanager
def build(cache: FolderCache, key: str) -> Iterator[BuildPaths]:
    """Give the paths of a build, whose library becomes the key's entry when the block ends.

    Objects of an interrupted build remain, and the next one reuses them.
    """
    objects = _objects(cache.folder, key)
    try:
        with (
            cache.new(key) as entry,
            tempfile.TemporaryDirectory(prefix=NEW, dir=cache.folder) as scratch,
        ):
            paths = BuildPaths(Path(scratch) / LIBRARY, objects)
            yield paths
            os.replace(paths.library, entry / LIBRARY)
            (entry / LIBRARY).chmod(0o700)
        remove(objects)
    finally:
        with suppress(OSError):  # if it is empty
            objects.rmdir()


def _objects(parent: Path, key: str) -> Path:
    """The folder of a key's objects, emptied if another user could have written to it."""
    folder = parent / f"{NEW}{key}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
    if not is_private(folder):
        remove(folder)
        folder.mkdir(mode=0o700)
    return folder


def _private_folder() -> Path:
    """A folder that is removed at the end of this process."""
    if not _private:
        _private.append(Path(tempfile.mkdtemp(prefix="jinfer-")))
        atexit.register(shutil.rmtree, _private[0], ignore_errors=True)
    return _private[0]
