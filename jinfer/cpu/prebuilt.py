"""The custom calls that a wheel brings, compiled for all instructions by `make wheel`.

One library serves many versions of jaxlib: XLA takes calls that were compiled against the headers
of an older one (`xla/ffi/api/c_api.h`). Unlike a cache's folder, the package's is not asked whose
it is: who may write there may change its Python as well.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

from jinfer.cpu.library_cache import LIBRARY, is_whole, write_hash
from jinfer.xla.calls import include_dir

FOLDER = Path(__file__).parent / "prebuilt_library"
_MADE_FROM = "made_from.json"
_NUMBERS = ("MAJOR", "MINOR")
# How many minor versions of its interface XLA takes back: 0.4 took 0.1 and said so of 0.0.
_MINORS = 3
_refused: list[Path] = []  # by this process


@dataclass(frozen=True)
class Interface:
    """A version of XLA's interface for custom calls."""

    major: int
    minor: int

    def takes(self, made_for: Interface) -> bool:
        """Whether a jaxlib of this version takes what was compiled against headers of another."""
        return self.major == made_for.major and 0 <= self.minor - made_for.minor <= _MINORS


@functools.cache
def interface(headers: str) -> Interface:
    """What XLA's headers say; `headers` has the folder `xla`."""
    text = Path(headers, "xla", "ffi", "api", "c_api.h").read_text(encoding="utf-8")
    numbers = (re.search(rf"^#define XLA_FFI_API_{n} (\d+)", text, re.M) for n in _NUMBERS)
    return Interface(*(int(found[1]) if found else 0 for found in numbers))


def find(key: str) -> Path | None:
    """The library that came with the package: of this key, for the installed jaxlib, and whole."""
    path = FOLDER / LIBRARY
    if path in _refused or not path.exists():
        return None
    try:
        made_from = json.loads((FOLDER / _MADE_FROM).read_text(encoding="utf-8"))
        made_for, here = Interface(*made_from["interface"]), interface(include_dir())
        usable = made_from["key"] == key and here.takes(made_for)
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return path if usable and is_whole(path) else None


def refuse(path: Path) -> bool:
    """Whether a path is that of the package's library, which this process then looks past."""
    if path.parent != FOLDER:
        return False
    _refused.append(path)
    return True


def seal(library: Path, key: str, made_for: Interface) -> None:
    """Writes beside a library what `find` asks for."""
    write_hash(library)
    made_from = {"key": key, "interface": [made_for.major, made_for.minor]}
    (library.parent / _MADE_FROM).write_text(json.dumps(made_from) + "\n", encoding="utf-8")
