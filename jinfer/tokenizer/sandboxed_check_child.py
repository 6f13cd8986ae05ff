"""Child process of `sandboxed_check`: loads a tokenizer and encodes pathological texts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinfer.tokenizer.load import load_tokenizer
from jinfer.tokenizer.tokenizer_base import Tokenizer, TokenizerError

_LENGTH = 4096  # characters of a probe text
_LETTERS = re.compile(r"[^\W_]")


def answer(question: list[Any]) -> str:
    """Why the tokenizer is unusable; empty if it is usable."""
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
    """Probe texts that are slow in the worst case: runs of a letter followed by something else."""
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
