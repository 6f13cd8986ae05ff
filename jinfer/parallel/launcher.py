"""Launcher: launches each pipeline stage's programs from a thread of its own, on CPUs.

XLA:CPU runs the programs that one thread launches one after the other, on any devices. So
on CPUs each stage, and each micro-batch's sampling, has its own launching thread, else stages
would not overlap. Other devices have queues of their own, and need no threads.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Launcher:
    """Launches programs, each in a thread chosen by name, and waits until they are launched.

    Attributes:
        threaded: whether to use threads; else the caller's thread launches.
    """

    def __init__(self, threaded: bool) -> None:
        self.threaded = threaded
        self._pools: dict[str, ThreadPoolExecutor] = {}

    def __call__(self, name: str, program: Callable[..., Any], *given: Any) -> Any:
        """Launches a program in the thread `name`; returns its result, possibly still pending."""
        if not self.threaded:
            return program(*given)
        if name not in self._pools:
            self._pools[name] = ThreadPoolExecutor(1, thread_name_prefix=name)
        return self._pools[name].submit(program, *given).result()

    def close(self) -> None:
        """Ends the threads; a later launch starts new ones."""
        for pool in self._pools.values():
            pool.shutdown(wait=False)
        self._pools = {}
