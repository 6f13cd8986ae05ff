"""How programs of tests are compiled."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def optimized() -> Iterator[None]:
    """Programs that this process makes meanwhile are optimized like those of users."""
    before = jax.config.jax_disable_most_optimizations
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
