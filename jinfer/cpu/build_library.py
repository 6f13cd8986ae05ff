"""Build of the custom calls: finds or compiles, loads and registers their library.

All `*.cc` under `src` become one shared library, compiled at first use with the machine's C++
compiler against the installed jaxlib's headers and cached in the user's cache folder. With a
prebuilt library (`prebuilt.py`), or a library that `python -m jinfer.cpu` compiled ahead, such as
for a container image, neither a compiler nor a writable folder is needed.

A file whose name ends in an instruction set, such as `_avx2.cc`, is compiled with its flags
(`cpp_sources.ISA_FLAGS`), and isa.h decides at run time whether it is used. All others run on any
processor; on ARM they use NEON, which every such processor has. `python -m jinfer.cpu` compiles for
all instruction sets, independent of the machine; the build at first use compiles for this machine's
alone, in half the time.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import jax
from jaxlib.version import __version__ as jaxlib_version

from jinfer import progress
from jinfer.cpu import library_cache as cache
from jinfer.cpu import prebuilt
from jinfer.cpu.compilers import BuildError, compile_and_link
from jinfer.cpu.cores import max_threads, usable_cores
from jinfer.cpu.cpp_sources import FLAGS as COMMON
from jinfer.cpu.cpp_sources import HANDLER_FLAGS, ISA_FLAGS, SRC, all_sources, source_bytes, units
from jinfer.cpu.isa import ISAS, LOWER_ISA, Isa, is_x86, isas, own_isa
from jinfer.disk_cache import files_below

# Instruction set to compile kernels for; None: all.
type BuildTarget = Isa | Literal["tested"] | None

OFF = "JINFER_NO_CUSTOM_CALLS"  # set to 1: no custom calls
LOWER = "JINFER_ISA"  # one of ISAS: the best instruction set to use
EVERY = "JINFER_EVERY_ISA"  # set to 1: kernels for all instruction sets, for tests
TESTED: Final = "tested"  # all, but without optimization for those that this machine lacks
FLAGS = "JINFER_CXXFLAGS"  # extra compiler and linker flags, such as -fsanitize=address

_SECONDS = {True: 130, False: 46}  # core seconds of a build: all instruction sets, or one
# Links a library that depends on the C library only.
_STATIC = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-s")
_STANDALONE = _STATIC if platform.system() == "Linux" else ()
_log = logging.getLogger("jinfer")
_lock = threading.Lock()
registered: set[str] = set()  # symbols registered with XLA


def available() -> bool:
    """Whether custom calls are available; compiles them the first time, which takes seconds.

    If they are unavailable, the reason is logged once.
    """
    return _library() is not None


def register(*symbols: str) -> bool:
    """Registers exported handlers with XLA:CPU under their symbols; returns `available()`."""
    if not available():
        return False
    for symbol in symbols:
        _register(symbol)
    return True


def custom_call(
    symbol: str, results: Any, aliases: dict[int, int] | None = None
) -> Callable[..., Any]:
    """Returns the call of a handler, with arrays and attributes as arguments.

    Args:
        results: its `jax.ShapeDtypeStruct`, or several.
        aliases: argument -> the result that takes over its memory.

    Raises:
        RuntimeError: there are no custom calls.
    """
    loaded()
    register(symbol)
    return jax.ffi.ffi_call(symbol, results, input_output_aliases=aliases)


def loaded() -> ctypes.CDLL:
    """Returns the loaded library.

    Raises:
        RuntimeError: there are no custom calls.
    """
    library = _library()
    if library is None:
        raise RuntimeError("there are no custom calls on this machine")
    return library


def isa() -> Isa:
    """Returns the instruction set that kernels use. Raises `RuntimeError`."""
    return ISAS[loaded().jinfer_isa()]


@contextmanager
def lowered_isa(name: Isa) -> Iterator[None]:
    """Limits kernels of all threads to an instruction set; for tests."""
    library = loaded()
    before = library.jinfer_limit_isa(ISAS.index(name))
    try:
        yield
    finally:
        library.jinfer_limit_isa(before)


def library_path(every: bool = False) -> Path:
    """Returns the path of the compiled library; compiles it if needed.

    Args:
        every: compile kernels for all instruction sets; overrides the environment.

    Raises:
        BuildError: there is no compiler, or it fails.
    """
    if (path := _cached(every)) is not None:
        return path
    return _build(_target(every))


def _cached(every: bool = False) -> Path | None:
    only = _target(every)
    keys = [key()] if only is None else [key(), key(only)]
    paths = (path for key in keys if (path := cache.find(key)) is not None)
    return next(paths, None) or prebuilt.find(own_key())


def _target(every: bool) -> BuildTarget:
    if not every and os.environ.get(EVERY, "0") not in ("", "0"):
        return TESTED
    return None if every or os.environ.get(LOWER) else own_isa()


def _build(only: BuildTarget) -> Path:
    compiler = _compiler()
    cores = usable_cores()
    every = only in (None, TESTED)
    libraries, not_cached = cache.writable_cache()
    how = "for this process alone" if not_cached else "once"
    seconds = f"some {max(5, 5 * round(_SECONDS[every] / cores / 5))} seconds"
    which = "for all instructions" if every else "for this machine"

    def waiting() -> AbstractContextManager[object]:
        return _shown(f"waiting for another process that compiles custom calls {which}")

    with libraries.lock(key(only), waiting):
        if (path := cache.find(key(only))) is not None:
            return path
        with (
            _shown(
                f"compiling custom calls {which}, {how}: {seconds} on {cores} cores"
                + (not_cached and f"; they cannot be kept ({not_cached})")
            ) as step,
            cache.build(libraries, key(only)) as paths,
        ):
            _compile(compiler, paths, cores, only, jax.ffi.include_dir(), step=step)
        return libraries.folder / key(only) / cache.LIBRARY


@contextmanager
def _shown(what: str) -> Iterator[progress.Task]:
    """Shows the progress of a long step; without a progress display a warning announces it."""
    if not progress.watched():
        _log.warning("%s", what)
    level = logging.INFO if progress.watched() else logging.DEBUG
    with progress.task(what.partition(":")[0], unit="file", level=level) as step:
        yield step


def opened_already() -> ctypes.CDLL | None:
    """Returns the library if it is already open."""
    return _library() if _opened.cache_info().currsize else None


def opened_if_built() -> ctypes.CDLL | None:
    """Returns the library if it is already compiled; only a damaged library is recompiled."""
    opened = bool(_opened.cache_info().currsize)
    return _library() if opened or _cached() is not None else None


def _library() -> ctypes.CDLL | None:
    # Several threads trace programs at once.
    with _lock:
        return _opened()


@functools.cache
def _opened() -> ctypes.CDLL | None:
    if os.environ.get(OFF, "0") not in ("", "0"):
        return None
    try:
        library = _loaded()
    except (BuildError, OSError, AttributeError) as error:
        _log.warning("no custom calls: models run several times slower (%s)", error)
        return None
    library.jinfer_limit_threads(max_threads())
    lower = os.environ.get(LOWER, "")
    if lower in ISAS:
        library.jinfer_limit_isa(ISAS.index(lower))
    elif lower:
        _log.warning("%s=%s is none of %s; ignored", LOWER, lower, ", ".join(ISAS))
    return library


def _loaded() -> ctypes.CDLL:
    """Loads the library; if it cannot be loaded, it is recompiled once."""
    path = _cached()
    if path is None:  # recompiling would not help
        return _open(library_path())
    try:
        return _open(path)
    except OSError:
        if not prebuilt.refuse(path):
            cache.drop(path)
        return _open(library_path())


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.jinfer_isa.restype = ctypes.c_int
    library.jinfer_limit_isa.restype = ctypes.c_int
    library.jinfer_limit_isa.argtypes = [ctypes.c_int]
    library.jinfer_limit_threads.restype = ctypes.c_int64
    library.jinfer_limit_threads.argtypes = [ctypes.c_int64]
    return library


@functools.cache
def _register(symbol: str) -> None:
    handler = jax.ffi.pycapsule(getattr(_library(), symbol))
    jax.ffi.register_ffi_target(symbol, handler, platform="cpu")
    registered.add(symbol)


def _compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise BuildError(f"no C++ compiler {chosen[0] if chosen else ''}; install g++ or clang++")


def _sources(only: BuildTarget = None) -> list[Path]:
    """Returns handlers, and each family's kernels for all instruction sets or its best for one."""
    files = all_sources()
    kernels: dict[str, list[Path]] = {isa: [] for isa in ISAS}
    for path in files:
        if (isa := path.stem.rpartition("_")[2]) in kernels:
            kernels[isa].append(path)
    if only is not None and only != TESTED:
        order = (LOWER_ISA.get(only, only), only)
        best = {path.stem.rpartition("_")[0]: path for isa in order for path in kernels[isa]}
        used_kernels = {*best.values()}
    else:
        used_kernels = {path for isa in isas() for path in kernels[isa]}
    every = {path for group in kernels.values() for path in group}
    return [path for path in files if path in used_kernels or path not in every]


