"""Weights that custom calls are told the addresses of, instead of being given them.

A program of XLA's costs some microseconds of Python's thread for each array that it is given, has
several instructions for it, and hands it to each call that reads it: a few percent of a small
model's decoding step, and a sixth of its program. Layers' weights change neither their place nor
their form, so a program is given one small table of where they are; what they are is written down
in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax import Array, lax

from jinfer.xla.abstract import Abstract
from jinfer.xla.arrays import address
from jinfer.xla.device import put_beside

if TYPE_CHECKING:
    from jaxtyping import UInt

type Table = UInt[Array, "weights 4"]  # of each its address and its bytes, uint64 in two words

_ALIGNED = 64  # bytes, or JAX copies what it is given


class Told(NamedTuple):
    """Where some weights are.

    Attributes:
        table: of these and others.
        rows: one for each, in their order.
    """

    table: Table
    rows: range

    def of(self, arrays: Sequence[Any]) -> dict[int, int]:
        """By the id of each of the weights, which are the first of some arrays: its row."""
        return {id(one): row for one, row in zip(arrays, self.rows, strict=False)}

    def alone(self) -> Table:
        """The table without the others, as equal layers are to be equal functions."""
        return lax.slice_in_dim(self.table, self.rows.start, self.rows.stop)


def together(parts: Sequence[Told]) -> Told | None:
    """Where the weights of all of these are, which follow one another in a table; None: of none."""
    if not parts:
        return None
    first, *others = parts
    end = first.rows.stop
    for part in others:
        assert part.table is first.table
        assert part.rows.start == end
        end = part.rows.stop
    return Told(first.table, range(first.rows.start, end))


_TOLD: ContextVar[Mapping[str, Told] | None] = ContextVar("told", default=None)


@contextmanager
def told(table: Table | None, layers: Mapping[str, slice]) -> Iterator[None]:
    """What is traced meanwhile, by this thread, may read these layers' weights by their addresses.

    Args:
        table: of the arrays of the first layer, then of the second, ...; None: of none.
        layers: as many arrays as each slice has are the layer's of that name.
    """
    end, found = 0, dict[str, Told]()
    for name, own in layers.items():
        begin, end = end, end + own.stop - own.start
        if table is not None:
            found[name] = Told(table, range(begin, end))
    token = _TOLD.set(found)
    try:
        yield
    finally:
        _TOLD.reset(token)


def told_of(layer: str) -> Told | None:
    """Where a layer's weights are; None: it is given them."""
    return (_TOLD.get() or {}).get(layer)


def like(weights: Sequence[Any]) -> Abstract:
    """The abstract table of some weights."""
    return Abstract((len(weights), 4), np.uint32)


def table(weights: Sequence[Array]) -> Table:
    """Where weights are that are in this process's memory, on one device.

    They live as long as the table does, which lives as long as programs run that were given it.
    """
    places = [(address(one), one.nbytes) for one in weights]
    words = 4 * len(weights)
    room = np.empty(words + _ALIGNED // 4, np.uint32)
    begin = -room.ctypes.data % _ALIGNED // 4
    rows = room[begin : begin + words].reshape(-1, 4)
    rows[:] = np.array(places, np.uint64).reshape(-1, 2).view(np.uint32)
    return put_beside(np.asarray(_Held(rows, weights)), weights[0])


def read_by(function: Callable[[Any], Any], arrays: Any) -> list[bool]:
    """Which of a tree's arrays a function is really given: its calls are told where others are."""
    jaxpr = jax.make_jaxpr(function)(arrays).jaxpr
    return list(_read(jaxpr, (True,) * len(jaxpr.outvars), {}))


type _Bits = tuple[bool, ...]


def _read(jaxpr: Any, wanted: _Bits, known: dict[tuple[int, _Bits], _Bits]) -> _Bits:
    """Which arguments of a function those of its results depend on that are wanted.

    Args:
        known: the same of functions inside, by their ids.
    """
    key = id(jaxpr), wanted
    if key not in known:
        needed = set(_picked(jaxpr.outvars, wanted))
        for eqn in reversed(jaxpr.eqns):
            if needed.isdisjoint(eqn.outvars) and not eqn.effects:
                continue
            own: _Bits = (True,) * len(eqn.invars)
            if eqn.primitive.name in ("jit", "pjit") and not eqn.effects:
                out = tuple(var in needed for var in eqn.outvars)
                own = _read(eqn.params["jaxpr"].jaxpr, out, known)
            needed |= _picked(eqn.invars, own)
        known[key] = tuple(var in needed for var in jaxpr.invars)
    return known[key]


def _picked(atoms: Sequence[Any], which: _Bits) -> set[Any]:
    # Here: it brings Pallas along, which a start that finds its programs made has no use for.
    from jax.extend.core import Literal

    pairs = zip(atoms, which, strict=True)
    return {atom for atom, is_one in pairs if is_one and not isinstance(atom, Literal)}


class _Held:
    """Numbers that keep something else alive; JAX does not copy them, and so keeps this alive."""

    def __init__(self, numbers: np.ndarray, what: Any) -> None:
        self.numbers, self.what = numbers, what

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.numbers.__array_interface__
