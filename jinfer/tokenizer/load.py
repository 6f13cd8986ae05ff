"""Tokenizer loading: finds the tokenizer of a checkpoint and loads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinfer.sandbox.safe_files import path_exists
from jinfer.tokenizer.gguf_tokenizer import from_gguf
from jinfer.tokenizer.huggingface_tokenizer import (
    load_tokenizer_json,
    load_vocab_merges,
    load_vocab_txt,
)
from jinfer.tokenizer.llama2c_tokenizer import load_llama2c
from jinfer.tokenizer.sandboxed_check import check_in_sandbox
from jinfer.tokenizer.tokenizer_base import Tokenizer, library_errors, with_path
from jinfer.tokenizer.tokenizer_config import read_config, read_file
from jinfer.tokenizer.tokenizer_json_checks import is_usual

_SENTENCEPIECE = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "spm.model",
    "source.spm",
)


def load_tokenizer(
    path: Path,
    *,
    metadata: Mapping[str, Any] | None = None,
    vocab_size: int | None = None,
    trust: bool | None = None,
) -> Tokenizer | None:
    """The tokenizer of a checkpoint; None if it has none.

    In a folder, the first of these that exists: tokenizer.json; a SentencePiece model; vocab.json
    with merges.txt; vocab.txt; llama2.c's tokenizer.bin. The JSON files beside it
    (tokenizer_config.json, special_tokens_map.json, added_tokens.json, generation_config.json,
    config.json) define the special tokens.

    Args:
        path: a checkpoint folder, a GGUF file, a llama2.c .bin file (with tokenizer.bin beside it),
            or another file of a folder.
        metadata: keys and values of a GGUF file, which are then the only source.
        vocab_size: vocabulary size from a llama2.c model's header.
        trust: False: first check the tokenizer in a sandboxed process; None: only if its
            tokenizer.json has unknown regular expressions; True: never.

    Raises:
        TokenizerError: an unusable file, with its name and the reason.
    """
    if trust is False or (trust is None and metadata is None and not _is_usual(path)):
        check_in_sandbox(path, metadata, vocab_size)
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
