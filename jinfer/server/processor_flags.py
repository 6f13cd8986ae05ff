"""Values of the flag --logits-processor: functions of the server's owner, by name."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from jinfer.loader.sources import SourceError

_NAMED = re.compile(r"([\w.-]+)=([\w.]+):([\w.]+)")


def named_functions(texts: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """Functions by the names that requests call them.

    Modules are looked for in the current folder, too.

    Args:
        texts: NAME=MODULE:FUNCTION.

    Raises:
        SourceError: a function that cannot be imported, or two of one name.
    """
    found: dict[str, Callable[..., Any]] = {}
    for text in texts:
        if (given := _NAMED.fullmatch(text)) is None:
            raise SourceError(f"--logits-processor {text[:200]}: write NAME=MODULE:FUNCTION")
        if given[1] in found:
            raise SourceError(f"--logits-processor {given[1]}: there are two of that name")
        found[given[1]] = _function(text, given[2], given[3])
    return found


def _function(text: str, module: str, path: str) -> Callable[..., Any]:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        value: Any = import_module(module)
        for name in path.split("."):
            value = getattr(value, name)
    except Exception as error:  # whatever the module does while it is imported
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise SourceError(f"--logits-processor {text[:200]}: {reason}") from error
    if not callable(value):
        raise SourceError(f"--logits-processor {text[:200]}: {type(value).__name__} is no function")
    return value
