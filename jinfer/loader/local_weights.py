"""Local weights: whether a model is on this machine, without a network and without opening it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinfer.loader.resolve_name import full_source
from jinfer.loader.sources import SourceError, locate
from jinfer.modelspec.spec_files import read_toml
from jinfer.modelspec.toml_tables import check_text

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
