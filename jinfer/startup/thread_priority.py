"""Thread priority: background work yields the processors to threads that compute answers.

Only a privileged process may raise a priority again, and a thread inherits the priority of the
thread that starts it. So a helper thread of normal priority starts the permanent threads.
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
    """Lower the priority of the calling thread permanently, and of threads that it will start.

    Only Linux has thread priorities; elsewhere nothing happens.
    """
    global _starter
    if sys.platform != "linux":
        return
    with _lock:
        if _starter is None:
            _starter = ThreadPoolExecutor(1, thread_name_prefix="starter")
            _starter.submit(int).result()  # starts the thread now
    os.nice(_NICE)


def at_usual_priority[T](work: Callable[[], T]) -> T:
    """Run a function, such as one that starts a thread, at the process's original priority."""
    return work() if _starter is None else _starter.submit(work).result()
