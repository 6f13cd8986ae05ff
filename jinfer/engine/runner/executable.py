"""Executables: compiled XLA programs, called on the first device without JAX's dispatch.

JAX checks every argument of every call and asks each array for its sharding. A decoding step passes
hundreds of arrays that are the same each time, so they are checked in the first call alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
from jaxlib import _jax

_ARRAY = _jax.ArrayImpl


def device_list() -> Any:
    """The first device alone, as XLA's client takes lists of devices."""
    return _jax.DeviceList((jax.local_devices()[0],))


@cache
def _sharding() -> jax.sharding.Sharding:
    """Whole arrays on the first device."""
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _put_as(aval: Any) -> Callable[[Any], Any]:
    """A function that copies NumPy arrays and scalars of one shape and type to the device."""
    sharding, devices = _sharding(), [jax.local_devices()[0]]
    kind = _jax.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL
    put = _jax.batched_device_put
    return lambda value: put(aval, sharding, [value], devices, False, False, kind)


class Executable:
    """A loaded XLA executable, called with the arguments of the function it was compiled from.

    Arguments are JAX arrays or NumPy arrays; results are JAX arrays.

    Attributes:
        read: if the first argument is a tuple of arrays, the indices of those that are used;
            None: it is no such tuple.
    """

    def __init__(
        self,
        executable: Any,
        arguments: Sequence[Any],
        kept: Sequence[int],
        read: Sequence[int] | None,
        results: Any,
    ) -> None:
        """Wraps an executable of XLA's client.

        Args:
            arguments: the function's, as avals; of the first only what is read.
            kept: indices of their leaves that the executable takes.
            results: avals.
        """
        self.read = None if read is None else tuple(read)
        self._executable, self._kept = executable, list(kept)
        self._arguments = jax.tree.leaves(tuple(arguments))
        self._takes_all = self._kept == list(range(len(self._arguments)))
        self._put = [_put_as(self._arguments[i]) for i in self._kept]
        self._results: Any = jax.tree.structure(results)
        self._handlers = [
            _jax.array_result_handler(one, _sharding(), False) for one in jax.tree.leaves(results)
        ]
        self._checked = False

    def __call__(self, *arguments: Any) -> Any:
        """Runs the executable; donated arguments are deleted."""
        if self.read is None:
            leaves = jax.tree.leaves(arguments)
        else:
            first, *rest = arguments
            leaves = [first[i] for i in self.read]
            leaves += jax.tree.leaves(rest)
        if not self._checked:
            self._check(leaves)
        if not self._takes_all:
            leaves = [leaves[i] for i in self._kept]
        pairs = zip(leaves, self._put, strict=True)
        arrays = [leaf if type(leaf) is _ARRAY else put(leaf) for leaf, put in pairs]
        results = self._executable.execute_sharded(arrays)
        return self._results.unflatten(results.consume_with_handlers(self._handlers))

    def _check(self, leaves: Sequence[Any]) -> None:
        """Raises `TypeError` if shapes or types are not the function's. Once: calls are alike."""
        actual, expected = (
            [(one.shape, one.dtype) for one in each] for each in (leaves, self._arguments)
        )
        if actual != expected:
            pairs = enumerate(zip(actual, expected, strict=False))
            differing = [f"{i}: {one}, not {due}" for i, (one, due) in pairs if one != due]
            counts = f"{len(actual)} arrays for {len(expected)}"
            raise TypeError(f"a program was given {'; '.join(differing) or counts}")
        self._checked = True

    def as_text(self) -> str:
        """The optimized HLO."""
        return "\n\n".join(module.to_string() for module in self._executable.hlo_modules())

    def memory_analysis(self) -> Any:
        """XLA's figures of the memory it takes."""
        return self._executable.get_compiled_memory_stats()
