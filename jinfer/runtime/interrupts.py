"""Keyboard interrupts (SIGINT) during imports: neither lost nor raised where they would abort."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_raised() -> Iterator[None]:
    """Ctrl-C ends the block, even where code in it catches or replaces all exceptions.

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
        time.sleep(0.001)  # in which the main thread leaves the callback
        with ending:
            if not over:
                os.kill(os.getpid(), signal.SIGINT)

    def unraisable(what: sys.UnraisableHookArgs) -> None:
        # In a weak reference's callback, of which importing has many: once more, outside of it.
        if what.exc_type is KeyboardInterrupt:
            _thread.start_new_thread(again, ())
        else:
            shown(what)

    shown = sys.unraisablehook
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    sys.unraisablehook = unraisable
    signal.signal(signal.SIGINT, note)
    try:
        yield
    except Exception:  # what it may become on its way through C++
        if pressed:
            raise KeyboardInterrupt from None
        raise
    finally:
        try:
            with ending:
                over = True
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.unraisablehook = shown
    if pressed:
        raise KeyboardInterrupt


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Ctrl-C waits until the block has ended.

    An exception in Python code that C++ calls while it initializes would abort the process.
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
