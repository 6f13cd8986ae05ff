"""XLA custom calls: the CPU kernels that compiled programs refer to by name."""

from __future__ import annotations

from collections.abc import Iterable

from jinfer.cpu import build_library


def library_key() -> str:
    """A key that changes with the custom calls' code, or "" if there are none."""
    return build_library.key() if build_library.available() else ""


def known_calls() -> frozenset[str]:
    """Names of the registered custom calls."""
    return frozenset(build_library.registered)


def register_calls(names: Iterable[str]) -> bool:
    """Registers custom calls with XLA; returns whether all exist on this machine."""
    return all(build_library.register(name) for name in names)
