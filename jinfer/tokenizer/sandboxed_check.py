"""Sandboxed tokenizer check: tries an untrusted tokenizer in a child process before it is loaded.

Tokenizer libraries are not made for untrusted files. The child process loads the files and encodes
texts that expose pathological regular expressions and vocabularies; if it stays within its limits,
the tokenizer is loaded here too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jinfer.sandbox.sandboxed_process import SandboxedProcess, SandboxError
from jinfer.tokenizer.tokenizer_base import TokenizerError

_MEMORY = 512 << 20  # bytes, plus this for each byte of the files:
_MEMORY_PER_BYTE = 20
_CHILD = "jinfer.tokenizer.sandboxed_check_child"
_SECONDS, _SECONDS_PER_BYTE = 3.0, 1e-6
_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.bin")


def check_in_sandbox(
    path: Path, metadata: Mapping[str, Any] | None, vocab_size: int | None
) -> None:
    """Raises `TokenizerError` unless the tokenizer can be loaded and used within limits.

    Args:
        path, metadata, vocab_size: as in `load_tokenizer`.
    """
    told = None
    if metadata is not None:
        told = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
        size = 16 * sum(len(value) for value in told.values() if isinstance(value, list))
    else:
        size = sum(_size(file) for file in _files(path))
    child = SandboxedProcess(_CHILD, memory=_MEMORY + _MEMORY_PER_BYTE * size, answer_bytes=1 << 16)
    try:
        said = child.ask([str(path), told, vocab_size], _SECONDS + _SECONDS_PER_BYTE * size)
    except SandboxError as error:
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
