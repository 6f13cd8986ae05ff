"""Weights that custom calls are told the addresses of, instead of being given them.

A program of XLA's costs some microseconds of Python's thread for each array that it is given, has
several instructions for it, and hands it to each call that reads it: a few percent of a small
model's decoding step, and a sixth of its program. A layer's weights change neither their place nor
their form, so it is given one small table of where they are; what they are is written down in the
program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.extend.core import Literal
from jaxtyping import UInt

type Table = UInt[Array, "weights 4"]  # of each its address and its bytes, uint64 in two words

_ALIGNED = 64  # bytes, or JAX copies what it is given
_TABLES: ContextVar[Mapping[str, Table] | None] = ContextVar("tables", default=None)


@contextmanager
def told(tables: Mapping[str, Table]) -> Iterator[None]:
    """What is traced meanwhile, by this thread, may read these layers' weights by their addresses.

    Args:
        tables: by the name of each layer, with a row for each of its arrays, in their order.
    """
    token = _TABLES.set(tables)
    try:
        yield
    finally:
        _TABLES.reset(token)


def table_of(layer: str) -> Table | None:
    """Where a layer's weights are; None: it is given them."""
    return (_TABLES.get() or {}).get(layer)


def like(weights: Sequence[Any]) -> jax.ShapeDtypeStruct:
    """The abstract table of some weights."""
    return jax.ShapeDtypeStruct((len(weights), 4), np.uint32)


def table(weights: Sequence[Array]) -> Table:
    """Where weights are that are in this process's memory, on one device.

    They live as long as the table does, which lives as long as programs run that were given it.
    """
    places = [(one.unsafe_buffer_pointer(), one.nbytes) for one in weights]
    words = 4 * len(weights)
    room = np.empty(words + _ALIGNED // 4, np.uint32)
    begin = -room.ctypes.data % _ALIGNED // 4
    rows = room[begin : begin + words].reshape(-1, 4)
    rows[:] = np.array(places, np.uint64).reshape(-1, 2).view(np.uint32)
    (device,) = weights[0].devices()
    held = np.asarray(_Held(rows, weights))
    return jax.device_put(held, device if weights[0].committed else None)


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
    pairs = zip(atoms, which, strict=True)
    return {atom for atom, is_one in pairs if is_one and not isinstance(atom, Literal)}


class _Held:
    """Numbers that keep something else alive; JAX does not copy them, and so keeps this alive."""

    def __init__(self, numbers: np.ndarray, what: Any) -> None:
        self.numbers, self.what = numbers, what

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.numbers.__array_interface__
