"""GGUF cursor: reads numbers and strings of a file's header, one after the other."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from jinfer.checkpoint.checkpoint_reader import CheckpointError
from jinfer.checkpoint.mapped_file import MappedFile

_STRINGS = 1024  # that are had at a time
_SEVEN_ZEROS = bytes(7)


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
            some = self._short_strings() if left >= _STRINGS and self.order == "<" else []
            found += some or self._any_strings(min(left, _STRINGS), len(found), what)
        return found

    def _short_strings(self) -> list[str]:
        """The next strings but for one, or none, in two thirds of the time.

        One of less than 256 bytes is a byte with its length, seven zeros and its text. Split at the
        zeros, each text is followed by the length of the next one.
        """
        window = bytes(self._data[self.at : self.at + 64 * _STRINGS])
        first, *pieces = window.split(_SEVEN_ZEROS, _STRINGS)
        rest = pieces.pop() if len(pieces) == _STRINGS else b""
        texts = [piece[:-1] for piece in pieces]
        lengths = [*first, *[piece[-1] for piece in pieces if piece]]
        # Where a string is empty or long, or has that many zeros, it is not.
        if not rest or len(first) != 1 or [*map(len, texts)] != lengths[:-1]:
            return []
        try:
            found = [*map(bytes.decode, texts)]
        except UnicodeDecodeError:
            return []
        self.at += len(window) - len(rest) - 8
        return found

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
