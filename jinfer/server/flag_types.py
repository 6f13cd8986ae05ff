"""Flag types: what a flag of `jinfer serve` is, and how its value is read."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PREFIX = "JINFER_"


@dataclass(frozen=True)
class ServeFlag:
    """A command-line flag.

    Attributes:
        names: as on the command line; the environment variable is named after the first long one.
        help: one line.
        kind: converts a text; bool: a switch; list: may be repeated.
        default: the value if it is not given.
        choices: the allowed values.
    """

    names: tuple[str, ...]
    help: str
    kind: Any = str
    default: Any = None
    choices: tuple[str, ...] | None = None

    @property
    def key(self) -> str:
        """Its key among the parsed options."""
        long = next(name for name in self.names if name.startswith("--"))
        return long.removeprefix("--").replace("-", "_")

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return PREFIX + self.key.upper()


def seconds(text: str) -> float | None:
    """Seconds, from 0 on; None for 0. Raises `ArgumentTypeError`."""
    value = _number(float, text, "a number of seconds")
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 on")
    return value or None


def count(text: str, least: int = 1) -> int:
    """A whole number, from `least` on. Raises `ArgumentTypeError`."""
    value = _number(int, text, "a whole number")
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is below {least}")
    return value


def size(text: str) -> int:
    """A whole number, from 0 on. Raises `ArgumentTypeError`."""
    return count(text, least=0)


def gib(text: str) -> float:
    """A number of GiB, from 0 on. Raises `ArgumentTypeError`."""
    value = _number(float, text, "a number of GiB")
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 on")
    return value


def port(text: str) -> int:
    """A port's number. Raises `ArgumentTypeError`."""
    value = _number(int, text, "a whole number")
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 65535")
    return value


def _number[T](kind: Callable[[str], T], text: str, what: str) -> T:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
