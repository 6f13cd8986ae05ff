"""What gets in the way of a start, and of what ends one: searches for garbage, lost signals."""

from __future__ import annotations

import _thread
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def paused() -> Iterator[None]:
    """No search meanwhile: at the start of SmolLM2-135M it takes a tenth of the time."""
    searches = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searches:
            gc.enable()


@contextmanager
def heard() -> Iterator[None]:
    """Ctrl-C ends what is inside, even where somebody there catches or changes all exceptions.

    Raises:
        KeyboardInterrupt: at the end at the latest.
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
def held() -> Iterator[None]:
    """Ctrl-C waits until what is inside has ended.

    In Python that C++ calls while it sets itself up, an exception would abort the process.
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
