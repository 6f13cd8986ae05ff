"""Source files: list and read a folder quickly, since each start hashes it for cache keys."""

from __future__ import annotations

import os
from pathlib import Path


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
