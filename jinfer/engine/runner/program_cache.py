"""Program cache: compiled programs on disk, so that a second start compiles nothing.

Two caches share a folder. The steps of an engine are written ready to run (`aot_serialization`);
all other programs are in JAX's persistent compilation cache.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from collections.abc import Iterable
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import jax
from jaxlib.version import __version__ as jaxlib_version

from jinfer.disk_cache import (
    CacheOffError,
    DiskCache,
    NoCacheError,
    cache_folder,
    content_of,
    files_below,
    private_folder,
)
from jinfer.engine.runner.known_jaxlib import is_known
from jinfer.engine.scheduling.cache_size import trim
from jinfer.ops.cpu_library import cores, library_key
from jinfer.progress import line

CACHE_BYTES = 8 << 30  # of JAX's cache; what was used least recently is removed first

_TRACED = ("cpu", "engine", "nn", "ops", "quant", "sampling", "modelspec")
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NPROC", "JINFER_NO_KERNELS")
_used: list[str] = []  # folders that were set here as JAX's, rather than by the user
_log = logging.getLogger("jinfer")
_NEVER = 1e9  # seconds
# An option that says what XLA does anyway, but is a part of the key in JAX's cache.
_APART = {"xla_embed_ir_in_executable": False}


def compiled(
    lowered: jax.stages.Lowered, options: dict[str, bool] | None = None
) -> jax.stages.Compiled:
    """Compiles a program, and returns the compiler's memory to the system.

    Of a dozen programs' compilers glibc would keep as much as 200 MiB.

    Args:
        options: for XLA.
    """
    program = lowered.compile(options)
    trim()
    return program


def compiled_apart(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles a program that neither comes from JAX's cache nor goes into it.

    XLA on a CPU serializes a program that came from there without a part of its code.
    """
    # Of the settings of this kind, which a thread can have for a while, JAX makes few public.
    from jax._src.config import persistent_cache_min_compile_time_secs

    with persistent_cache_min_compile_time_secs(_NEVER):
        return compiled(lowered, _APART)


def use_persistent_cache() -> DiskCache | None:
    """Switches JAX's persistent compilation cache on, unless the user has chosen a folder for it.

    The folder is $JINFER_CACHE or the user's cache folder, and in it one per jaxlib version and
    CPU: a program compiled for one CPU's instructions crashes on another. JINFER_CACHE=off: none.
    Programs are code: a folder that others can write to is not used, nor one of another user.

    Returns:
        The cache of programs that are ready to run, which needs no trace to be asked; None where
        there is none: the user has chosen JAX's cache, or jaxlib is of an unknown version.
    """
    own: str | None = jax.config.jax_compilation_cache_dir
    if own is not None and own not in _used:
        return None
    try:
        folder = private_folder(cache_folder("programs") / _machine())
    except CacheOffError:
        return None
    except NoCacheError as reason:
        _report(str(reason))
        return None
    if str(folder) not in _used:
        _used.append(str(folder))
    _remove_incomplete(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Small programs too: their number is what a start waits for.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # With a limit JAX also locks the folder, so that processes that start together never read
    # what another one has half written.
    jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)
    if not is_known():
        _log.info("programs are traced at each start: jaxlib %s is not known", jaxlib_version)
        return None
    return DiskCache(folder, code_version())


def _remove_incomplete(folder: Path) -> None:
    """Removes entries of JAX's cache that a process was killed while writing.

    JAX writes the time of an entry's last use after the entry. It would not write an incomplete one
    again, but warn and compile at each start.
    """
    names = os.listdir(folder)
    timed = {name.removesuffix("-atime") for name in names}
    for key in {name[: -len("-cache")] for name in names if name.endswith("-cache")} - timed:
        # Asked again: another process may have written it meanwhile.
        if not (folder / f"{key}-atime").exists():
            (folder / f"{key}-cache").unlink(missing_ok=True)


def surroundings() -> str:
    """What a program depends on besides its code: settings, devices, custom calls."""
    variables = {name: os.environ.get(name) for name in _VARIABLES}
    devices = [(device.platform, device.device_kind) for device in jax.devices()]
    return repr((_settings(), variables, devices, cores(), library_key()))


def _settings() -> str:
    """JAX's configuration, without that of its caches and of platforms (see `surroundings`)."""
    values = jax.config.values.items()
    other = {name: value for name, value in values if "cache" not in name}
    return repr({**other, "jax_platforms": None})


@cache
def code_version(*more: str) -> str:
    """A string that changes with JAX, Flax and the code of this package that is traced.

    Args:
        more: further packages of this one whose code counts.
    """
    digest = hashlib.sha256()
    for path in _sources(more):
        digest.update(os.path.basename(path).encode() + b"\0" + content_of(path) + b"\0")
    return f"jaxlib {jaxlib_version}, {digest.hexdigest()}"


def _sources(more: Iterable[str]) -> list[str]:
    """Files whose code runs while a program is traced, and those of some more packages."""
    root = Path(__file__).parents[2]
    folders = [
        *(root / name for name in (*_TRACED, *more)),
        *_folders_of(find_spec("kernels_pallas")),
    ]
    files = [path for folder in folders for path in files_below(folder, ".py")]
    # For other packages the version is enough; reading it takes less time than importing them.
    others = [folder for name in ("jax", "flax") for folder in _folders_of(find_spec(name))]
    versions = (folder / "version.py" for folder in others)
    return [*files, *(str(path) for path in versions if path.is_file())]


def _folders_of(spec: ModuleSpec | None) -> list[Path]:
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


@cache  # so that each reason is reported once
def _report(reason: str) -> None:
    line(
        f"jinfer: {reason}, so programs are compiled at each start; "
        "set JINFER_CACHE to a folder of yours, or to off"
    )


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
