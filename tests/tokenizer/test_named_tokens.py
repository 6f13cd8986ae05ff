"""Tokens that tokenizer.json calls ordinary and tokenizer_config.json gives a name: special.

What is left after decoding without special tokens is what transformers 5.24 leaves
(`AutoTokenizer.from_pretrained(folder).decode(ids, skip_special_tokens=True)`).
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from jinfer.tokenizer.huggingface_tokenizer import HuggingFaceTokenizer, load_tokenizer_json
from jinfer.tokenizer.tokenizer_config import read_config

WORDS = ("<bos>", "<eos>", "<pad>", "<unk>", "<img>", "<aud>", "<tool>", "<other>")
FIRST = 9  # the id of the first of them
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}

type Config = dict[str, Any]


def token(content: str, special: bool | None = None) -> Config:
    """A token as transformers writes it."""
    stated = {} if special is None else {"special": special}
    return {"content": content, **FLAGS, "__type": "AddedToken", **stated}


ORDINARY = {str(FIRST + i): token(word, False) for i, word in enumerate(WORDS)}
# What tokenizer_config.json says, and the words that transformers leaves in the text.
CASES: dict[str, tuple[Config, str]] = {
    "nothing": ({}, "bos eos pad unk img aud tool other"),
    "table of extra tokens": (
        {"extra_special_tokens": {"image_token": "<img>", "audio_token": "<aud>"}},
        "bos eos pad unk tool other",
    ),
    "table of extra tokens as objects": (
        {"extra_special_tokens": {"a": token("<img>", True), "b": token("<aud>", False)}},
        "bos eos pad unk tool other",
    ),
    "list of extra tokens": (
        {"extra_special_tokens": ["<img>", "<aud>"]},
        "bos eos pad unk img aud tool other",
    ),
    "list of extra tokens as objects": (
        {"extra_special_tokens": [token("<img>", True), token("<aud>", False)]},
        "bos eos pad unk img aud tool other",
    ),
    "list of additional tokens": (
        {"additional_special_tokens": ["<img>", token("<tool>", True)]},
        "bos eos pad unk img aud tool other",
    ),
    "table of additional tokens": (
        {"additional_special_tokens": {"image_token": "<img>"}},
        "bos eos pad unk aud tool other",
    ),
    "table of extra tokens, list of additional ones": (
        {"extra_special_tokens": {"a": "<img>"}, "additional_special_tokens": ["<aud>"]},
        "bos eos pad unk aud tool other",
    ),
    "names as texts": (
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"},
        "img aud tool other",
    ),
    "names as objects": (
        {
            "bos_token": token("<bos>", True),
            "eos_token": token("<eos>", False),
            "pad_token": token("<pad>"),
            "unk_token": token("<unk>", True),
        },
        "img aud tool other",
    ),
    "other names": (
        {"image_token": "<img>", "audio_token": token("<aud>", True)},
        "bos eos pad unk tool other",
    ),
    "names of the model": (
        {"model_specific_special_tokens": {"image_token": "<img>"}},
        "bos eos pad unk aud tool other",
    ),
    "all are ordinary in added_tokens_decoder": (
        {
            "added_tokens_decoder": ORDINARY,
            "extra_special_tokens": {"image_token": "<img>"},
            "eos_token": "<eos>",
        },
        "bos pad unk aud tool other",
    ),
    "a list beside added_tokens_decoder": (
        {
            "added_tokens_decoder": ORDINARY,
            "extra_special_tokens": ["<img>"],
            "eos_token": "<eos>",
        },
        "bos pad unk img aud tool other",
    ),
}


def load(folder: Path, config: Config) -> HuggingFaceTokenizer:
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate("abcdefgh ")}, merges=[]))
    backend.decoder = decoders.Fuse()
    described = json.loads(backend.to_str())
    described["added_tokens"] = [
        {"id": int(id), "content": one["content"], **FLAGS, "special": False}
        for id, one in ORDINARY.items()
    ]
    (folder / "tokenizer.json").write_text(json.dumps(described))
    full = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(full))
    return load_tokenizer_json(folder / "tokenizer.json", read_config(folder))


@pytest.mark.parametrize("case", CASES)
def test_text_without_special_tokens(tmp_path: Path, case: str) -> None:
    config, left = CASES[case]
    tokenizer = load(tmp_path, config)
    ids = [0, *range(FIRST, FIRST + len(WORDS)), 1]
    expected = "".join(f"<{word}>" for word in left.split())
    assert tokenizer.decode(ids, skip_special=True) == f"a{expected}b"
    assert tokenizer.decode(ids, skip_special=False) == f"a{''.join(WORDS)}b"


def test_named_tokens_are_hidden_in_texts_of_users(tmp_path: Path) -> None:
    """As other special tokens: only where they are to be parsed; ordinary ones are everywhere."""
    tokenizer = load(tmp_path, {"extra_special_tokens": {"image_token": "<img>"}})
    img, aud = FIRST + WORDS.index("<img>"), FIRST + WORDS.index("<aud>")
    assert tokenizer.encode("a<img>b", special=False, parse_special=True) == [0, img, 1]
    assert img not in tokenizer.encode("a<img>b", special=False, parse_special=False)
    assert tokenizer.encode("a<aud>b", special=False, parse_special=False) == [0, aud, 1]