def _extra() -> list[str]:
    return shlex.split(os.environ.get(FLAGS, ""))


def key(only: BuildTarget = None) -> str:
    """Computes the library's cache key: a hash of all its inputs except the compiler.

    Any compiler will do, and a machine that uses the library may have none.

    Args:
        only: instruction set of its kernels; None: all.
    """
    return f"jaxlib-{jaxlib_version}-{own_key(only)}"


@functools.cache
def own_key(only: BuildTarget = None) -> str:
    """Computes the part of the key that does not depend on jaxlib."""
    flags = (COMMON, HANDLER_FLAGS, ISA_FLAGS, _extra(), only, only == TESTED and own_isa())
    digest = hashlib.sha256(repr(flags).encode())
    for path in [*_sources(), *map(Path, files_below(SRC, ".h"))]:
        name = str(path)[len(str(SRC)) + 1 :].replace(os.sep, "/")
        digest.update(name.encode() + b"\0" + source_bytes(path) + b"\0")
    return f"{platform.machine()}-{digest.hexdigest()[:16]}"


def write_prebuilt(folder: Path, headers: str | None = None) -> Path:
    """Compiles a package's prebuilt library, for all instruction sets and with libstdc++ linked in.

    Args:
        folder: to write it to.
        headers: XLA's, of the oldest jaxlib to support; default: the installed one's.

    Raises:
        BuildError: there is no compiler, or it fails.
        OSError: the folder cannot be written to, or the headers not be read.
    """
    compiler, headers = _compiler(), headers or jax.ffi.include_dir()
    made_for = prebuilt.interface(headers)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=folder) as scratch,
        progress.task("compiling custom calls for all instructions", unit="file") as step,
    ):
        library, objects = Path(scratch) / cache.LIBRARY, Path(scratch) / "objects"
        objects.mkdir()
        paths = cache.BuildPaths(library, objects)
        _compile(compiler, paths, usable_cores(), None, headers, _STANDALONE, step=step)
        os.replace(library, folder / cache.LIBRARY)
    prebuilt.seal(folder / cache.LIBRARY, own_key(), made_for)
    return folder / cache.LIBRARY


