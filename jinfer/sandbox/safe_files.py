"""Safe file reads: regular files up to a size limit, and failed downloads in place of files."""

from __future__ import annotations

import json
import os
import re
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


HEAD = 512  # bytes that are enough to detect a failed download
MAX_ANSWER = 4096  # bytes of an error message
_HTML = re.compile(rb"\s*(?:<\?xml[^>]*>\s*)?<(?:!doctype\s+html|html|head|body)\b", re.IGNORECASE)
# Error messages of hubs, as a whole file.
_ANSWERS = re.compile(
    r"(?:entry|repository|revision|file|page)? ?not found|(?:404|403|401|5\d\d)\b.*|"
    r"invalid (?:username or password|credentials).*|unauthorized|forbidden|"
    r"access to (?:model|dataset) .*",
    re.IGNORECASE,
)


def failed_download(data: bytes, size: int) -> str:
    """Say what a file really is, and what to do; "" if nothing is suspicious.

    Args:
        data: the file's beginning, at least `HEAD` bytes or the whole file.
        size: size of the file in bytes.
    """
    if data.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the file itself: run `git lfs pull`"
    if _HTML.match(data):
        return "is an HTML page, not the file itself: fetch it again"
    text = _answer(data, size) if size <= MAX_ANSWER else ""
    return f"is a server's answer, {text[:100]!r}, not the file itself: fetch it again" * bool(text)


def read_downloaded(path: Path, limit: int) -> bytes:
    """Read a file as `read_regular_file` does; reject a failed download too."""
    data = read_regular_file(path, limit)
    if reason := failed_download(data, len(data)):
        raise FileRefusedError(reason)
    return data


def _answer(data: bytes, size: int) -> str:
    """The error message that is the whole of a short text."""
    try:
        text = data.decode().strip()
    except UnicodeDecodeError:
        return ""
    if _ANSWERS.fullmatch(text):
        return text
    if not text.startswith("{") or len(data) < size:
        return ""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    error = table.get("error")
    kept = table.keys() <= {"error", "errors", "message", "detail", "status", "code", "url"}
    return str(error) if error and kept else ""
