"""Persistent compilation cache on every host: JAX would write it on rank 0 only."""

from __future__ import annotations

import logging
from typing import Any

import jax

_log = logging.getLogger("jinfer")


def cache_on_every_rank() -> None:
    """Has JAX write this rank's compiled programs to its persistent cache, if that is enabled.

    JAX assumes a folder shared by all hosts, and writes on rank 0 only, so that the others would
    compile again at each start. This replaces a private function; where JAX has changed, they do.
    """
    try:
        from jax._src import compilation_cache, compiler

        original = compiler._cache_write
    except (ImportError, AttributeError):
        return

    def write(*arguments: Any) -> None:
        key, seconds, name, backend, executable = arguments
        if seconds < jax.config.jax_persistent_cache_min_compile_time_secs:
            return
        try:
            put = compilation_cache.put_executable_and_time
            put(key, name, executable, backend, int(seconds))
        except Exception as error:
            _log.debug("%s cannot be kept: %s", name, error)

    write.__name__ = original.__name__
    compiler._cache_write = write  # type: ignore[assignment]
