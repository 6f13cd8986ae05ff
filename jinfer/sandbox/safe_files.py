"""Safe file reads: regular files only, up to a size limit."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_PIECE = 1 << 20


class FileRefusedError(OSError):
    """A file that was not read; the message is the reason, without the path."""


def read_regular_file(path: Path, limit: int) -> bytes:
    """Read a file.

    A pipe would block, a device would never end, and a file may grow while it is read.

    Args:
        limit: maximum size in bytes.

    Raises:
        FileRefusedError: it is missing, not a regular file, or too large.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise FileRefusedError(f"cannot be read: {error.strerror}") from None
    except ValueError as error:  # a NUL or a lone surrogate in the name
        raise FileRefusedError(f"cannot be read: {error}") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise FileRefusedError("is not a regular file")
        pieces, left = [], limit + 1
        while left and (piece := os.read(descriptor, min(left, max(found.st_size, _PIECE)))):
            pieces.append(piece)
            left -= len(piece)
    except OSError as error:
        if isinstance(error, FileRefusedError):
            raise
        raise FileRefusedError(f"cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)
    if not left:
        raise FileRefusedError(f"is larger than {limit} bytes")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def dangling_link(path: Path) -> str:
    """An error message for a dangling link; "" for anything else."""
    try:
        lost = path.is_symlink() and not path.exists()
        return f"is a link to {path.readlink()}, which is not there: fetch it again" * lost
    except (OSError, ValueError):
        return ""


def path_exists(path: Path) -> bool:
    """Whether a path exists, readable or not; an invalid name does not."""
    try:
        return os.path.lexists(path)
    except (OSError, ValueError):
        return False
