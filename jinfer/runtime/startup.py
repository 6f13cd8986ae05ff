"""Start-up of a command: JAX and the engine imported without pauses of the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from jinfer.runtime.interrupts import interrupts_deferred, interrupts_raised


@contextmanager
def gc_paused() -> Iterator[None]:
    """No cyclic garbage collection in the block, which creates many objects that stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def importing() -> Iterator[None]:
    """Imports JAX, and then whatever the block imports: with no collection, and Ctrl-C heard.

    What was imported is exempt from later collections too: the first one would take long.
    """
    with gc_paused(), interrupts_raised():
        with interrupts_deferred():
            import jax  # noqa: F401
        yield
        gc.freeze()
