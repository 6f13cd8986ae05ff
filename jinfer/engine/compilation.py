"""Compiled programs are kept on disk, so that a second start does not compile."""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import stat
import sys
from functools import cache, wraps
from pathlib import Path
from typing import Any

import jax
from jaxlib.version import __version__ as jaxlib_version

CACHE_BYTES = 8 << 30  # the programs that were used least recently go first


def use_persistent_cache() -> None:
    """Switches JAX's persistent compilation cache on, unless the user has set one of his own.

    The folder is $JINFER_CACHE or the user's cache folder, and in it one per jaxlib version and
    CPU: a program compiled for one CPU's instructions crashes on another. JINFER_CACHE=off: none.
    Programs are code: a folder that others may write to is not used, nor one that is not the
    user's.
    """
    chosen = os.environ.get("JINFER_CACHE", "")
    if jax.config.jax_compilation_cache_dir is not None or chosen == "off":
        return
    folder = private_folder(_base(chosen) / "programs" / _machine())
    if folder is None:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Small programs too: their number is what a start waits for.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # With a limit JAX also locks the folder, so that processes that start together never read
    # what another one has half written.
    jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)
    drop_damaged(folder)


def _base(chosen: str) -> Path:
    if chosen:
        return Path(chosen).expanduser()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jinfer"
    except RuntimeError:  # nobody's home
        return Path("/nonexistent")


@cache  # so that it is said once
def private_folder(folder: Path) -> Path | None:
    """The folder, made for this user alone; None, and said once, where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            reason = "is not a folder of yours"
        elif found.st_mode & 0o077:
            folder.chmod(0o700)
            # What others could write to until now may hold what they wrote.
            if found.st_mode & 0o022:
                empty(folder)
            reason = ""
        else:
            reason = "" if os.access(folder, os.W_OK | os.X_OK) else "cannot be written to"
    except OSError as error:
        reason = f"cannot be used: {error.strerror}"
    if not reason:
        return folder
    print(
        f"jinfer: {folder} {reason}, so programs are compiled at each start; "
        "set JINFER_CACHE to a folder of yours, or to off",
        file=sys.stderr,
    )
    return None


def empty(folder: Path) -> None:
    """Removes all files of a folder."""
    for path in folder.iterdir():
        if path.is_symlink() or not path.is_dir():
            path.unlink()


def drop_damaged(folder: Path) -> None:
    """Makes JAX write an entry anew that it could not read.

    JAX compiles again, but leaves what is there as it is: at each start it would warn and compile.
    """
    try:
        from jax._src import compilation_cache
    except ImportError:
        return
    known = getattr(compilation_cache, "get_executable_and_time", None)
    if known is None or hasattr(known, "drops_damaged"):
        return

    @wraps(known)
    def get(key: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return known(key, *args, **kwargs)
        except Exception:
            for path in folder.glob(f"{glob.escape(key)}*"):
                path.unlink(missing_ok=True)
            return None, None

    get.drops_damaged = True  # type: ignore[attr-defined]
    compilation_cache.get_executable_and_time = get  # type: ignore[assignment]


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
