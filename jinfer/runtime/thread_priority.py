"""Thread priority: work that leaves the processors to threads that compute answers.

Only a privileged process may raise a priority again, and threads have that of the thread that
starts them. So threads that stay are started by one that was there before.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_NICE = 7  # a sixth of a processor for which another thread contends
_lock = threading.Lock()
_starter: ThreadPoolExecutor | None = None


def lower_priority() -> None:
    """Lowers the priority of the calling thread, for good, and of threads that it will start.

    Only Linux has priorities of threads; elsewhere nothing happens.
    """
    global _starter
    if sys.platform != "linux":
        return
    with _lock:
        if _starter is None:
            _starter = ThreadPoolExecutor(1, thread_name_prefix="starter")
            _starter.submit(int).result()  # its thread is there
    os.nice(_NICE)


def at_usual_priority[T](work: Callable[[], T]) -> T:
    """Does some work, such as to start a thread, with the priority that the process began with."""
    return work() if _starter is None else _starter.submit(work).result()
