"""Futures: results of calls that may be computed on another rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

type ResultFuture = Future[Any]


@dataclass(eq=False)
class PendingResults:
    """Futures of calls' results, by the call's number and the result's name.

    Call numbers are unique in a job, across its models: a result may arrive before this rank
    knows of the model. An entry is dropped when both the result and its consumer have come.
    """

    _waiting: dict[tuple[int, str], ResultFuture] = field(default_factory=dict)
    _early: dict[tuple[int, str], ResultFuture] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def expect(self, call: int, name: str) -> ResultFuture:
        """The future of a result; to be called once for each."""
        with self._lock:
            future = self._early.pop((call, name), None)
            if future is None:
                future = self._waiting[call, name] = Future()
            return future

    def put(self, call: int, name: str, value: Any) -> None:
        """Sets a result."""
        with self._lock:
            future = self._waiting.pop((call, name), None)
            if future is None:
                future = self._early[call, name] = Future()
        future.set_result(value)


@dataclass(frozen=True, eq=False)
class RemoteArray:
    """An array that may still be computed, or be on another rank; conversion to NumPy waits.

    Attributes:
        coming: the result, a tree of arrays.
        index: of the array among its leaves.
        failed: called with an error of the computation, which shows only when waiting for it.
    """

    coming: ResultFuture
    index: int
    failed: Callable[[BaseException], None]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        try:
            array = np.asarray(jax.tree.leaves(self.coming.result())[self.index])
        except RuntimeError as error:  # XLA's error is a subclass
            self.failed(error)
            raise
        return array if dtype is None else array.astype(dtype)

    def __int__(self) -> int:
        return int(np.asarray(self))


def remote_arrays(coming: ResultFuture, like: Any, failed: Callable[[BaseException], None]) -> Any:
    """The arrays of a future result, in the structure of `like`; `failed` as of `RemoteArray`."""
    leaves, tree = jax.tree.flatten(like)
    arrays = [RemoteArray(coming, index, failed) for index in range(len(leaves))]
    return jax.tree.unflatten(tree, arrays)
