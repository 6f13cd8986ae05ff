"""Every kind of tokenizer file against ids of the reference implementations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jinfer.tokenizer import Tokenizer, load_tokenizer

GOLDENS = Path(__file__).parents[1] / "goldens"
KINDS = (
    "tok_gpt2",
    "tok_gpt2_slow",
    "tok_llama3",
    "tok_spm_bpe",
    "tok_spm_unigram_t5",
    "tok_wordpiece",
    "tok_llama2c",
    "tok_m2m100",
)
# The references of these two libraries and of run.c read control tokens in a text as text.
LITERAL = ("tok_spm_bpe", "tok_spm_unigram_t5", "tok_llama2c", "tok_m2m100")


def tokenizer(name: str) -> Tokenizer:
    found = load_tokenizer(GOLDENS / name)
    assert found is not None
    return found


def expected(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((GOLDENS / name / "expected.json").read_text("utf-8"))
    return values


@pytest.mark.parametrize("name", KINDS)
def test_ids(name: str) -> None:
    found = tokenizer(name)
    cases = expected(name)["cases"]
    ids = [found.encode(case["text"], parse_special=name not in LITERAL) for case in cases]
    assert ids == [case["ids"] for case in cases]


@pytest.mark.parametrize("name", KINDS)
def test_special_tokens_in_a_text_become_their_ids_or_stay_text(name: str) -> None:
    found = tokenizer(name)
    token, id = next((token, id) for token, id in found.special.control.items())
    assert id in found.encode(f"a {token} b", special=False)
    assert id not in found.encode(f"a {token} b", special=False, parse_special=False)


@pytest.mark.parametrize("name", KINDS)
def test_decoded(name: str) -> None:
    found = tokenizer(name)
    for case in expected(name)["cases"]:
        if case["decoded"] is not None:
            keep = "<|im_start|>" in case["decoded"] and "gpt2" in name  # its reference keeps them
            assert found.decode(case["ids"], skip_special=not keep) == case["decoded"]


def test_pair_of_texts() -> None:
    pair = expected("tok_wordpiece")["pair"]
    ids, types = tokenizer("tok_wordpiece").encode_pair(pair["a"], pair["b"])
    assert (ids, types) == (pair["ids"], pair["type_ids"])


def test_languages() -> None:
    found = tokenizer("tok_m2m100")
    reference = expected("tok_m2m100")["lang_ids"]
    assert {name: found.language_id(name) for name in reference} == reference
    english = found.encode("Hello world")
    assert found.encode("Hello world", language="zh") == [reference["zh"], *english[1:]]
    assert found.decode(english) == "Hello world"


@pytest.mark.parametrize(
    ("name", "bos", "eos", "pad", "unk", "mask"),
    [
        ("tok_gpt2", 0, (2,), 2, 0, None),
        ("tok_gpt2_slow", 0, (0,), None, 0, None),
        ("tok_llama3", 0, (), None, None, None),
        ("tok_spm_bpe", 1, (2,), None, 0, None),
        ("tok_spm_unigram_t5", None, (1,), 0, 2, None),
        ("tok_wordpiece", None, (), 0, 1, 4),
        ("tok_llama2c", 1, (2,), None, 0, None),
        ("tok_m2m100", 0, (2,), 1, 3, None),
    ],
)
def test_special_ids(
    name: str, bos: int | None, eos: tuple[int, ...], pad: int | None, unk: int | None, mask: Any
) -> None:
    found = tokenizer(name)
    ids = (found.bos_id, found.eos_ids, found.pad_id, found.unk_id, found.mask_id)
    assert ids == (bos, eos, pad, unk, mask)


def test_sentinels_of_t5() -> None:
    found = tokenizer("tok_spm_unigram_t5")
    assert found.vocab_size == 710
    assert [found.id(f"<extra_id_{k}>") for k in (0, 9)] == [709, 700]
    assert found.encode("Hello <extra_id_0> world")[-4:] == [709, 261, 50, 112, 1][-4:]


@pytest.mark.parametrize("name", KINDS)
def test_token_and_id_are_inverse(name: str) -> None:
    found = tokenizer(name)
    names = [found.token(id) for id in range(found.vocab_size)]
    first = {token: id for id, token in reversed(list(enumerate(names))) if token}
    assert {token: found.id(token) for token in first} == first
    assert found.token(found.vocab_size) == ""
    assert found.id("no such token") is None
