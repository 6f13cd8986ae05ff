"""Finds or compiles, loads and registers the custom calls.

Every `*.cc` under `src` becomes one shared library, compiled at first use with the machine's
C++ compiler against the installed jaxlib's headers and kept in the user's cache folder. Where the
package brought one along (`prebuilt.py`), or `python -m jinfer.cpu` compiled it ahead of use, as
for a container image, neither a compiler nor a folder that can be written to is needed.

A file whose name ends in `_avx512.cc` or `_avx2.cc` is compiled with these instructions and only
for x86-64, one in `_avxvnni.cc` with AVX2's and what it asks for itself, one in `_avx512bf16.cc`
with AVX-512's, dot products of bfloat16 and VBMI, one in `_amx.cc` with these and tiles, one in
`_neon.cc` only for 64-bit ARM, with dot products of bytes; code in it may run only where `isa.h`
says so. All others run on any CPU, on ARM with the NEON that each has. The library that
`python -m jinfer.cpu` makes has all of them and so does not depend on the CPU that it was compiled
on. The one that is made at first use has those of this machine alone, which takes half the time.
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
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final, Literal

from jaxlib.version import __version__ as jaxlib_version

from jinfer import progress
from jinfer.cpu import library_cache as cache
from jinfer.cpu import prebuilt
from jinfer.cpu.compilers import BuildError, compile_and_link
from jinfer.cpu.cores import most_threads, usable_cores
from jinfer.cpu.cpp_sources import FLAGS as COMMON
from jinfer.cpu.cpp_sources import HANDLER_FLAGS, ISA_FLAGS, SRC, all_sources, source_bytes, units
from jinfer.cpu.isa import ISAS, LOWER_ISA, Isa, is_x86, isas, own_isa
from jinfer.xla.calls import include_dir, register_call

# The only instructions that there are kernels for; None: all.
type Wanted = Isa | Literal["tested"] | None

OFF = "JINFER_NO_CUSTOM_CALLS"  # set to 1: as if there were no compiler
LOWER = "JINFER_ISA"  # one of ISAS: no better instructions than these
EVERY = "JINFER_EVERY_ISA"  # set to 1: kernels for all instructions, as tests need them
TESTED: Final = "tested"  # all; a compiler does not optimize those that this machine lacks
FLAGS = "JINFER_CXXFLAGS"  # more flags for the compiler and the linker, such as -fsanitize=address

_SECONDS = {True: 130, False: 46}  # of one core, to compile everything or for one machine
# Links a library that needs no more of a system than its C library.
_STATIC = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-s")
_ALONE = _STATIC if platform.system() == "Linux" else ()
_log = logging.getLogger("jinfer")
_lock = threading.Lock()
registered: set[str] = set()  # symbols that XLA knows


def available() -> bool:
    """Whether there are custom calls; the first time this compiles them, which takes seconds.

    Where there are none, one line is logged that says what is lost.
    """
    return _library() is not None


def register(*symbols: str) -> bool:
    """Makes exported handlers known to XLA:CPU under their own names; `available()`."""
    library = _library()
    if library is None:
        return False
    for symbol in symbols:
        _register(symbol)
    return True


def isa() -> Isa:
    """The instructions that kernels use."""
    library = _library()
    if library is None:
        raise RuntimeError("there are no custom calls on this machine")
    return ISAS[library.jinfer_isa()]


@contextmanager
def lowered_isa(name: Isa) -> Iterator[None]:
    """No better instructions than these, in all threads; for tests."""
    library = _library()
    if library is None:
        raise RuntimeError("there are no custom calls on this machine")
    before = library.jinfer_limit_isa(ISAS.index(name))
    try:
        yield
    finally:
        library.jinfer_limit_isa(before)


def library_path(every: bool = False) -> Path:
    """The compiled library; compiles it where that has not been done.

    Args:
        every: with kernels for all instructions, also where the environment does not ask for them.

    Raises:
        BuildError: there is no compiler, or it fails.
    """
    if (found := _kept(every)) is not None:
        return found
    return _build(_wanted_isa(every))


def _kept(every: bool = False) -> Path | None:
    only = _wanted_isa(every)
    keys = [key()] if only is None else [key(), key(only)]
    found = (path for each in keys if (path := cache.find(each)) is not None)
    return next(found, None) or prebuilt.find(own_key())


def _wanted_isa(every: bool) -> Wanted:
    if not every and os.environ.get(EVERY, "0") not in ("", "0"):
        return TESTED
    return None if every or os.environ.get(LOWER) else own_isa()


def _build(only: Wanted) -> Path:
    compiler = _compiler()
    cores = usable_cores()
    every = only in (None, TESTED)
    unkept = cache.unkept()
    how = "for this process alone" if unkept else "once"
    seconds = f"some {max(5, 5 * round(_SECONDS[every] / cores / 5))} seconds"
    which = "for all instructions" if every else "for this machine"

    def waiting() -> AbstractContextManager[object]:
        return _told(f"waiting for another process that compiles custom calls {which}")

    with cache.alone(key(only), waiting):
        if (found := cache.find(key(only))) is not None:
            return found
        with (
            _told(
                f"compiling custom calls {which}, {how}: {seconds} on {cores} cores"
                + (unkept and f"; they cannot be kept ({unkept})")
            ) as step,
            cache.place(key(only)) as place,
        ):
            _compile(compiler, place, cores, only, include_dir(), step=step)
        return place.kept


@contextmanager
def _told(what: str) -> Iterator[progress.Task]:
    """Shows what takes long; a warning says it where nobody watches."""
    if not progress.watched():
        _log.warning("%s", what)
    level = logging.INFO if progress.watched() else logging.DEBUG
    with progress.task(what.partition(":")[0], unit="file", level=level) as step:
        yield step


def opened_already() -> ctypes.CDLL | None:
    """The library where it is in use already; it is not opened for this."""
    return _library() if _opened.cache_info().currsize else None


def opened_if_kept() -> ctypes.CDLL | None:
    """The library where it has been compiled already; only a damaged one is compiled for this."""
    opened = bool(_opened.cache_info().currsize)
    return _library() if opened or _kept() is not None else None


def _library() -> ctypes.CDLL | None:
    # Programs are traced by several threads, and all of them ask at once.
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
    library.jinfer_limit_threads(most_threads())
    lower = os.environ.get(LOWER, "")
    if lower in ISAS:
        library.jinfer_limit_isa(ISAS.index(lower))
    elif lower:
        _log.warning("%s=%s is none of %s; ignored", LOWER, lower, ", ".join(ISAS))
    return library


def _loaded() -> ctypes.CDLL:
    """The library; one that this machine cannot load is compiled anew, once."""
    path = _kept()
    if path is None:  # made here: another would be no better
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
    register_call(symbol, getattr(_library(), symbol))
    registered.add(symbol)


def _compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise BuildError(f"no C++ compiler {chosen[0] if chosen else ''}; install g++ or clang++")


def _sources(only: Wanted = None) -> list[Path]:
    """Handlers, and of each family of kernels those for all instructions, or the best for some."""
    files = all_sources()
    kernels = {isa: [path for path in files if path.stem.endswith(f"_{isa}")] for isa in ISAS}
    if only is not None and only != TESTED:
        order = (LOWER_ISA.get(only, only), only)
        best = {path.stem.rpartition("_")[0]: path for isa in order for path in kernels[isa]}
        wanted = {*best.values()}
    else:
        wanted = {path for isa in isas() for path in kernels[isa]}
    return [
        path for path in files if path in wanted or not any(path in k for k in kernels.values())
    ]


def _extra() -> list[str]:
    return shlex.split(os.environ.get(FLAGS, ""))


def key(only: Wanted = None) -> str:
    """Changes with everything that the library is made from, but for the compiler.

    Which compiler made it does not matter, and there may be none where it is used.

    Args:
        only: the instructions that it has kernels for; None: all.
    """
    return f"jaxlib-{jaxlib_version}-{own_key(only)}"


@functools.cache
def own_key(only: Wanted = None) -> str:
    """The same, of what is jinfer's own."""
    flags = (COMMON, HANDLER_FLAGS, ISA_FLAGS, _extra(), only, only == TESTED and own_isa())
    digest = hashlib.sha256(repr(flags).encode())
    for path in [*_sources(), *sorted(SRC.rglob("*.h"))]:
        digest.update(
            path.relative_to(SRC).as_posix().encode() + b"\0" + source_bytes(path) + b"\0"
        )
    return f"{platform.machine()}-{digest.hexdigest()[:16]}"


