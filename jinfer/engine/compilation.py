"""Compiled programs are kept on disk, so that a second start does not compile."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import jax
from jaxlib.version import __version__ as jaxlib_version

CACHE_BYTES = 8 << 30  # the programs that were used least recently go first


def use_persistent_cache() -> None:
    """Switches JAX's persistent compilation cache on, unless the user has set one of his own.

    The folder is $JINFER_CACHE or the user's cache folder, and in it one per jaxlib version and
    CPU: a program compiled for one CPU's instructions crashes on another. JINFER_CACHE=off: none.
    """
    chosen = os.environ.get("JINFER_CACHE", "")
    if jax.config.jax_compilation_cache_dir is not None or chosen == "off":
        return
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(chosen or Path(base) / "jinfer") / "programs" / _machine()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a read-only home: programs are compiled at each start
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Small programs too: their number is what a start waits for.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # With a limit JAX also locks the folder, so that processes that start together never read
    # what another one has half written.
    jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)


def _machine() -> str:
    features = hashlib.sha256(_cpu_features().encode()).hexdigest()[:12]
    return f"jaxlib-{jaxlib_version}-{platform.machine()}-{features}"


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    named = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(named)}))
