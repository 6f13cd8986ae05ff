"""Results of calls, which may be computed in another process and come when they are there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jinfer.xla import trees

type Values = Future[Any]


@dataclass(eq=False)
class Results:
    """What calls give and others wait for, by the call's number and the result's name.

    Calls have numbers of their own through all models of a job: a result may be there before this
    process has heard of the model. It is forgotten once it is there: whoever waits has it.
    """

    _waiting: dict[tuple[int, str], Values] = field(default_factory=dict)
    _early: dict[tuple[int, str], Values] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def expect(self, call: int, name: str) -> Values:
        """A result that will come, or has come already; to be asked for once."""
        with self._lock:
            found = self._early.pop((call, name), None)
            if found is None:
                found = self._waiting[call, name] = Future()
            return found

    def put(self, call: int, name: str, value: Any) -> None:
        """A result is there."""
        with self._lock:
            found = self._waiting.pop((call, name), None)
            if found is None:
                found = self._early[call, name] = Future()
        found.set_result(value)


class Whole:
    """A result with several arrays, of which each is a `Later`."""

    def __init__(self, coming: Values, failed: Callable[[BaseException], None]) -> None:
        """
        Args:
            failed: is told of an error of whoever computes it, which shows only here.
        """
        self._coming, self._failed = coming, failed

    def part(self, index: int) -> np.ndarray:
        """An array of it; waits until it is there."""
        try:
            return np.asarray(trees.leaves(self._coming.result())[index])
        except RuntimeError as error:  # of which XLA's is a kind
            self._failed(error)
            raise


class Later:
    """An array that may be computed elsewhere: NumPy's functions take it, and wait."""

    def __init__(self, whole: Whole, index: int) -> None:
        self._whole, self._index = whole, index

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = self._whole.part(self._index)
        return found if dtype is None else found.astype(dtype)

    def __int__(self) -> int:
        return int(np.asarray(self))


def later(coming: Values, like: Any, failed: Callable[[BaseException], None]) -> Any:
    """The arrays of a result that comes, in the form of another tree; `failed` as of `Whole`."""
    leaves, tree = trees.flatten(like)
    whole = Whole(coming, failed)
    return trees.unflatten(tree, [Later(whole, index) for index in range(len(leaves))])
