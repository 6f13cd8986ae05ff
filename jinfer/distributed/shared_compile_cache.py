"""Compiled programs are kept on every host: JAX would have process 0 alone do it."""

from __future__ import annotations

import logging
from typing import Any

import jax

_log = logging.getLogger("jinfer")


def keep_programs() -> None:
    """Has JAX's persistent cache, where there is one, take what this process compiles.

    JAX supposes one folder for all, and so lets process 0 write alone; the others would compile
    anew at each start. It has no interface for this: where it has changed, they do.
    """
    try:
        from jax._src import compilation_cache, compiler

        known = compiler._cache_write
    except (ImportError, AttributeError):
        return

    def write(*given: Any) -> None:
        key, seconds, name, backend, executable = given
        if seconds < jax.config.jax_persistent_cache_min_compile_time_secs:
            return
        try:
            put = compilation_cache.put_executable_and_time
            put(key, name, executable, backend, int(seconds))
        except Exception as error:
            _log.debug("%s cannot be kept: %s", name, error)

    write.__name__ = known.__name__
    compiler._cache_write = write  # type: ignore[assignment]
