"""Start-up: JAX and the engine imported without pauses of the garbage collector."""

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
def gc_spared() -> Iterator[None]:
    """As `gc_paused`, and what is imported in the block is exempt from later collections.

    The first one would take as long as a tenth of the imports.
    """
    with gc_paused():
        yield
        gc.freeze()


@contextmanager
def importing() -> Iterator[None]:
    """Imports JAX, and then whatever the block imports, as `gc_spared`; and Ctrl-C is heard."""
    with gc_spared(), interrupts_raised():
        with interrupts_deferred():
            import jax  # noqa: F401
        yield
