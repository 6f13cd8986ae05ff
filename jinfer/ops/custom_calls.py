"""The custom calls that compiled programs refer to by name."""

from __future__ import annotations

from collections.abc import Iterable

from jinfer.cpu import build_library


def made_from() -> str:
    """Changes with what custom calls do, and with whether there are any."""
    return build_library.key() if build_library.available() else ""


def known_calls() -> frozenset[str]:
    """Names of those that XLA knows by now."""
    return frozenset(build_library.registered)


def register_calls(names: Iterable[str]) -> bool:
    """Makes calls known to XLA; whether there are all of them on this machine."""
    return all(build_library.register(name) for name in names)
