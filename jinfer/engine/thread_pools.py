"""Thread pools whose threads start at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def start_threads(pool: ThreadPoolExecutor, count: int) -> None:
    """Starts the threads of a new pool now, and waits until they run.

    Raises:
        RuntimeError: the system cannot start one; the others do not wait for it.
    """
    barrier = threading.Barrier(count + 1)
    try:
        for _ in range(count):
            pool.submit(barrier.wait)
        barrier.wait()
    except RuntimeError:
        barrier.abort()
        raise
