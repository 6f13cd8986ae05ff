"""Tokenizer loading: finds the tokenizer of a checkpoint, checks it and loads it.

Tokenizer libraries are not made for untrusted files. A child process loads the files first and
encodes texts that expose pathological regular expressions and vocabularies; if it stays within its
limits, the tokenizer is loaded here too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jinfer.sandbox.safe_files import path_exists
from jinfer.sandbox.sandboxed_process import SandboxedProcess, SandboxError
from jinfer.tokenizer.gguf_tokenizer import from_gguf
from jinfer.tokenizer.huggingface_tokenizer import (
    load_tokenizer_json,
    load_vocab_merges,
    load_vocab_txt,
)
from jinfer.tokenizer.llama2c_tokenizer import load_llama2c
from jinfer.tokenizer.tokenizer_base import (
    Tokenizer,
    TokenizerError,
    library_errors,
    with_path,
)
from jinfer.tokenizer.tokenizer_config import read_config, read_file
from jinfer.tokenizer.tokenizer_json_checks import is_usual

_SENTENCEPIECE = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "spm.model",
    "source.spm",
)
# Limits of the child process.
_MEMORY = 512 << 20  # bytes, plus this for each byte of the files:
_MEMORY_PER_BYTE = 20
_SECONDS, _SECONDS_PER_BYTE = 3.0, 1e-6
_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.bin")
_PROBE_LENGTH = 4096  # characters
_LETTERS = re.compile(r"[^\W_]")


def load_tokenizer(
    path: Path,
    *,
    metadata: Mapping[str, Any] | None = None,
    vocab_size: int | None = None,
    trust: bool | None = None,
) -> Tokenizer | None:
    """Load the tokenizer of a checkpoint; None if it has none.

    In a folder, the first of these that exists: tokenizer.json; a SentencePiece model; vocab.json
    with merges.txt; vocab.txt; llama2.c's tokenizer.bin. The folder's JSON files
    (tokenizer_config.json, special_tokens_map.json, added_tokens.json, generation_config.json,
    config.json) define the special tokens.

    Args:
        path: a checkpoint folder, a GGUF file, a llama2.c .bin file (with tokenizer.bin in its
            folder), or another file of a folder.
        metadata: keys and values of a GGUF file, which are then the only source.
        vocab_size: vocabulary size from a llama2.c model's header.
        trust: False: first check the tokenizer in a sandboxed process; None: only if its
            tokenizer.json has unknown regular expressions; True: never.

    Raises:
        TokenizerError: an unusable file, with its name and the reason.
    """
    if trust is False or (trust is None and metadata is None and not _is_usual(path)):
        _check_in_sandbox(path, metadata, vocab_size)
    with with_path(path), library_errors(path, "its tokenizer cannot be used"):
        if metadata is not None:
            return from_gguf(metadata, path)
        folder = path if path.is_dir() else path.parent
        if path.suffix == ".bin" and path.is_file() and vocab_size is not None:
            file = folder / "tokenizer.bin"
            return load_llama2c(file, vocab_size) if path_exists(file) else None
        return _load_folder(folder, vocab_size)


def _is_usual(path: Path) -> bool:
    """Whether a tokenizer.json, if any, needs no check in the sandbox."""
    file = (path if path.is_dir() else path.parent) / "tokenizer.json"
    return not path_exists(file) or is_usual(read_file(file))


def _load_folder(folder: Path, vocab_size: int | None) -> Tokenizer | None:
    config = read_config(folder)
    if path_exists(folder / "tokenizer.json"):
        return load_tokenizer_json(folder / "tokenizer.json", config)
    for name in _SENTENCEPIECE:
        if path_exists(folder / name):
            # Imported here, because others do not need the library.
            from jinfer.tokenizer.sentencepiece_kinds import load_sentencepiece

            return load_sentencepiece(folder / name, config)
    if path_exists(folder / "vocab.json") and path_exists(folder / "merges.txt"):
        return load_vocab_merges(folder, config)
    if path_exists(folder / "vocab.txt"):
        return load_vocab_txt(folder / "vocab.txt", config)
    if path_exists(folder / "tokenizer.bin"):
        return load_llama2c(folder / "tokenizer.bin", vocab_size)
    return None


def _check_in_sandbox(
    path: Path, metadata: Mapping[str, Any] | None, vocab_size: int | None
) -> None:
    """Raise `TokenizerError` unless the tokenizer can be loaded and used within limits."""
    if metadata is not None:
        metadata = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
        size = 16 * sum(len(value) for value in metadata.values() if isinstance(value, list))
    else:
        size = sum(_size(file) for file in _files(path))
    memory = _MEMORY + _MEMORY_PER_BYTE * size
    child = SandboxedProcess(__name__, memory=memory, answer_bytes=1 << 16)
    try:
        reason = child.ask([str(path), metadata, vocab_size], _SECONDS + _SECONDS_PER_BYTE * size)
    except SandboxError as error:
        raise TokenizerError(f"{path}: its tokenizer {error}; it is not used") from None
    except (TypeError, ValueError) as error:
        raise TokenizerError(f"{path}: its tokenizer is not readable: {error}"[:300]) from None
    finally:
        child.close()
    if reason:
        raise TokenizerError(reason)


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
    """In the child process: say why the tokenizer is unusable; empty if it is usable."""
    path, metadata, vocab_size = question
    try:
        found = load_tokenizer(Path(path), metadata=metadata, vocab_size=vocab_size, trust=True)
        if found is not None:
            for text in _probe_texts(found):
                found.decode(found.encode(text))
    except TokenizerError as error:
        return str(error)
    return ""


def _probe_texts(found: Tokenizer) -> Iterator[str]:
    """Texts that are slow in the worst case: runs of a letter followed by something else."""
    backend = getattr(found, "backend", None)
    parts = () if backend is None else (backend.normalizer, backend.pre_tokenizer)
    state = "".join(part.__getstate__().decode() for part in parts if part is not None)
    letters = dict.fromkeys("a 1A.\n" + "".join(_LETTERS.findall(state)[:64]))
    for letter in letters:
        for length in (_PROBE_LENGTH >> 6, _PROBE_LENGTH):
            yield letter * length + "\x01"
    yield "ab" * _PROBE_LENGTH
    yield "a " * _PROBE_LENGTH + "!"
    yield "Hello 東京, 12345 'tis é\u0301\u200d🙂\n\n\t" * 64
