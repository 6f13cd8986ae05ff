"""XLA's arrays before JAX is imported, which knows them as its own afterwards.

JAX gives XLA's class of arrays most of its methods. Until it does, arrays here know their shapes
and types, give their numbers to NumPy, and import JAX for all else.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib import _jax

from jinfer.xla.later import import_jax, is_postponed

# What Python looks for in the class: `__add__` and `__radd__`; `__eq__`.
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or")
_OTHERS = ("eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "invert", "lshift", "rshift", "xor")
_CONTAINED = ("getitem", "iter", "len", "bool", "int", "float", "index")


class _Aval:
    """What JAX's `ShapedArray` says, as far as XLA's arrays ask."""

    __slots__ = ("dtype", "shape", "weak_type")

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], weak_type: bool) -> None:
        self.shape, self.dtype, self.weak_type = shape, dtype, weak_type


def aval(shape: Sequence[int], dtype: Any, weak_type: bool = False) -> Any:
    """What an array says of itself, as arrays are made with it."""
    if is_postponed():
        return _Aval(tuple(shape), np.dtype(dtype), weak_type)
    import jax

    return jax.core.ShapedArray(tuple(shape), np.dtype(dtype), weak_type=weak_type)


def complete() -> None:
    """Gives arrays what they have before JAX is imported, which puts its own in its place."""
    of: Any = _jax.ArrayImpl
    of.shape = property(lambda self: self.aval.shape)
    of.dtype = property(lambda self: self.aval.dtype)
    of.ndim = property(lambda self: len(self.aval.shape))
    of.size = property(lambda self: math.prod(self.aval.shape))
    of.nbytes = property(lambda self: self.size * self.dtype.itemsize)
    of.__array__ = _numbers
    of.__getattr__ = _by_jax
    operators = (f"{side}{name}" for name in _OPERATORS for side in ("", "r"))
    for name in (*operators, *_OTHERS, *_CONTAINED):
        setattr(of, f"__{name}__", _method_of_jax(f"__{name}__"))


def hand_over() -> None:
    """Makes arrays say of themselves what JAX, imported a moment ago, wants to hear."""
    import jax

    inside, shaped = _jax.ArrayImpl.__dict__["aval"], jax.core.ShapedArray

    def told(array: Any) -> Any:
        found = inside.__get__(array)
        if type(found) is not _Aval:
            return found
        return shaped(found.shape, found.dtype, weak_type=found.weak_type)

    _jax.ArrayImpl.aval = property(told)


def address(array: Any) -> int:
    """Where an array on a CPU is in memory."""
    if not is_postponed():
        return int(array.unsafe_buffer_pointer())
    # That would ask JAX for something. The first word of what others are handed is the address.
    handed = _jax.buffer_to_dlpack_managed_tensor(array)
    inside = ctypes.pythonapi.PyCapsule_GetPointer
    inside.restype, inside.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return ctypes.c_void_p.from_address(inside(handed, b"dltensor")).value or 0


def _numbers(self: Any, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    """An array's numbers, as NumPy asks for them; not to be written to."""
    self.block_until_ready()
    try:
        found = np.frombuffer(memoryview(self), self.dtype).reshape(self.shape)
    except (BufferError, ValueError, TypeError):  # of a type that Python's buffers do not know
        return _method_of_jax("__array__")(self, dtype, copy)
    return np.array(found, dtype) if copy else np.asarray(found, dtype)


def _method_of_jax(name: str) -> Callable[..., Any]:
    """A method that Python looks for in the class, from JAX."""

    def method(self: Any, *given: Any) -> Any:
        import_jax()
        return getattr(self, name)(*given)

    return method


def _by_jax(self: Any, name: str) -> Any:
    """What arrays have besides, from JAX."""
    if name.startswith("__") or not is_postponed():
        raise AttributeError(f"'ArrayImpl' object has no attribute {name!r}")
    import_jax()
    return getattr(self, name)
