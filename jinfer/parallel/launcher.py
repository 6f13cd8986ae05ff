"""From which thread programs are launched.

XLA:CPU runs what one thread launches strictly one after the other, on whichever devices it is. So
each stage, and what each lane does at home, is launched from a thread of its own there; elsewhere
every device has its own order, and nothing is gained.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Launcher:
    """Launches programs, each in the thread of its name, and waits until they are launched.

    Attributes:
        threaded: whether there are threads.
    """

    def __init__(self, threaded: bool) -> None:
        self.threaded = threaded
        self._pools: dict[str, ThreadPoolExecutor] = {}

    def __call__(self, name: str, program: Callable[..., Any], *given: Any) -> Any:
        """What the program gives, which need not be computed yet."""
        if not self.threaded:
            return program(*given)
        if name not in self._pools:
            self._pools[name] = ThreadPoolExecutor(1, thread_name_prefix=name)
        return self._pools[name].submit(program, *given).result()

    def close(self) -> None:
        """Ends the threads; new ones are started where another program is launched."""
        for pool in self._pools.values():
            pool.shutdown(wait=False)
        self._pools = {}