def write_prebuilt(folder: Path, headers: str | None = None) -> Path:
    """Compiles for all instructions what a package brings along; the standard library is in it.

    Args:
        folder: to write it to.
        headers: of the oldest XLA that is to take it; the installed jaxlib's where none are named.

    Raises:
        BuildError: there is no compiler, or it fails.
        OSError: the folder cannot be written to, or the headers not be read.
    """
    compiler, headers = _compiler(), headers or include_dir()
    made_for = prebuilt.interface(headers)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=folder) as scratch,
        progress.task("compiling custom calls for all instructions", unit="file") as step,
    ):
        library, objects = Path(scratch) / cache.LIBRARY, Path(scratch) / "objects"
        objects.mkdir()
        place = cache.Place(library, folder / cache.LIBRARY, objects)
        _compile(compiler, place, usable_cores(), None, headers, _ALONE, step=step)
        os.replace(library, place.kept)
    prebuilt.seal(folder / cache.LIBRARY, own_key(), made_for)
    return folder / cache.LIBRARY


def _compile(
    compiler: list[str],
    place: cache.Place,
    cores: int,
    only: Wanted,
    headers: str,
    link: tuple[str, ...] = (),
    step: progress.Task | None = None,
) -> None:
    common = _extra()
    lacking = _lacking() if only == TESTED else ()
    only = None if only == TESTED else only
    newer = ("avx512bf16", "amx") if is_x86() else ()
    unknown = [isa for isa in newer if not _knows(compiler, ISA_FLAGS[f"_{isa}"])]
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
        output = str(place.library.with_name(f"{digest}-{unit.name}.o"))
        commands.append([*start, "-c", str(unit.write(place.library.parent)), "-o", output])
        compiled.append((unit.isa_rank, output))
    # Of a function that several files have, the linker keeps the first: that for any processor.
    objects = [output for _, output in sorted(compiled)]
    shared = [*compiler, *_extra(), *link, "-shared", *objects]
    library = ["-o", str(place.library), "-lpthread"]
    compile_and_link(commands, [*shared, *library], place.objects, cores, step)


def _lacking() -> tuple[str, ...]:
    """How files end that are for better instructions than this machine's."""
    own = own_isa() or "portable"
    return tuple(f"_{isa}" for isa in ISAS[ISAS.index(own) + 1 :])


def _knows(compiler: list[str], flags: tuple[str, ...]) -> bool:
    """Whether a compiler takes them; those of 2019 know neither AVX-512 BF16 nor AMX."""
    command = [*compiler, *flags, "-E", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
