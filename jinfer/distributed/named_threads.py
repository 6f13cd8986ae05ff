"""Named threads: one worker thread per name, each with a queue of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class NamedThreads:
    """Runs work in threads chosen by name, in order within each thread.

    Collectives between devices of several ranks run in launch order, which has to be the same on
    all ranks: a rank with two stages that have such collectives uses one thread for all stages.
    """

    def __init__(self, failed: Callable[[BaseException], None], *, together: bool) -> None:
        """
        Args:
            failed: called with an error of the work.
            together: whether one thread does everything except sending.
        """
        self._failed, self._together = failed, together
        self._pools: dict[str, ThreadPoolExecutor] = {}

    def add(self, name: str, work: Callable[[], None]) -> None:
        """Queues work for the thread of a name."""
        if self._together and not name.endswith("sending"):
            name = "stages"
        if name not in self._pools:
            self._pools[name] = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._pools[name].submit(self._done, work)

    def close(self) -> None:
        """Waits for all queued work, and ends the threads."""
        for pool in self._pools.values():
            pool.shutdown()
        self._pools = {}

    def _done(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._failed(error)
