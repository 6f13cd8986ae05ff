"""Pickle machine: an interpreter of pickles that cannot execute code.

Every opcode takes at least a byte and makes at most one small object; values are shared and never
copied, so that time and memory are bounded by the pickle's length, and that by
`MAX_PICKLE_BYTES`.

Source: the opcode descriptions in CPython's Lib/pickletools.py, protocols 0 to 5. The list of
opcodes is closed: the opcodes that a binary protocol of torch.save writes. Protocol 0's text, which
cannot contain storages, extension codes, instances, sets and out-of-band buffers are refused by
name.
"""

from __future__ import annotations

import pickletools
import struct
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
    find_global,
)

MAX_PICKLE_BYTES = 32 << 20
_MAX_LINE = 1024  # bytes of a name


class Machine:
    """The state of the interpreter: bytes, stack, marks and memo.

    Attributes:
        position: of the next opcode.

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
            data: the pickle and the bytes after it.
            load_persistent: returns the value of a persistent id; raises `PickleError`.
            file_bytes: size of the file, which bounds the number of steps.
            base: offset of `data` in the file; None if it is compressed in the file.
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
        """Return the error for a defect at byte `at` of `data`."""
        if self._base is None:
            return CheckpointError(self._path, f"byte {at} of its compressed data.pkl: {reason}")
        return CheckpointError(self._path, reason, self._base + at)

    def reset(self) -> None:
        """Forget stack and memo: the next pickle over the same bytes starts afresh."""
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
        """Put the top of the stack into the memo."""
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


_MAX_LONG = 255  # bytes of an integer; torch's largest, its magic number, has 10
_MAX_DIGITS = 19  # of 64 bits

# Some 55,000 tensors, and a few seconds. A tensor takes 35 steps and hundreds of bytes of the file,
# so a small file needs fewer; each step makes an object of 200 bytes at most.
_MAX_STEPS = 2_000_000
_FREE_STEPS, _BYTES_PER_STEP = 100_000, 4

_Action = Callable[[Machine], object]
_STOP = ord(".")
_NAMES = {op.code: op.name for op in pickletools.opcodes}


def run(machine: Machine) -> Any:
    """Run the pickle at the machine's position and return its object.

    Afterwards the machine is behind the pickle's STOP.

    Raises:
        CheckpointError: an opcode or global that is not allowed, or a malformed pickle.
    """
    machine.reset()
    at = machine.position
    max_steps = min(_MAX_STEPS, _FREE_STEPS + machine.file_bytes // _BYTES_PER_STEP)
    try:
        for _ in range(max_steps):
            at = machine.position
            opcode = machine.byte()
            if opcode == _STOP:
                return machine.pop()
            action = _ACTIONS.get(opcode)
            if action is None:
                name = _NAMES.get(chr(opcode), f"0x{opcode:02x}")
                raise PickleError(f"opcode {name} is not allowed in a checkpoint")
            action(machine)
        raise PickleError(f"pickle takes more than {max_steps} steps; save it in several shards")
    except IndexError:
        raise machine.fail("damaged pickle: takes a value where there is none", at) from None
    except PickleError as error:
        raise machine.fail(str(error), at) from None


def _python2_text(machine: Machine, length: int) -> str:
    raw = bytes(machine.take(length))
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _skip(machine: Machine, length: int) -> Opaque:
    machine.take(length)
    return Opaque("bytes")


def _check_protocol(machine: Machine) -> None:
    if (protocol := machine.byte()) > 5:
        raise PickleError(f"pickle protocol {protocol}: only 0 to 5 are known")


def _check_frame(machine: Machine) -> None:
    length = machine.number(8)
    machine.take(length)
    machine.position -= length


def _int_line(machine: Machine) -> int:
    """Python 2 writes integers above 32 bits as text, in the binary protocols too."""
    text = machine.line()
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS):
        raise PickleError(f"{text[:40]!r} is not an integer of at most {_MAX_DIGITS} digits")
    return int(text)


def _long(machine: Machine, length: int) -> int:
    if length > _MAX_LONG:
        raise PickleError(f"an integer of {length} bytes; at most {_MAX_LONG} are read")
    return int.from_bytes(machine.take(length), "little", signed=True)


def _tuple(machine: Machine, count: int) -> tuple[Any, ...]:
    values = [machine.pop() for _ in range(count)]
    return tuple(reversed(values))


def _global_line(machine: Machine) -> Global:
    return find_global(machine.line(), machine.line())


def _refuse_instance(machine: Machine) -> None:
    find_global(machine.line(), machine.line())
    raise PickleError("opcode INST is not allowed in a checkpoint")


def _stack_global(machine: Machine) -> Global:
    name, module = machine.pop(), machine.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise PickleError("refuses a global whose name is not text")
    return find_global(module, name)


def _set_item(machine: Machine) -> None:
    value, key = machine.pop(), machine.pop()
    machine.set_items([key, value])


def _pusher(make: Callable[[Machine], Any]) -> _Action:
    return lambda machine: machine.push(make(machine))


# opcodes that push the value they describe; letters and numbers as in pickletools
_VALUES: dict[int, Callable[[Machine], Any]] = {
    ord("N"): lambda m: None,
    0x88: lambda m: True,
    0x89: lambda m: False,
    ord("I"): _int_line,
    ord("J"): lambda m: int.from_bytes(m.take(4), "little", signed=True),
    ord("K"): lambda m: m.byte(),
    ord("M"): lambda m: m.number(2),
    0x8A: lambda m: _long(m, m.byte()),
    0x8B: lambda m: _long(m, m.number(4)),
    ord("G"): lambda m: struct.unpack(">d", m.take(8))[0],
    ord("T"): lambda m: _python2_text(m, m.number(4)),
    ord("U"): lambda m: _python2_text(m, m.byte()),
    ord("X"): lambda m: decode(m.take(m.number(4))),
    0x8C: lambda m: decode(m.take(m.byte())),
    0x8D: lambda m: decode(m.take(m.number(8))),
    ord("B"): lambda m: _skip(m, m.number(4)),
    ord("C"): lambda m: _skip(m, m.byte()),
    0x8E: lambda m: _skip(m, m.number(8)),
    0x96: lambda m: _skip(m, m.number(8)),
    ord("]"): lambda m: [],
    ord("}"): lambda m: PickleDict([]),
    ord(")"): lambda m: (),
    0x85: lambda m: _tuple(m, 1),
    0x86: lambda m: _tuple(m, 2),
    0x87: lambda m: _tuple(m, 3),
    ord("t"): lambda m: tuple(m.pop_mark()),
    ord("c"): _global_line,
    0x93: _stack_global,
}
_ACTIONS: dict[int, _Action] = {
    **{opcode: _pusher(make) for opcode, make in _VALUES.items()},
    0x80: _check_protocol,
    0x95: _check_frame,
    ord("("): Machine.mark,
    ord("0"): Machine.pop,
    ord("1"): Machine.pop_mark,
    ord("h"): lambda m: m.recall(m.byte()),
    ord("j"): lambda m: m.recall(m.number(4)),
    ord("q"): lambda m: m.remember(m.byte()),
    ord("r"): lambda m: m.remember(m.number(4)),
    0x94: Machine.remember_next,
    ord("a"): lambda m: m.append([m.pop()]),
    ord("e"): lambda m: m.append(m.pop_mark()),
    ord("s"): _set_item,
    ord("u"): lambda m: m.set_items(m.pop_mark()),
    ord("R"): Machine.call,
    0x81: Machine.call,
    ord("b"): Machine.build,
    ord("Q"): Machine.persistent,
    ord("i"): _refuse_instance,
}
