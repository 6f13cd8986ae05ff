"""Pickle opcodes that a checkpoint may use, and the loop that runs them on a `Machine`.

Source: the opcode descriptions in CPython's Lib/pickletools.py, protocols 0 to 5. The list is
closed: what a binary protocol of torch.save writes. Protocol 0's text, which cannot hold storages,
extension codes, instances, sets and out-of-band buffers are refused by name.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from typing import Any

from jinfer.loader.checkpoint.pickle_machine import Machine, decode
from jinfer.loader.checkpoint.pickle_values import (
    Global,
    Opaque,
    PickleDict,
    PickleError,
    find_global,
)

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
    """The object that the pickle at the machine's position describes.

    The machine is left behind the pickle's STOP.

    Raises:
        CheckpointError: an opcode or global that is not allowed, or a malformed pickle.
    """
    machine.reset()
    at = machine.position
    most = min(_MAX_STEPS, _FREE_STEPS + machine.file_bytes // _BYTES_PER_STEP)
    try:
        for _ in range(most):
            at = machine.position
            opcode = machine.byte()
            if opcode == _STOP:
                return machine.pop()
            action = _ACTIONS.get(opcode)
            if action is None:
                name = _NAMES.get(chr(opcode), f"0x{opcode:02x}")
                raise PickleError(f"opcode {name} is not allowed in a checkpoint")
            action(machine)
        raise PickleError(f"pickle takes more than {most} steps; save it in several shards")
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
