"""Pools of threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def start_threads(pool: ThreadPoolExecutor, count: int) -> None:
    """Has a new pool start so many threads now, and waits until they run.

    Raises:
        RuntimeError: the system has no room for one; the others do not wait for it.
    """
    barrier = threading.Barrier(count + 1)
    try:
        for _ in range(count):
            pool.submit(barrier.wait)
        barrier.wait()
    except RuntimeError:
        barrier.abort()
        raise
