"""Model names: those of the catalogue, and `owner/name` of a model hub."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from pathlib import Path

from jinfer.modelspec.spec_files import model_specs
from jinfer.opening.source_errors import SourceError
from jinfer.opening.sources import names_in

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
    known = model_specs()
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
