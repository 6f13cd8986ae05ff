"""A tokenizer tried out in a process of its own, before this one reads it.

The libraries that run tokenizers are not made for files of strangers. The process reads the files
and encodes texts that make bad regular expressions and bad vocabularies show; if it stays within
its bounds, the same is done here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jinfer.guard.sandboxed_process import Child, ChildError
from jinfer.tokenizer.tokenizer_base import Tokenizer, TokenizerError

_MEMORY = 512 << 20  # bytes, and this for each of the files':
_MEMORY_PER_BYTE = 20
_SECONDS, _SECONDS_PER_BYTE = 3.0, 1e-6
_LENGTH = 4096  # letters of a text that is tried
_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.bin")
_LETTERS = re.compile(r"[^\W_]")


def vet(path: Path, metadata: Mapping[str, Any] | None, vocab_size: int | None) -> None:
    """Raises `TokenizerError` unless the tokenizer can be read and used within bounds.

    Args:
        path, metadata, vocab_size: as `load_tokenizer`.
    """
    told = None
    if metadata is not None:
        told = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
        size = 16 * sum(len(value) for value in told.values() if isinstance(value, list))
    else:
        size = sum(_size(file) for file in _files(path))
    child = Child(__name__, memory=_MEMORY + _MEMORY_PER_BYTE * size, answer_bytes=1 << 16)
    try:
        said = child.ask([str(path), told, vocab_size], _SECONDS + _SECONDS_PER_BYTE * size)
    except ChildError as error:
        raise TokenizerError(f"{path}: its tokenizer {error}; it is not used") from None
    except (TypeError, ValueError) as error:
        raise TokenizerError(f"{path}: its tokenizer is not readable: {error}"[:300]) from None
    finally:
        child.close()
    if said:
        raise TokenizerError(said)


def _files(path: Path) -> Iterator[Path]:
    folder = path if path.is_dir() else path.parent
    yield from (folder / name for name in _FILES)
    yield from folder.glob("*.model")
    yield from folder.glob("*.spm")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return 0


def answer(question: list[Any]) -> str:
    """What the process of its own does: why the tokenizer cannot be used, or nothing."""
    from jinfer.tokenizer.load import load_tokenizer

    path, metadata, vocab_size = question
    try:
        found = load_tokenizer(Path(path), metadata=metadata, vocab_size=vocab_size, trust=True)
        if found is not None:
            for text in _texts(found):
                found.decode(found.encode(text))
    except TokenizerError as error:
        return str(error)
    return ""


def _texts(found: Tokenizer) -> Iterator[str]:
    """Texts that take long where anything does: runs of a letter with something else behind."""
    backend = getattr(found, "backend", None)
    parts = () if backend is None else (backend.normalizer, backend.pre_tokenizer)
    said = "".join(part.__getstate__().decode() for part in parts if part is not None)
    letters = dict.fromkeys("a 1A.\n" + "".join(_LETTERS.findall(said)[:64]))
    for letter in letters:
        for length in (_LENGTH >> 6, _LENGTH):
            yield letter * length + "\x01"
    yield "ab" * _LENGTH
    yield "a " * _LENGTH + "!"
    yield "Hello 東京, 12345 'tis é\u0301\u200d🙂\n\n\t" * 64
