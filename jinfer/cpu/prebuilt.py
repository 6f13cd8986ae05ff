"""Prebuilt library: the custom calls of a wheel, for all instruction sets (`make wheel`).

One library serves many versions of jaxlib: XLA accepts calls compiled against the headers of an
older one (`xla/ffi/api/c_api.h`). Unlike the cache folder's, the package folder's ownership is not
checked: write access to it includes the package's Python.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

import jax

from jinfer.cpu.library_cache import LIBRARY
from jinfer.disk_cache import is_intact, write_digest

FOLDER = Path(__file__).parent / "prebuilt_library"
_MADE_FROM = "made_from.json"
_NUMBERS = ("MAJOR", "MINOR")
# Minor versions for which XLA stays compatible: 0.4 accepted 0.1 and rejected 0.0.
_MINORS = 3
_refused: list[Path] = []  # libraries that this process could not load


@dataclass(frozen=True)
class Interface:
    """A version of XLA's interface for custom calls."""

    major: int
    minor: int

    def accepts(self, made_for: Interface) -> bool:
        """Whether a jaxlib of this version accepts calls compiled for another."""
        return self.major == made_for.major and 0 <= self.minor - made_for.minor <= _MINORS


@functools.cache
def interface(headers: str) -> Interface:
    """The version of XLA's headers, in the folder `xla` of `headers`."""
    text = Path(headers, "xla", "ffi", "api", "c_api.h").read_text(encoding="utf-8")
    numbers = (re.search(rf"^#define XLA_FFI_API_{n} (\d+)", text, re.M) for n in _NUMBERS)
    return Interface(*(int(match[1]) if match else 0 for match in numbers))


def find(key: str) -> Path | None:
    """The package's library if it has this key, fits the installed jaxlib and is intact."""
    path = FOLDER / LIBRARY
    if path in _refused or not path.exists():
        return None
    try:
        made_from = json.loads((FOLDER / _MADE_FROM).read_text(encoding="utf-8"))
        made_for, here = Interface(*made_from["interface"]), interface(jax.ffi.include_dir())
        usable = made_from["key"] == key and here.accepts(made_for)
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return path if usable and is_intact(FOLDER) else None


def refuse(path: Path) -> bool:
    """Whether a path is the package's library, which this process then ignores."""
    if path.parent != FOLDER:
        return False
    _refused.append(path)
    return True


def seal(library: Path, key: str, made_for: Interface) -> None:
    """Write the files next to a library that `find` checks."""
    made_from = {"key": key, "interface": [made_for.major, made_for.minor]}
    (library.parent / _MADE_FROM).write_text(json.dumps(made_from) + "\n", encoding="utf-8")
    write_digest(library.parent)
