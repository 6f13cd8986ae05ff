"""CPU kernel library: its custom calls, interrupt flags of compiled loops, the thread limit."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jinfer.cpu import build_library, library_calls
from jinfer.cpu import library_calls as cpu
from jinfer.cpu.cores import usable_cores
from jinfer.cpu.library_calls import Flag as Flag
from jinfer.ops.backend import has_cpu_calls
from jinfer.startup import at_usual_priority

if TYPE_CHECKING:
    from jaxtyping import Bool, Int


def library_key() -> str:
    """Returns a key that changes with the custom calls' code, or "" if there are none."""
    return build_library.key() if build_library.available() else ""


def known_calls() -> frozenset[str]:
    """Names of the registered custom calls."""
    return frozenset(build_library.registered)


def register_calls(names: Iterable[str]) -> bool:
    """Registers custom calls with XLA; returns whether all exist on this machine."""
    return all(build_library.register(name) for name in names)


def interrupted(flag: Int[Array, ""], step: Int[Array, ""]) -> Bool[Array, ""]:
    """Whether the host has raised a flag; False where a program cannot read it.

    Args:
        flag: its number; see `jinfer.cpu.library_calls.Flag`.
        step: the loop iteration about to begin.
    """
    if has_cpu_calls():
        return cpu.interrupted(flag, step)
    return jnp.bool_(False)


_VARIABLE = "NPROC"  # sizes XLA's pools when it starts
_log = logging.getLogger("jinfer")


def limit_threads(count: int) -> Callable[[], None]:
    """Limits the threads of the whole process until the returned function is called.

    XLA sizes its thread pools once, when it starts: the limit applies to them if it has not started
    yet. Custom calls obey the smallest limit in force.
    """
    from jax._src.xla_bridge import backends_are_initialized  # there is no public function

    lift = library_calls.limit_threads(count)
    if not backends_are_initialized():
        before = os.environ.get(_VARIABLE)
        os.environ[_VARIABLE] = str(count)
        try:
            at_usual_priority(jax.local_devices)
        finally:
            del os.environ[_VARIABLE]
            if before is not None:
                os.environ[_VARIABLE] = before
    elif count < (_pool() or count + 1):
        _log.warning(
            "threads=%d: XLA has started with more; the limit holds for custom calls alone", count
        )
    return lift


def cores() -> int:
    """CPU cores this process may use."""
    return usable_cores()


def _pool() -> int | None:
    """Counts the threads in XLA's pool; None if unknown."""
    tasks = "/proc/self/task"
    try:
        names = []
        for task in os.listdir(tasks):
            with open(f"{tasks}/{task}/comm", encoding="utf-8") as file:
                names.append(file.read().strip())
    except OSError:
        return None
    return names.count("tf_XLAEigen") or None
