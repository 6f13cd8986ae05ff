"""Failed downloads: detects HTML pages and error messages saved in place of a file."""

from __future__ import annotations

import json
import re
from pathlib import Path

from jinfer.sandbox.safe_files import FileRefusedError, read_regular_file

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
