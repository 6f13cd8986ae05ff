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


class RemoteResult:
    """The future of a result with several arrays, each of which is a `RemoteArray`."""

    def __init__(self, coming: ResultFuture, failed: Callable[[BaseException], None]) -> None:
        """
        Args:
            failed: called with an error of the computation, which shows only when waiting for it.
        """
        self._coming, self._failed = coming, failed

    def part(self, index: int) -> np.ndarray:
        """One of the arrays; waits for it."""
        try:
            return np.asarray(jax.tree.leaves(self._coming.result())[index])
        except RuntimeError as error:  # XLA's error is a subclass
            self._failed(error)
            raise


class RemoteArray:
    """An array that may still be computed, or be on another rank; conversion to NumPy waits."""

    def __init__(self, whole: RemoteResult, index: int) -> None:
        self._whole, self._index = whole, index

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self._whole.part(self._index)
        return array if dtype is None else array.astype(dtype)

    def __int__(self) -> int:
        return int(np.asarray(self))


def remote_arrays(coming: ResultFuture, like: Any, failed: Callable[[BaseException], None]) -> Any:
    """The arrays of a future result, in the structure of `like`; `failed` as of `RemoteResult`."""
    leaves, tree = jax.tree.flatten(like)
    whole = RemoteResult(coming, failed)
    return jax.tree.unflatten(tree, [RemoteArray(whole, index) for index in range(len(leaves))])
