"""Pickle machine: its state, bytes, stack, marks and memo; it cannot execute anything.

Every opcode takes at least a byte and makes at most one small object; values are shared and never
copied, so that time and memory are bounded by the pickle's length, and that by
`MAX_PICKLE_BYTES`. The opcodes, and the bound on their number, are in pickle_opcodes.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinfer.loader.checkpoint.checkpoint_reader import CheckpointError
from jinfer.loader.checkpoint.pickle_values import (
    Global,
    Opaque,
    PickleDict,
    PickleError,
    StridedTensor,
)

MAX_PICKLE_BYTES = 32 << 20
_MAX_LINE = 1024  # bytes of a name


class Machine:
    """Reads opcodes' arguments, and does to the stack what they say.

    Attributes:
        position: where the next opcode is read.

    Methods raise `PickleError`, and `IndexError` where the stack has no value to take.
    """

    def __init__(
        self,
        path: Path,
        data: memoryview,
        load_persistent: Callable[[object], object],
        file_bytes: int,
        base: int | None = 0,
    ) -> None:
        """
        Args:
            path: the file, for messages.
            data: the pickle and whatever follows it.
            load_persistent: what a persistent id stands for; raises `PickleError`.
            file_bytes: of the whole file, which the number of steps is bounded by.
            base: offset of `data` in the file; None where it is compressed there.
        """
        self.position = 0
        self.file_bytes = file_bytes
        self._path, self._base = path, base
        self._data = data[:MAX_PICKLE_BYTES]
        self._load_persistent = load_persistent
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []  # stacks below each MARK
        self._memo: dict[int, Any] = {}

    def fail(self, reason: str, at: int) -> CheckpointError:
        """The error for what is wrong at byte `at` of `data`."""
        if self._base is None:
            return CheckpointError(self._path, f"byte {at} of its compressed data.pkl: {reason}")
        return CheckpointError(self._path, reason, self._base + at)

    def reset(self) -> None:
        """Forgets stack and memo: the next pickle over the same bytes starts afresh."""
        self._stack, self._outer, self._memo = [], [], {}

    def byte(self) -> int:
        """The next byte of the pickle."""
        return self.take(1)[0]

    def take(self, count: int) -> memoryview:
        """The next `count` bytes of the pickle."""
        end = self.position + count
        if end > len(self._data):
            what = f"needs {count} bytes at {self.position}, there are {len(self._data)}"
            raise PickleError(f"pickle is cut short or above {MAX_PICKLE_BYTES} bytes: {what}")
        piece = self._data[self.position : end]
        self.position = end
        return piece

    def number(self, width: int) -> int:
        """The next unsigned little-endian integer of `width` bytes."""
        return int.from_bytes(self.take(width), "little")

    def line(self) -> str:
        """The next text argument, up to its newline."""
        ahead = bytes(self._data[self.position : self.position + _MAX_LINE])
        length = ahead.find(b"\n")
        if length < 0:
            raise PickleError(f"a line of text does not end within {_MAX_LINE} bytes")
        self.position += length + 1
        return decode(ahead[:length])

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        return self._stack.pop()

    def top(self) -> Any:
        return self._stack[-1]

    def mark(self) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def pop_mark(self) -> list[Any]:
        """The values pushed since the last MARK."""
        values = self._stack
        self._stack = self._outer.pop()
        return values

    def remember(self, index: int) -> None:
        """Puts the top of the stack into the memo."""
        # picklers count up from 0 or 1: an index is never above the number of bytes so far, and
        # small indices do not collide in a dict
        if index > self.position:
            raise PickleError(f"memo index {index} is above anything a pickler would write")
        self._memo[index] = self.top()

    def remember_next(self) -> None:
        self.remember(len(self._memo))

    def recall(self, index: int) -> None:
        if index not in self._memo:
            raise PickleError(f"memo index {index} was never written")
        self.push(self._memo[index])

    def persistent(self) -> None:
        self.push(self._load_persistent(self.pop()))

    def call(self) -> None:
        args, target = self.pop(), self.pop()
        if not isinstance(target, Global) or target.call is None:
            name = target.name if isinstance(target, Global) else type(target).__name__
            raise PickleError(f"refuses to call {name} (a checkpoint must not call code)")
        if not isinstance(args, tuple):
            raise PickleError(f"the arguments of {target.name} are not a tuple")
        self.push(target.call(args))

    def set_items(self, values: list[Any]) -> None:
        target = self.top()
        if not isinstance(target, PickleDict) or len(values) % 2:
            raise PickleError("items are set on a value that is not a dict")
        target.pairs.extend(zip(values[::2], values[1::2], strict=True))

    def append(self, values: list[Any]) -> None:
        target = self.top()
        if not isinstance(target, list):
            raise PickleError("items are appended to a value that is not a list")
        target.extend(values)

    def build(self) -> None:
        """BUILD gives an object its attributes, which nothing here needs."""
        self.pop()
        if not isinstance(self.top(), PickleDict | StridedTensor | Opaque):
            raise PickleError("refuses to set attributes (a checkpoint must not run __setstate__)")


def decode(text: bytes | memoryview) -> str:
    """UTF-8, with the lone surrogates that picklers let through."""
    try:
        return str(text, "utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise PickleError("text is not UTF-8") from None
