"""Source files of a folder, listed and read quickly: each start hashes them for keys of caches."""

from __future__ import annotations

import os
from pathlib import Path


def files_below(folder: Path, *endings: str) -> list[str]:
    """Paths of a folder's files, at any depth, whose names end so; sorted by their parts.

    As `Path.rglob`, in a fifth of the time.
    """
    found = list[str]()
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found += [os.path.join(where, name) for name in names if name.endswith(endings)]
    return sorted(found, key=lambda path: path.split(os.sep))


def content_of(path: str | Path) -> bytes:
    """The content of a file, read without a buffer."""
    with open(path, "rb", buffering=0) as file:
        return file.readall()
