"""Threads that give way to others."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from jinfer.startup import thread_priority
from jinfer.startup.thread_priority import at_usual_priority, lower_priority

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities")


def nice() -> int:
    """Of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_permanent_threads_have_normal_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_priority, "_starter", None)
    usual, found = nice(), list[int]()

    def started() -> int:
        thread = threading.Thread(target=lambda: found.append(nice()))
        thread.start()
        thread.join()
        return found.pop()

    assert at_usual_priority(started) == usual
    with ThreadPoolExecutor(1, initializer=lower_priority) as pool:
        lower = pool.submit(nice).result()
        assert lower == min(usual + 7, 19)
        assert pool.submit(started).result() == lower
        assert pool.submit(at_usual_priority, started).result() == usual
        with pytest.raises(ZeroDivisionError):
            pool.submit(at_usual_priority, lambda: 1 // 0).result()
    assert nice() == usual
    assert thread_priority._starter is not None
    thread_priority._starter.shutdown()
