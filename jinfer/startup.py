"""Start-up: imports without pauses of the garbage collector, and priorities of threads.

A keyboard interrupt (SIGINT) during the imports is neither lost nor raised where it would abort the
process.
"""

from __future__ import annotations

import _thread
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause cyclic garbage collection in a block that creates many permanent objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def gc_spared() -> Iterator[None]:
    """Pause collection as `gc_paused`, and exempt the imported objects from later collections.

    The first later collection would take as long as a tenth of the imports.
    """
    with gc_paused():
        yield
        gc.freeze()


@contextmanager
def importing() -> Iterator[None]:
    """Import JAX, then run the block's imports without collections; Ctrl-C interrupts them."""
    with gc_spared(), interrupts_raised():
        with interrupts_deferred():
            import jax  # noqa: F401
        yield


@contextmanager
def interrupts_raised() -> Iterator[None]:
    """End the block at Ctrl-C, even where its code catches or replaces all exceptions.

    Raises:
        KeyboardInterrupt: at the end of the block at the latest.
    """
    pressed = over = False
    ending = threading.Lock()

    def note(*_: Any) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    def again() -> None:
        time.sleep(0.001)  # lets the main thread leave the callback
        with ending:
            if not over:
                os.kill(os.getpid(), signal.SIGINT)

    def unraisable(args: sys.UnraisableHookArgs) -> None:
        # Imports run many callbacks of weak references, where an exception is lost: raise it again.
        if args.exc_type is KeyboardInterrupt:
            _thread.start_new_thread(again, ())
        else:
            previous_hook(args)

    previous_hook = sys.unraisablehook
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    sys.unraisablehook = unraisable
    signal.signal(signal.SIGINT, note)
    try:
        yield
    except Exception:  # C++ code may replace the KeyboardInterrupt by another exception
        if pressed:
            raise KeyboardInterrupt from None
        raise
    finally:
        try:
            with ending:
                over = True
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.unraisablehook = previous_hook
    if pressed:
        raise KeyboardInterrupt


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer Ctrl-C until the block ends.

    An exception in Python code that C++ calls during its initialization would abort the process.
    """
    pressed = False

    def note(*_: Any) -> None:
        nonlocal pressed
        pressed = True

    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            before(signal.SIGINT, None)


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
