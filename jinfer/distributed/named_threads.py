"""Threads that each do one thing after the other, by their names."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class Threads:
    """Does what is added, in the order of each thread's name.

    Devices of several processes exchange what they have in the order in which they are told to,
    which has to be the same in all: a process with two such stages has one thread for all.
    """

    def __init__(self, failed: Callable[[BaseException], None], *, together: bool) -> None:
        """
        Args:
            failed: is told what went wrong.
            together: whether one thread does all but the sending.
        """
        self._failed, self._together = failed, together
        self._pools: dict[str, ThreadPoolExecutor] = {}

    def add(self, name: str, work: Callable[[], None]) -> None:
        """Has something done, some time."""
        if self._together and not name.endswith("sending"):
            name = "stages"
        if name not in self._pools:
            self._pools[name] = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._pools[name].submit(self._done, work)

    def close(self) -> None:
        """Ends all threads; waits until they have nothing left to do."""
        for pool in self._pools.values():
            pool.shutdown()
        self._pools = {}

    def _done(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._failed(error)
