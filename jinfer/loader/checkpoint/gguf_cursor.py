"""GGUF cursor: reads numbers and strings of a file's header, one after the other."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from jinfer.loader.checkpoint.checkpoint_reader import CheckpointError
from jinfer.loader.checkpoint.mapped_file import MappedFile

_STRINGS = 1024  # that are had one by one before short ones are looked for again
_WINDOW = 1 << 20  # bytes that are searched for short strings
_EIGHT_ZEROS = "\0" * 8


class Cursor:
    """Reads what comes next, never past the end of the file.

    Attributes:
        path: of the file.
        at: the byte that comes next.
        order: of bytes, as `struct` names them.
    """

    def __init__(self, path: Path, file: MappedFile) -> None:
        self.path = path
        self.at = 0
        self.order = "<"
        self._data = memoryview(file.view(0, file.size))

    def error(self, reason: str, at: int | None = None) -> CheckpointError:
        return CheckpointError(self.path, reason, self.at if at is None else at)

    def need(self, nbytes: int, what: str) -> None:
        """Raises unless the file has `nbytes` more bytes."""
        left = len(self._data) - self.at
        if nbytes > left:
            raise self.error(
                f"{what}: takes {nbytes} bytes or more and the file has {left} left;"
                " it is cut off or damaged, fetch it again"
            )

    def take(self, count: int, what: str) -> bytes:
        self.need(count, what)
        self.at += count
        return bytes(self._data[self.at - count : self.at])

    def number(self, code: str, what: str) -> Any:
        code = self.order + code
        self.need(struct.calcsize(code), what)
        (value,) = struct.unpack_from(code, self._data, self.at)
        self.at += struct.calcsize(code)
        return value

    def numbers(self, code: str, count: int) -> np.ndarray:
        """`count` numbers, which `need` has been asked for."""
        dtype = np.dtype(self.order + code)
        values = np.frombuffer(self._data, dtype, count, self.at)
        self.at += values.nbytes
        return values

    def strings(self, count: int, what: str) -> list[str]:
        found: list[str] = []
        while (left := count - len(found)) > 0:
            some = self._short_strings(left) if left >= _STRINGS and self.order == "<" else []
            found += some or self._any_strings(min(left, _STRINGS), len(found), what)
        return found

    def _short_strings(self, count: int) -> list[str]:
        """As many of the next strings as are short and of UTF-8, in half the time.

        One of less than 256 bytes is a byte with its length, seven zeros and its text. Where a text
        is empty or holds a zero, zeros do not come in sevens, and the strings end before it.
        """
        some = self._data[self.at : self.at + min(_WINDOW, 64 * count)]
        window = np.frombuffer(some, np.uint8).copy()
        zeros = np.flatnonzero(window == 0)[: 7 * (count + 1)]
        heads = zeros[: len(zeros) // 7 * 7 : 7] - 1
        if not len(heads) or heads[0] != 0:
            return []
        ends = heads + 8 + window[heads]
        # Each ends where the next one begins; the last begun has no next one here.
        right = (zeros[6::7][: len(heads)] == heads + 7)[:-1] & (ends[:-1] == heads[1:])
        whole = min(count, len(right) if right.all() else int(right.argmin()))
        if not whole:
            return []
        window[heads[:whole]] = 0
        try:
            text = str(window[8 : ends[whole - 1]].data, "utf-8")
        except UnicodeDecodeError:
            return []
        self.at += int(ends[whole - 1])
        return text.split(_EIGHT_ZEROS)

    def _any_strings(self, count: int, before: int, what: str) -> list[str]:
        # Many of these: everything in local variables.
        data, at, size = self._data, self.at, len(self._data)
        length = struct.Struct(f"{self.order}Q").unpack_from
        found: list[str] = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + length(data, at)[0]
                if at > size:
                    raise struct.error
                found.append(str(data[start:at], "utf-8", "surrogateescape"))
        except struct.error:
            raise self.error(
                f"{what}: string {before + len(found)} ends after the file;"
                " it is cut off or damaged, fetch it again"
            ) from None
        self.at = at
        return found

    def string(self, what: str) -> str:
        return self.strings(1, what)[0]
