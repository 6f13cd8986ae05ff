"""A program of XLA's, ready to run on the first device, called as the function that it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxlib import _jax

from jinfer.xla import trees
from jinfer.xla.device import put_like, sharding

_ARRAY = _jax.ArrayImpl


class Program:
    """Given what the function takes, as JAX's arrays or NumPy's; gives JAX's.

    Attributes:
        read: where the first argument is a tuple of arrays of which few are read: their places.
    """

    def __init__(
        self,
        executable: Any,
        arguments: Sequence[Any],
        kept: Sequence[int],
        read: Sequence[int] | None,
        results: Any,
    ) -> None:
        """Of XLA's executable.

        Args:
            arguments: of the function, avals; of the first no more than is read.
            kept: of their leaves, those that the executable is given.
            results: avals.
        """
        self.read = None if read is None else tuple(read)
        self._executable, self._kept = executable, list(kept)
        self._arguments = trees.leaves(tuple(arguments))
        self._every = self._kept == list(range(len(self._arguments)))
        self._put = [put_like(self._arguments[i]) for i in self._kept]
        avals, self._results = trees.flatten(results)
        self._handlers = [_jax.array_result_handler(one, sharding(), False) for one in avals]
        self._checked = False

    def __call__(self, *given: Any) -> Any:
        """As the function is called; what it is given to keep is gone afterwards."""
        if self.read is None:
            leaves = trees.leaves(given)
        else:
            first, *rest = given
            leaves = [first[i] for i in self.read]
            leaves += trees.leaves(rest)
        if not self._checked:
            self._check(leaves)
        if not self._every:
            leaves = [leaves[i] for i in self._kept]
        each = zip(leaves, self._put, strict=True)
        arrays = [one if type(one) is _ARRAY else put(one) for one, put in each]
        results = self._executable.execute_sharded(arrays)
        return self._results.unflatten(results.consume_with_handlers(self._handlers))

    def _check(self, leaves: Sequence[Any]) -> None:
        """Raises `TypeError` where a call is not the function's. Once: calls are alike."""
        found, expected = (
            [(one.shape, one.dtype) for one in each] for each in (leaves, self._arguments)
        )
        if found != expected:
            pairs = enumerate(zip(found, expected, strict=False))
            differing = [f"{i}: {own}, not {due}" for i, (own, due) in pairs if own != due]
            counts = f"{len(found)} arrays for {len(expected)}"
            raise TypeError(f"a program was given {'; '.join(differing) or counts}")
        self._checked = True

    def as_text(self) -> str:
        """What XLA made of it."""
        return "\n\n".join(module.to_string() for module in self._executable.hlo_modules())

    def memory_analysis(self) -> Any:
        """What XLA says of the memory that it takes."""
        return self._executable.get_compiled_memory_stats()
