"""Memory-mapped file: arrays over its bytes, with bounds checked before use."""

from __future__ import annotations

import json
import math
import mmap
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from jinfer.loader.checkpoint.checkpoint_reader import CheckpointError
from jinfer.sandbox.safe_files import HEAD, MAX_ANSWER, failed_download

MAX_DIMS = 64  # NumPy's own limit
MAX_BYTES = 2**63 - 1


class MappedFile:
    """A read-only memory map of a whole file.

    The map lives as long as any array made from it. A file that shrinks while it is mapped makes
    the operating system end the process: checkpoints are replaced, not rewritten in place.

    Attributes:
        path: the file.
        size: its length in bytes.
    """

    def __init__(self, path: Path) -> None:
        """Map `path`.

        Raises:
            CheckpointError: it is not a readable regular file, or is a failed download.
        """
        self.path = path
        try:
            # a pipe or a device would block or never end
            if not stat.S_ISREG(path.stat().st_mode):
                raise CheckpointError(path, "is not a regular file")
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                # an empty file cannot be mapped
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else b""
        except (OSError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(path, why_unreadable(error)) from None
        self._bytes = np.frombuffer(data, np.uint8)
        # Enough to recognize an error page, which is short.
        head = self._bytes[: HEAD if self.size > MAX_ANSWER else self.size].tobytes()
        if reason := failed_download(head, self.size):
            raise CheckpointError(path, reason)

    def view(self, offset: int, nbytes: int) -> np.ndarray:
        """The bytes `[offset, offset + nbytes)`: read-only uint8 [nbytes], not a copy.

        Raises:
            CheckpointError: they are not all inside the file.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            reason = f"needs bytes {offset} to {offset + nbytes} of a file of {self.size} bytes"
            raise CheckpointError(self.path, reason + ": it is cut short or damaged", offset)
        return self._bytes[offset : offset + nbytes]

    def read(self, offset: int, nbytes: int) -> bytes:
        """A copy of the bytes `[offset, offset + nbytes)`; errors as in `view`."""
        return self.view(offset, nbytes).tobytes()


def why_unreadable(error: Exception) -> str:
    """Return the operating system's reason why a file cannot be read."""
    return f"cannot be read: {getattr(error, 'strerror', None) or error}"


def release(view: np.ndarray) -> None:
    """Return the pages of a view to the operating system; do nothing for a copy.

    Until then they count as the process's memory, though they can be read from the file again: a
    loaded checkpoint would need its own size in addition to the arrays.
    """
    base: Any = view
    while isinstance(base.base, np.ndarray):
        base = base.base
    data = base.base
    if isinstance(data, memoryview):
        data = data.obj
    if not isinstance(data, mmap.mmap) or not hasattr(data, "madvise"):
        return
    begin = _address(view) - _address(base)
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = (begin + view.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if whole > 0:
        data.madvise(mmap.MADV_DONTNEED, first, whole)


def _address(array: np.ndarray) -> int:
    """Return `array.ctypes.data`, in a fraction of the time."""
    return int(array.__array_interface__["data"][0])


def element_count(shape: Sequence[int], itemsize: int) -> int | None:
    """Elements of an array of this shape; None where NumPy could not hold such an array.

    A dimension of 0 makes the array empty, but NumPy still bounds the product of the others.
    """
    if len(shape) > MAX_DIMS or any(not 0 <= size <= MAX_BYTES for size in shape):
        return None
    if math.prod(size for size in shape if size) * itemsize > MAX_BYTES:
        return None
    return math.prod(shape)


def as_array(raw: np.ndarray, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
    """`raw`, uint8 [n], seen as `dtype` and `shape`: read-only, copied only where misaligned.

    The caller has checked that `shape` takes exactly `raw`'s bytes.
    """
    if raw.ctypes.data % dtype.alignment:
        raw = raw.copy()
    array = raw.view(dtype).reshape(shape)
    array.flags.writeable = False
    return array


MAX_JSON_BYTES = 100_000_000  # the bound the safetensors format sets to its header


def parse_object(path: Path, data: bytes, offset: int = 0) -> dict[str, Any]:
    """Parse `data`, found at `offset` of `path`, as a JSON object (RFC 8259).

    Raises:
        CheckpointError: invalid JSON, a repeated key, too deep nesting, or not an object.
    """
    try:
        # A file may begin with a byte order mark; JSON inside another file has none.
        text = data.decode("utf-8" if offset else "utf-8-sig")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise CheckpointError(path, "JSON is nested too deeply", offset) from None
    except ValueError as error:  # bad UTF-8, bad JSON, a number of thousands of digits
        raise CheckpointError(path, f"JSON is not valid: {error}"[:300], offset) from None
    if not isinstance(value, dict):
        raise CheckpointError(path, "JSON is not an object", offset)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        again = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {again[:100]!r} is given twice")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
