"""Steering vectors of a loaded model, kept by name."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jinfer.engine.requests import RequestError
from jinfer.modelspec.spec_errors import nearest_hint, show_value
from jinfer.sampling.activation_edits import Range, Steer

MAX_NAMES = 1024


@dataclass
class SteeringVectors:
    """Named steering vectors, in the host's memory.

    Attributes:
        most: bytes that they may have together.
        kept: name -> the vectors, one for each activation.
    """

    most: int = 1 << 30
    kept: dict[str, tuple[Steer, ...]] = field(default_factory=dict)
    _changing: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, name: object, vectors: Sequence[Steer]) -> None:
        """Keeps vectors under a name, in place of those it had.

        Raises:
            RequestError: the name is no short text, or there is no room.
        """
        if not isinstance(name, str) or not name or len(name) > 200 or not name.isprintable():
            raise RequestError(f"a steering vector's name is {show_value(name)}; give a short text")
        if not vectors:
            raise RequestError(f"steering {name!r} has no vectors; give one")
        with self._changing:
            others = {n: v for n, v in self.kept.items() if n != name}
            size = sum(each.vector.nbytes for v in (*others.values(), vectors) for each in v)
            if size > self.most or len(others) >= MAX_NAMES:
                raise RequestError(
                    f"there is no room for {name!r}: steering vectors may have {self.most} bytes "
                    f"and {MAX_NAMES} names; forget others"
                )
            self.kept = others | {name: tuple(vectors)}

    def forget(self, name: object) -> None:
        """Forgets vectors; requests that use them go on. Raises `RequestError`."""
        with self._changing:
            self.find(name)
            self.kept = {n: v for n, v in self.kept.items() if n != name}

    def find(
        self, name: object, scale: float = 1.0, tokens: Range | slice = "all"
    ) -> tuple[Steer, ...]:
        """The vectors of a name, `scale` times. Raises `RequestError` if there are none."""
        found: Any = self.kept.get(name) if isinstance(name, str) else None
        if found is None:
            known = nearest_hint(str(name), self.kept) if self.kept else "none is kept"
            raise RequestError(f"there is no steering vector {show_value(name)}; {known}")
        return tuple(replace(one, scale=one.scale * scale, tokens=tokens) for one in found)
