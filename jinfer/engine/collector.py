"""Python's search for garbage, which finds none while modules are imported and models are built."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jinfer.engine.jax_import import import_jax


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
def imported() -> Iterator[None]:
    """For a command's imports, after JAX: no search meanwhile, nor later of what came with them.

    The one that would follow at once takes long, and JAX has it call a function in which Ctrl-C is
    not heard.
    """
    with paused(), heard():
        import_jax()
        yield
        gc.freeze()


@contextmanager
def heard() -> Iterator[None]:
    """Ctrl-C ends what is inside, even where somebody there catches all exceptions.

    Raises:
        KeyboardInterrupt: at the end, if it did not come this far by itself.
    """
    pressed = False

    def note(*_: Any) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    def unraisable(what: sys.UnraisableHookArgs) -> None:
        # In a weak reference's callback, of which importing has many: noted, and raised at the end.
        if what.exc_type is not KeyboardInterrupt:
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
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = shown
    if pressed:
        raise KeyboardInterrupt
