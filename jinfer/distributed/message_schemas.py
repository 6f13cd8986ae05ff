"""Message schemas: the messages between ranks, with the types of their fields.

The first of a message's keys in `_FIELDS` is its name. A message with other keys, or with values
of other types, is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from jinfer.distributed.wire_format import FrameError
from jinfer.engine.runner.step_key import StepKey

_ANYTHING = object
_FIELDS: Mapping[str, Mapping[str, type]] = {
    "result": {"result": str, "call": int, "value": _ANYTHING},
    "end": {"end": int, "reason": str},
    "beat": {"beat": int},
    "value": {"value": _ANYTHING},
    "announce": {"announce": StepKey},
    "reset": {"reset": str},
    "call": {"call": int, "shape": StepKey, "given": list, "drop": list},
    "release": {"release": bool},
}
_SHAPE = frozenset(one.name for one in fields(StepKey))
_LONGEST = 80  # characters of a received text that errors show


@dataclass(frozen=True)
class Hello:
    """The first message of a connection, by the process that made it.

    Attributes:
        process: its rank.
        processes: the size of the job, as it knows it.
        jinfer, jax: its versions.
        at: HOST:PORT at which it listens for higher ranks; "" where it does not matter.
    """

    process: int
    processes: int
    jinfer: str
    jax: str
    at: str = ""


@dataclass(frozen=True)
class Welcome:
    """Rank 0's answer, when all ranks have called.

    Attributes:
        service: HOST:PORT of the proxy to JAX's coordination service.
        before: HOST:PORT of lower ranks, by rank.
        refused: why the job does not start; "" where it does.
    """

    service: str = ""
    before: Mapping[str, str] = field(default_factory=dict)
    refused: str = ""


def read_hello(message: Any) -> Hello:
    """Parses a caller's first message. Raises `FrameError`."""
    types = {"process": int, "processes": int, "jinfer": str, "jax": str}
    _check(message, types, {"at": str})
    said = Hello(**message)
    if not 0 <= said.process < said.processes:
        raise FrameError(f"process {said.process} of {said.processes}")
    if said.at:
        parse_address(said.at)
    for version in (said.jinfer, said.jax):
        if not version.isprintable() or len(version) > _LONGEST:
            raise FrameError("a version that is none")
    return said


def read_welcome(message: Any) -> Welcome:
    """Parses rank 0's answer. Raises `FrameError`."""
    _check(message, {}, {"service": str, "before": dict, "refused": str})
    told = Welcome(**message)
    if told.refused:
        return told
    parse_address(told.service)
    for other, where in told.before.items():
        if not isinstance(other, str) or not other.isdecimal() or not isinstance(where, str):
            raise FrameError("a number of a process that is none")
        parse_address(where)
    return told


def message_kind(message: Any) -> str:
    """The name of a message, after a check of its fields. Raises `FrameError`."""
    if isinstance(message, dict):
        for name, types in _FIELDS.items():
            if name in message and message.keys() == types.keys():
                _check(message, types)
                return name
    raise FrameError(f"no message has {_shown(message)}")


def parse_address(where: str) -> tuple[str, int]:
    """Parses HOST:PORT. Raises `FrameError`."""
    host, _, port = where.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise FrameError(f"an address {where[:_LONGEST]!r}")
    return host.strip("[]"), int(port)


def format_address(host: str, port: int) -> str:
    """HOST:PORT."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check(message: Any, types: Mapping[str, type], more: Mapping[str, type] | None = None) -> None:
    """Checks a message's keys and their types; those of `more` are optional.

    Raises:
        FrameError: they differ.
    """
    known = {**types, **(more or {})}
    if not isinstance(message, dict) or not types.keys() <= message.keys() <= known.keys():
        raise FrameError(f"no message has {_shown(message)}")
    for name, value in message.items():
        wanted = known[name]
        if wanted is StepKey:
            if not isinstance(value, dict) or value.keys() != _SHAPE:
                raise FrameError(f"{name} is no shape of a program")
        elif wanted is not _ANYTHING and type(value) is not wanted:
            raise FrameError(f"{name} is a {type(value).__name__}, not a {wanted.__name__}")


def _shown(message: Any) -> str:
    if not isinstance(message, dict):
        return f"the form of a {type(message).__name__}"
    keys = ", ".join(map(str, message))[:_LONGEST]
    return f"the keys {keys!r}" if keys else "no keys"