def _compile(
    compiler: list[str],
    paths: cache.BuildPaths,
    cores: int,
    only: BuildTarget,
    headers: str,
    link: tuple[str, ...] = (),
    step: progress.Task | None = None,
) -> None:
    common = _extra()
    lacking = _lacking() if only == TESTED else ()
    only = None if only == TESTED else only
    optional = ("avx512bf16", "amx") if is_x86() else ()
    unknown = [isa for isa in optional if not _supports(compiler, ISA_FLAGS[f"_{isa}"])]
    while only in unknown:
        only = "avx512bf16" if only == "amx" else "avx512"
    sources = [p for p in _sources(only) if not p.stem.endswith(tuple(f"_{i}" for i in unknown))]
    if only:
        lower = LOWER_ISA.get(only, only)
        common += [f"-DJINFER_ONLY={lower}", f"-DJINFER_ONLY_DOT={only}"]
    for isa, name in (("avx512bf16", "JINFER_BF16"), ("amx", "JINFER_AMX")):
        if any(source.stem.endswith(f"_{isa}") for source in sources):
            common.append(f"-D{name}")
    include = ("-I", headers, "-I", str(SRC))

    compiled, commands = list[tuple[int, str]](), list[list[str]]()
    for unit in units(sources):
        unrun = ("-O0",) if unit.name.endswith(lacking) else ()
        start = [*compiler, *COMMON, *unit.flags, *unrun, *common, *include]
        digest = hashlib.sha256(repr(start).encode()).hexdigest()[:8]
        output = str(paths.library.with_name(f"{digest}-{unit.name}.o"))
        commands.append([*start, "-c", str(unit.write(paths.library.parent)), "-o", output])
        compiled.append((unit.isa_rank, output))
    # The linker keeps the first definition of a function: that for any processor.
    objects = [output for _, output in sorted(compiled)]
    shared = [*compiler, *_extra(), *link, "-shared", *objects]
    library = ["-o", str(paths.library), "-lpthread"]
    compile_and_link(commands, [*shared, *library], paths.objects, cores, step)


def _lacking() -> tuple[str, ...]:
    """Returns name endings of files for instruction sets that this machine lacks."""
    own = own_isa() or "portable"
    return tuple(f"_{isa}" for isa in ISAS[ISAS.index(own) + 1 :])


def _supports(compiler: list[str], flags: tuple[str, ...]) -> bool:
    """Whether a compiler supports flags; those of 2019 lack AVX-512 BF16 and AMX."""
    command = [*compiler, *flags, "-E", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
