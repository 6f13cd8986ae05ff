"""Weight pointers: custom calls read weights through a table of addresses, not as operands.

Each operand of an XLA program costs some host time per call, several instructions, and space in the
program. Layers' weights change neither address nor form, so a program takes one small table with
the address and size of each weight; the weights' formats are compiled into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax import Array, lax

if TYPE_CHECKING:
    from jaxtyping import UInt

type PointerTable = UInt[
    Array, "weights 4"
]  # address and size in bytes, each a uint64 in two words

_ALIGNED = 64  # bytes; JAX copies unaligned arrays


class WeightPointers(NamedTuple):
    """The table entries of some weights.

    Attributes:
        table: entries of these weights and others.
        rows: the entries of these weights, in order.
    """

    table: PointerTable
    rows: range

    def of(self, arrays: Sequence[Any]) -> dict[int, int]:
        """Returns the entry of each weight by its id(); the weights are the first arrays."""
        return {id(array): row for array, row in zip(arrays, self.rows, strict=False)}

    def sliced_table(self) -> PointerTable:
        """Returns a table with only these entries, so that equal layers are equal functions."""
        return lax.slice_in_dim(self.table, self.rows.start, self.rows.stop)


def merge_weight_pointers(parts: Sequence[WeightPointers]) -> WeightPointers | None:
    """Merges pointers that are adjacent in one table; None if there are none."""
    if not parts:
        return None
    first, *others = parts
    end = first.rows.stop
    for part in others:
        assert part.table is first.table
        assert part.rows.start == end
        end = part.rows.stop
    return WeightPointers(first.table, range(first.rows.start, end))


_WEIGHT_POINTERS: ContextVar[Mapping[str, WeightPointers] | None] = ContextVar(
    "weight_pointers", default=None
)


@contextmanager
def use_weight_pointers(table: PointerTable | None, layers: Mapping[str, slice]) -> Iterator[None]:
    """Lets code traced by this thread within the context read these layers' weights by pointer.

    Args:
        table: of the first layer's arrays, then the second's, ...; None: pass weights as operands.
        layers: name -> as many arrays as the slice is long.
    """
    end, found = 0, dict[str, WeightPointers]()
    for name, own in layers.items():
        begin, end = end, end + own.stop - own.start
        if table is not None:
            found[name] = WeightPointers(table, range(begin, end))
    token = _WEIGHT_POINTERS.set(found)
    try:
        yield
    finally:
        _WEIGHT_POINTERS.reset(token)


def weight_pointers_of(layer: str) -> WeightPointers | None:
    """Returns the pointers of a layer's weights; None: they are operands."""
    return (_WEIGHT_POINTERS.get() or {}).get(layer)


def abstract_table(weights: Sequence[Any]) -> jax.ShapeDtypeStruct:
    """Returns the shape and type of a pointer table."""
    return jax.ShapeDtypeStruct((len(weights), 4), np.uint32)


def table(weights: Sequence[Array]) -> PointerTable:
    """Builds the pointer table of weights in this process's memory, on one device.

    The table keeps the weights alive, and running programs keep their table alive.
    """
    addresses = [(array.unsafe_buffer_pointer(), array.nbytes) for array in weights]
    words = 4 * len(weights)
    buffer = np.empty(words + _ALIGNED // 4, np.uint32)
    begin = -buffer.ctypes.data % _ALIGNED // 4
    rows = buffer[begin : begin + words].reshape(-1, 4)
    rows[:] = np.array(addresses, np.uint64).reshape(-1, 2).view(np.uint32)
    (device,) = weights[0].devices()
    target_device = device if weights[0].committed else None
    return jax.device_put(np.asarray(_KeepAlive(rows, weights)), target_device)


def used_arrays(function: Callable[[Any], Any], arrays: Any) -> list[bool]:
    """Finds the arrays of a tree that a function uses (liveness analysis of its jaxpr)."""
    jaxpr = jax.make_jaxpr(function)(arrays).jaxpr
    return list(_used_arguments(jaxpr, (True,) * len(jaxpr.outvars), {}))


type _Bits = tuple[bool, ...]


def _used_arguments(
    jaxpr: Any, needed_outputs: _Bits, known: dict[tuple[int, _Bits], _Bits]
) -> _Bits:
    """Finds the arguments of a jaxpr that the needed results depend on.

    Args:
        known: memo of inner jaxprs, by id.
    """
    key = id(jaxpr), needed_outputs
    if key not in known:
        needed = set(_selected(jaxpr.outvars, needed_outputs))
        for eqn in reversed(jaxpr.eqns):
            if needed.isdisjoint(eqn.outvars) and not eqn.effects:
                continue
            own: _Bits = (True,) * len(eqn.invars)
            if eqn.primitive.name in ("jit", "pjit") and not eqn.effects:
                out = tuple(var in needed for var in eqn.outvars)
                own = _used_arguments(eqn.params["jaxpr"].jaxpr, out, known)
            needed |= _selected(eqn.invars, own)
        known[key] = tuple(var in needed for var in jaxpr.invars)
    return known[key]


def _selected(atoms: Sequence[Any], which: _Bits) -> set[Any]:
    # Imported lazily: it imports Pallas, which a start with compiled programs does not need.
    from jax.extend.core import Literal

    pairs = zip(atoms, which, strict=True)
    return {atom for atom, is_one in pairs if is_one and not isinstance(atom, Literal)}


class _KeepAlive:
    """An array interface that keeps weights alive; JAX makes no copy and keeps this object."""

    def __init__(self, numbers: np.ndarray, what: Any) -> None:
        self.numbers, self.what = numbers, what

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.numbers.__array_interface__
