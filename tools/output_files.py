"""Output files of tools: found not to be writable before any long work."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from jinfer.loader.sources import SourceError

_FLAGS = ("json", "svg", "html", "draft")  # that name a file to write
_STDOUT = "-"


def check_outputs(options: argparse.Namespace) -> None:
    """Raises `SourceError` if a file that a flag names cannot be written."""
    for file in (getattr(options, flag, None) for flag in _FLAGS):
        if file and file != _STDOUT:
            check_writable(file)


def check_writable(file: str | Path) -> None:
    """Raises `SourceError` if a file cannot be written."""
    path = Path(file)
    folder = path.absolute().parent
    if not folder.is_dir():
        raise SourceError(f"{file}: there is no folder {folder}; make it first")
    if path.is_dir():
        raise SourceError(f"{file}: is a folder; name a file in it")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise SourceError(f"{file}: may not be written by this user; name another file")
