"""Files that may be anything: only regular ones are read, and never more of them than is asked."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_PIECE = 1 << 20


class FileRefused(OSError):
    """A file that is not read; its text is the reason, without the path."""


def read_regular(path: Path, most: int) -> bytes:
    """What a file holds.

    A pipe would block, a device would never end, and a file may grow while it is read.

    Args:
        most: bytes that it may have.

    Raises:
        FileRefused: it is missing, no regular file, or larger.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for somebody to write to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise FileRefused(f"cannot be read: {error.strerror}") from None
    except ValueError as error:  # a NUL or a lone surrogate in the name
        raise FileRefused(f"cannot be read: {error}") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise FileRefused("is not a regular file")
        pieces, left = [], most + 1
        while left and (piece := os.read(descriptor, min(left, max(found.st_size, _PIECE)))):
            pieces.append(piece)
            left -= len(piece)
    except OSError as error:
        if isinstance(error, FileRefused):
            raise
        raise FileRefused(f"cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)
    if not left:
        raise FileRefused(f"is larger than {most} bytes")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def dangling(path: Path) -> str:
    """What to say of a link that leads nowhere; "" of anything else."""
    try:
        lost = path.is_symlink() and not path.exists()
        return f"is a link to {path.readlink()}, which is not there: fetch it again" * lost
    except (OSError, ValueError):
        return ""


def is_there(path: Path) -> bool:
    """Whether something has this name, be it readable or not; no name is an error."""
    try:
        return os.path.lexists(path)
    except (OSError, ValueError):
        return False
