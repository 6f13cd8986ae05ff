"""jaxlib versions whose internals `executable` and the program cache rely on.

With any other, compiled programs are called by JAX, and come from its persistent compilation cache,
which needs a trace at each start.
"""

from __future__ import annotations

from jaxlib.version import __version__

KNOWN = ("0.11.", "0.12.")


def is_known(version: str = __version__) -> bool:
    """Whether programs of this jaxlib can be serialized, and called without JAX's dispatch."""
    return version.startswith(KNOWN)
