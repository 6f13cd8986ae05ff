"""Tokens beside llama.cpp's, for the vocabularies that its source has in models/.

A package of llama-cpp-python's source has them too (vendor/llama.cpp/models). Two variables of the
environment say where things are: `JINFER_PEER_PYTHON`, a Python that has `llama_cpp`, and
`JINFER_PEER_VOCABULARIES`, the folder of the ggml-vocab-*.gguf files.
"""

from __future__ import annotations

import json
import os
import random
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jinfer.cli.bench.llama_peer import ask
from jinfer.loader.checkpoint.gguf import open_gguf
from jinfer.tokenizer import Tokenizer, load_tokenizer

TEXTS = 300
NAMES = (
    *("aquila", "baichuan", "bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon"),
    *("gemma-4", "gpt-2", "gpt-neox", "llama-bpe", "llama-spm", "mpt", "nomic-bert-moe", "phi-3"),
    *("qwen2", "qwen35", "refact", "starcoder"),
)
FRAGMENTS = (
    *("Hello", "world", " the", "The answer is ", "don't", "I'LL", "we've", "MiXeDCase", "naïve"),
    *("Straße", "ÉCOLE", "cafe\u0301", "A\u030angstro\u0308m", "ﬁne", "①②", "½", "e\u0323\u0301"),
    *("東京都", "日本語テスト", "你好。世界", "한국어", "\u1112\u1161\u11ab", "ประเทศไทย", "नमस्ते"),
    *("مرحبا بالعالم", "שלום", "Привет, мир", "Ελλάδα", "Հայերեն", "ქართული", "🙂", "👩‍👩‍👧", "🇩🇪"),
    *("1234567", " 3.14159", "0x1F", "٣٤٥", "1,000,000", "2026-11-27", "v1.2.3-rc4", "বাংলা"),
    *(" ", "  ", "    ", "         ", "\n", "\n\n", "\n \n", "\r\n", "\t", "\t\t", " \n", "\u00a0"),
    *("!", "?!", "...", "--", "==", "!=", "->", "(", ")", "{}", "[x]", '"', "'", "`", "\\", "@#"),
    *("def f(x):\n    return x + 1", "<b>bold</b>", "</s>", "<s>", "<|x|>", "snake_case", "▁"),
    *("http://a.b/c?d=e&f=g", "user@example.com", "camelCase", "a_b", "x²", "\u200b", "\ufeff"),
)
_HANGUL = re.compile("[\u1100-\u11ff\u3130-\u318f\uac00-\ud7a3]")


def without_bert(text: str) -> str:
    """BERT decomposes Hangul and keeps spacing vowel signs; llama.cpp reads ▁ as its own mark."""
    kept = (c for c in text if unicodedata.category(c) != "Mc" and c != "▁")
    return _HANGUL.sub("", "".join(kept))


def composed(text: str) -> str:
    """The original tokenizers compose letters first (NFC); llama.cpp does not."""
    return unicodedata.normalize("NFC", text)


def composed_without_tag(text: str) -> str:
    """</s> is an ordinary entry of Qwen's vocabulary; llama.cpp takes it for an end by its name."""
    return composed(text).replace("</s>", "")


def ascii_spaces(text: str) -> str:
    """Of white space after a token with rstrip, llama.cpp takes only ASCII's."""
    return re.sub(r"[^\S -~\n\r\t\f\v]", " ", text)


# Texts as llama.cpp would have to be given them where it is the one that is wrong.
KNOWN: dict[str, Callable[[str], str]] = {
    "bert-bge": without_bert,
    "mpt": composed,
    "qwen2": composed_without_tag,
    "qwen35": composed_without_tag,
    "phi-3": ascii_spaces,
}


def texts_of(tokenizer: Tokenizer, seed: str) -> list[str]:
    chance = random.Random(seed)
    special = [*tokenizer.special.control, *tokenizer.special.parsed]
    some = chance.sample(special, min(len(special), 40))
    texts = []
    for _ in range(TEXTS):
        length = chance.choice((1, 2, 3, 5, 8, 13, 21))
        pieces = [chance.choice(FRAGMENTS) for _ in range(length)]
        for _ in range(chance.choice((0, 0, 1, 2)) if some else 0):
            pieces.insert(chance.randrange(len(pieces) + 1), chance.choice(some))
        texts.append("".join(pieces))
    return texts


def peer() -> tuple[str, Path]:
    """The Python and the folder. Skips where they are not there."""
    python = os.environ.get("JINFER_PEER_PYTHON")
    folder = os.environ.get("JINFER_PEER_VOCABULARIES")
    if not python or not folder:
        pytest.skip("JINFER_PEER_PYTHON and JINFER_PEER_VOCABULARIES do not name llama.cpp")
    return python, Path(folder)


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_ends_are_llama_cpps(name: str, tmp_path: Path) -> None:
    python, folder = peer()
    file = folder / f"ggml-vocab-{name}.gguf"
    if not file.is_file():
        pytest.skip(f"{file} is not there")
    found = load_tokenizer(file, metadata=dict(open_gguf(file).metadata))
    assert found is not None
    mend = KNOWN.get(name, lambda text: text)
    texts = texts_of(found, os.environ.get("JINFER_PEER_SEED", name))
    mended = [mend(text) for text in texts]
    out = tmp_path / "ids.json"
    requested = {"model": str(file), "texts": [*texts, *mended], "out": str(out)}
    ask(python, {"tokenize": requested})
    theirs: dict[str, Any] = json.loads(out.read_text("utf-8"))
    for kind in ("plain", "parsed"):
        ours = [found.encode(text, special=False, parse_special=kind == "parsed")
                for text in (*texts, *mended)]  # fmt: skip
        assert ours[TEXTS:] == theirs[kind][TEXTS:]
        for text, other, mine, its in zip(texts, mended, ours, theirs[kind], strict=False):
            assert mine == its or text != other, (kind, text)
        if mend is composed:
            assert ours[:TEXTS] == theirs[kind][TEXTS:]
    wrong = found.id("</s>") if mend is composed_without_tag else None
    assert set(found.eos_ids) == {*theirs["ends"]} - {wrong}
