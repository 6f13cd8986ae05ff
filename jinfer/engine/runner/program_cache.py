"""Compiled programs are kept on disk, so that a second start does not compile."""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, wraps
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlib.version import __version__ as jaxlib_version

from jinfer.engine.scheduling.cache_size import trim
from jinfer.guard.disk_cache import Shelf
from jinfer.ops.custom_calls import made_from
from jinfer.ops.thread_limit import cores
from jinfer.progress import line
from jinfer.xla.device import all_devices
from jinfer.xla.later import is_postponed, once_imported, was_postponed

if TYPE_CHECKING:
    import jax

CACHE_BYTES = 8 << 30  # the programs that were used least recently go first

# Folders with their code.
_TRACED = ("cpu", "engine", "nn", "ops", "quant", "sampling", "modelspec", "xla")
# That change them.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NPROC", "JINFER_NO_KERNELS", "JINFER_KERNELS")
_AS_INSTALLED = "settings as installed"  # what a shelf has them under
_used: list[str] = []  # folders that JAX was told of here


class _Thread(threading.local):
    aside: bool = False


_thread = _Thread()


def compiled(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles a program, and gives back what that leaves free.

    Of a dozen programs' compilers glibc would keep as much as 200 MiB.
    """
    program = lowered.compile()
    trim()
    return program


def use_persistent_cache() -> Shelf | None:
    """Switches JAX's persistent compilation cache on, unless the user has set one of his own.

    The folder is $JINFER_CACHE or the user's cache folder, and in it one per jaxlib version and
    CPU: a program compiled for one CPU's instructions crashes on another. JINFER_CACHE=off: none.
    Programs are code: a folder that others may write to is not used, nor one that is not the
    user's.

    Returns:
        Where programs are kept that are ready to run, as JAX's cache has to be asked with a program
        that is traced; None where nothing is kept, or the user has chosen JAX's cache.
    """
    chosen = os.environ.get("JINFER_CACHE", "")
    own = _chosen_of_jax()
    if chosen == "off" or (own is not None and own not in _used):
        return None
    folder = private_folder(_base(chosen) / "programs" / _machine())
    if folder is None:
        return None
    if str(folder) not in _used:
        _used.append(str(folder))
    shelf = Shelf(folder, _maker())
    if is_postponed():
        once_imported(lambda: shelf.put(_AS_INSTALLED, _settings().encode()))
    once_imported(lambda: _switch_on(folder))
    return shelf


def _chosen_of_jax() -> str | None:
    """The folder that JAX is told to keep programs in."""
    if is_postponed():
        return None
    import jax

    folder: str | None = jax.config.jax_compilation_cache_dir
    return folder


def _switch_on(folder: Path) -> None:
    """Makes JAX keep programs in a folder."""
    import jax

    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Small programs too: their number is what a start waits for.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # With a limit JAX also locks the folder, so that processes that start together never read
    # what another one has half written.
    jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)
    attend(folder)


def can_keep() -> bool:
    """Whether what is compiled `aside` can be kept ready to run; see `attend`."""
    from jax._src import compilation_cache

    return hasattr(getattr(compilation_cache, "get_executable_and_time", None), "attended")


def surroundings(shelf: Shelf | None) -> str:
    """What a program depends on beside its code: settings, devices, custom calls."""
    chosen = {name: os.environ.get(name) for name in _VARIABLES}
    devices = [(device.platform, device.device_kind) for device in all_devices()]
    return repr((_changed_settings(shelf), chosen, devices, cores(), made_from()))


def _changed_settings(shelf: Shelf | None) -> str:
    """JAX's settings; "" where they are as they are installed, which is known without JAX."""
    if was_postponed():
        return ""
    own = _settings()
    known = shelf.get(_AS_INSTALLED) if shelf is not None else None
    return "" if known == own.encode() else own


def _settings() -> str:
    """JAX's settings, but for those of its caches, and devices, which are looked at themselves."""
    import jax

    values = jax.config.values.items()
    other = {name: value for name, value in values if "cache" not in name}
    return repr({**other, "jax_platforms": None})


@cache
def _maker() -> str:
    """Changes with all that makes programs: JAX, Flax and this package."""
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"jaxlib {jaxlib_version}, {digest.hexdigest()}"


def _sources() -> list[Path]:
    """What is run while a program is traced."""
    root = Path(__file__).parents[2]
    folders = [*(root / name for name in _TRACED), *_places(find_spec("kernels_pallas"))]
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    # Of another package its version is enough, and found faster than by asking for it.
    others = [place for name in ("jax", "flax") for place in _places(find_spec(name))]
    versions = (place / "version.py" for place in others)
    return [*files, *(path for path in versions if path.is_file())]


def _places(found: ModuleSpec | None) -> list[Path]:
    return [Path(place) for place in (found.submodule_search_locations or ())] if found else []


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
    line(
        f"jinfer: {folder} {reason}, so programs are compiled at each start; "
        "set JINFER_CACHE to a folder of yours, or to off"
    )
    return None


def empty(folder: Path) -> None:
    """Removes all files of a folder."""
    for path in folder.iterdir():
        if path.is_symlink() or not path.is_dir():
            path.unlink()


@contextmanager
def aside() -> Iterator[None]:
    """What this thread compiles meanwhile comes neither from JAX's cache nor goes into it.

    A program that came from there cannot be kept: XLA would write it without a part of its code.
    """
    _thread.aside = True
    try:
        yield
    finally:
        _thread.aside = False


def attend(folder: Path) -> bool:
    """Makes JAX write an entry anew that it could not read, and makes `aside` work.

    JAX compiles again, but leaves what is there as it is: at each start it would warn and compile.

    Returns:
        Whether this could be done: JAX has no interface for it.
    """
    try:
        from jax._src import compilation_cache as own

        read, write = own.get_executable_and_time, own.put_executable_and_time
    except (ImportError, AttributeError):
        return False
    if hasattr(read, "attended"):
        return True

    @wraps(read)
    def get(key: str, *args: Any, **kwargs: Any) -> Any:
        if _thread.aside:
            return None, None
        try:
            return read(key, *args, **kwargs)
        except Exception:
            for path in folder.glob(f"{glob.escape(key)}*"):
                path.unlink(missing_ok=True)
            return None, None

    @wraps(write)
    def put(*args: Any, **kwargs: Any) -> None:
        if not _thread.aside:
            write(*args, **kwargs)

    get.attended = True  # type: ignore[attr-defined]
    for name, function in (("get_executable_and_time", get), ("put_executable_and_time", put)):
        setattr(own, name, function)
    return True


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
