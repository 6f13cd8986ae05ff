"""JAX, imported without what it looks for on the way and a command has no use for."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Where they are installed, as Flax brings them along, JAX imports them: the first to keep compiled
# programs in a cloud's buckets, with asyncio and a framework for tests; the second to color its
# debugger's listings.
_UNUSED = ("etils", "pygments")


def import_jax() -> None:
    """Imports JAX, if nobody has: a fifth of the time that `import jax` takes is left out.

    For a command, which has the process to itself.
    """
    if "jax" in sys.modules:
        return
    with _absent(() if _in_buckets() else _UNUSED), _unsearched():
        import jax  # noqa: F401


def _in_buckets() -> bool:
    """Whether compiled programs are to be kept where only `etils` can write."""
    return "://" in os.environ.get("JAX_COMPILATION_CACHE_DIR", "")


@contextmanager
def _absent(names: tuple[str, ...]) -> Iterator[None]:
    """Importing any of these raises `ImportError`, as if they were not installed."""
    own = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(own))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in own:
            del sys.modules[name]


@contextmanager
def _unsearched() -> Iterator[None]:
    """JAX finds no installed packages, unless ROCm's is one: it would parse what all say of them.

    It looks there for that one, by its name.
    """
    from importlib import metadata

    found = metadata.distributions
    if not _has_rocm():
        metadata.distributions = lambda **_: iter(())
    try:
        yield
    finally:
        metadata.distributions = found


def _has_rocm() -> bool:
    """Whether JAX's plugin for ROCm may be installed."""
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:  # a zip file's, or of a folder that is gone
            continue
        if any(name.lower().startswith(("jax-rocm", "jax_rocm")) for name in names):
            return True
    return False
