"""Multipart bodies (multipart/form-data, RFC 7578), parsed piece by piece and bounded.

Short fields stay in memory; the file is written piece by piece to a given sink.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from email.parser import HeaderParser
from typing import BinaryIO

from jinfer.server.http.http_errors import ApiError, invalid_request

_HEAD_BYTES = 8 << 10  # of a part's headers
_FIELD_BYTES = 64 << 10
_MAX_PARTS = 32


def boundary_of(content_type: str) -> bytes:
    """Return the boundary of a Content-Type header. Raises `ApiError`."""
    head = HeaderParser().parsestr(f"Content-Type: {content_type}")
    boundary = head.get_boundary("")
    if head.get_content_type() != "multipart/form-data" or not 0 < len(boundary) <= 70:
        raise ApiError(
            415, "the body must be multipart/form-data, with a boundary", code="unsupported_type"
        )
    return boundary.encode("latin-1", "replace")


@dataclass
class MultipartParser:
    """Parses a body.

    Attributes:
        boundary: separator of the parts.
        file: name of the field with the file.
        sink: opens the destination of the file.
        fields: the short fields by name.
        filename: name of the file; None before it is known.
        ended: whether the last boundary was read.
    """

    boundary: bytes
    file: str
    sink: Callable[[], BinaryIO]
    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    ended: bool = False

    def __post_init__(self) -> None:
        self._delimiter = b"\r\n--" + self.boundary
        self._buffer = bytearray(b"\r\n")  # so that the first boundary follows a line break
        self._name: str | None = None  # of the part whose content is being read
        self._in_head = False
        self._value = bytearray()
        self._open: BinaryIO | None = None
        self._parts = 0

    def push(self, data: bytes) -> None:
        """Parse a piece. Raises `ApiError` for invalid or too long parts."""
        if self.ended:
            return  # ignore the epilogue
        self._buffer += data
        while not self.ended and (self._head() if self._in_head else self._content()):
            pass

    def finish(self) -> None:
        """Check that the body is whole. Raises `ApiError`."""
        self.close()
        if not self.ended:
            raise _wrong("it ends before its last boundary")

    def close(self) -> None:
        """Close the file."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _content(self) -> bool:
        """Read a part's content up to the next boundary; return False if more data is needed."""
        place = self._buffer.find(self._delimiter)
        if place < 0:
            self._take(max(0, len(self._buffer) - len(self._delimiter) + 1))
            return False
        after = place + len(self._delimiter)
        if len(self._buffer) < after + 2:
            self._take(place)
            return False
        self._take(place)
        sign = bytes(self._buffer[len(self._delimiter) :][:2])
        if sign not in (b"--", b"\r\n"):
            raise _wrong("something follows a boundary in its line")
        self._end_part()
        del self._buffer[: len(self._delimiter) + 2]
        self.ended = sign == b"--"
        self._in_head = not self.ended
        return True

    def _take(self, count: int) -> None:
        """Move `count` bytes of the buffer to the part."""
        if self._open is not None:
            self._open.write(self._buffer[:count])
        elif self._name is not None:
            self._value += self._buffer[:count]
            if len(self._value) > _FIELD_BYTES:
                raise _wrong(f"{self._name[:80]} has more than {_FIELD_BYTES} bytes")
        del self._buffer[:count]

    def _end_part(self) -> None:
        if self._open is None and self._name is not None:
            try:
                self.fields[self._name] = self._value.decode()
            except UnicodeDecodeError:
                raise _wrong(f"{self._name[:80]} is not UTF-8") from None
        self.close()
        self._name, self._value = None, bytearray()

    def _head(self) -> bool:
        """Read a part's headers; return False if more data is needed."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0 or end > _HEAD_BYTES:
            if len(self._buffer) > _HEAD_BYTES:
                raise _wrong(f"a part's headers have more than {_HEAD_BYTES} bytes")
            return False
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise _wrong(f"it has more than {_MAX_PARTS} parts")
        text = self._buffer[:end].decode("utf-8", "replace")
        del self._buffer[: end + 4]
        head = HeaderParser().parsestr(text)
        name = head.get_param("name", header="content-disposition")
        if not isinstance(name, str):
            raise _wrong("a part has no name in its Content-Disposition")
        if name in self.fields or (name == self.file and self.filename is not None):
            raise _wrong(f"it has {name[:80]} twice")
        self._name, self._in_head = name, False
        if name == self.file:
            self.filename = head.get_filename() or "file"
            self._open = self.sink()
        return True


def _wrong(reason: str) -> ApiError:
    return invalid_request(f"the multipart body is wrong: {reason}", code="invalid_multipart")
