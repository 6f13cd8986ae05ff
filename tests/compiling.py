"""How programs of tests are compiled."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

FLAG = "jax_disable_most_optimizations"


@contextmanager
def optimized() -> Iterator[None]:
    """Programs that this process makes meanwhile are optimized like those of users."""
    before = jax.config.values[FLAG]
    jax.config.update(FLAG, False)
    try:
        yield
    finally:
        jax.config.update(FLAG, before)
