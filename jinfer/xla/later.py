"""JAX imported when something of it is first used, if anything ever is.

Until then `jax`, `jax.numpy` and the like are empty modules, as good as any to a module that says
`import jax` and uses it in its functions. The first use imports JAX as always, and fills them.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from jinfer.xla.jax_import import import_jax as import_now
from jinfer.xla.undisturbed import heard, held, paused

# Versions of jaxlib whose inside is known here. With others JAX is imported at once.
_KNOWN = ("0.11.", "0.12.")
# What modules of this package import while they are imported themselves.
_NAMES = ("jax", "jax.lax", "jax.numpy")
# Which say that JAX is to do something else than run programs on a CPU: settings, plugins.
_SETTINGS, _PLATFORMS = ("JAX_", "PJRT_"), "JAX_PLATFORMS"
_PLUGINS = ("jax_plugins", "libtpu")  # packages
# Other devices, of which JAX says at least that it cannot use them.
_OTHERS = ("nvidia[0c]*", "dxg", "kfd", "accel[0-9]*", "vfio/[0-9]*")

_lock = threading.RLock()
_waiting: dict[str, ModuleType] = {}
_hooks: list[Callable[[], None]] = []
_postponed = threading.Event()  # set once, for good


def postpone() -> bool:
    """Lets JAX wait, for a command, which has the process to itself; whether it does now.

    It does not where it is there already, of an unknown version, or asked for more than a CPU.
    """
    if _waiting:
        return True
    if "jax" in sys.modules or not is_known() or not _on_a_cpu():
        return False
    with _lock:
        spec = find_spec("jax")
        if spec is None:
            return False
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # as JAX does: XLA would chat
        with held():
            from jaxlib import _jax, xla_client  # noqa: F401 - all that arrays will need
        for name in _NAMES:
            module: Any = _Waiting(name, f"{name}, which is not imported yet")
            # Whoever says `from jax import x` looks whether it is a package.
            module.__path__ = [str(Path(folder, *name.split(".")[1:])) for folder in _places(spec)]
            sys.modules[name] = _waiting[name] = module
        jax: Any = _waiting["jax"]
        jax.lax, jax.numpy = _waiting["jax.lax"], _waiting["jax.numpy"]
        jax.Array, jax.__spec__ = _jax.Array, spec
        sys.meta_path.insert(0, _Finder)
        _postponed.set()
    return True


def is_known() -> bool:
    """Whether jaxlib is there, in a version whose inside is known here."""
    try:
        from jaxlib.version import __version__
    except ImportError:
        return False
    return __version__.startswith(_KNOWN)


def is_postponed() -> bool:
    """Whether JAX is not imported yet, and waits."""
    return bool(_waiting)


def was_postponed() -> bool:
    """Whether it waited once, so that nobody had changed its settings when it was imported."""
    return _postponed.is_set()


def import_jax() -> None:
    """Imports JAX, if nobody has."""
    # Ctrl-C is held through all of it: what is half done here could be neither used nor repeated.
    with _lock, paused(), held():
        if not _waiting:
            import_now()
            return
        waiting = dict(_waiting)
        for name, module in waiting.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _Finder]
        try:
            import_now()
        except BaseException:
            # As if nobody had asked: the next who does is told what is wrong with it.
            sys.modules.update(waiting)
            sys.meta_path.insert(0, _Finder)
            raise
        # Before anybody can use it.
        for hook in _hooks:
            hook()
        _hooks.clear()
        for name, module in waiting.items():
            module.__dict__.update(importlib.import_module(name).__dict__)
            module.__class__ = ModuleType
        _waiting.clear()


@contextmanager
def imported() -> Iterator[None]:
    """For a command's imports, with JAX first if it cannot wait: no search for garbage meanwhile.

    Nor later of what came with them: the one that would follow at once takes long.
    """
    with paused(), heard():
        if not postpone():
            import_jax()
        yield
        gc.freeze()


def once_imported(hook: Callable[[], None]) -> None:
    """Has something called as soon as JAX is imported: now, if it is."""
    with _lock:
        if _waiting:
            _hooks.append(hook)
            return
    hook()


class _Waiting(ModuleType):
    """A module that nobody has used yet."""

    def __getattr__(self, name: str) -> Any:
        # Python itself asks modules for names of this kind, and whoever looks through all of them.
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        import_jax()
        return getattr(self, name)


class _Finder:
    """Finds modules inside JAX, which cannot be imported before JAX itself."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, _: Any = None) -> ModuleSpec | None:
        """As an entry of `sys.meta_path`."""
        if not name.startswith("jax."):
            return None
        import_jax()
        if (module := sys.modules.get(name)) is not None:
            return ModuleSpec(name, _There(module))
        return PathFinder.find_spec(name, path)


class _There(Loader):
    """Loads a module that is there by now, as it was."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, _: ModuleSpec) -> ModuleType:
        """It."""
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it was run."""
        module.__spec__ = self.spec


def _places(package: ModuleSpec) -> Sequence[str]:
    return package.submodule_search_locations or ()


def _on_a_cpu() -> bool:
    """Whether JAX, as it is installed and set, would run on the CPU alone, as one process."""
    asked = os.environ.get(_PLATFORMS, "")
    others = [name for name in os.environ if name.startswith(_SETTINGS) and name != _PLATFORMS]
    return not others and (asked == "cpu" or not (asked or _has_others() or _has_plugins()))


def _has_others() -> bool:
    """Whether the machine has devices beside its CPU."""
    return any(next(Path("/dev").glob(name), None) is not None for name in _OTHERS)


def _has_plugins() -> bool:
    """Whether anything is installed that JAX may find other devices with."""
    if any(find_spec(name) is not None for name in _PLUGINS):
        return True
    return any(
        "jax_plugins" in _text(path)
        for folder in map(Path, sys.path)
        for path in folder.glob("*-info/entry_points.txt")
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
