"""Incremental decoding agrees with decoding at once, for any ids."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfer.tokenizer import Tokenizer, load_tokenizer
from jinfer.tokenizer.huggingface_tokenizer import HuggingFaceTokenizer
from jinfer.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer
from tests.tokenizer.test_goldens import GOLDENS, KINDS

TEXTS = st.text(st.characters(codec="utf-8", max_codepoint=0x1FFFF), max_size=40)


@cache
def tokenizer(name: str) -> Tokenizer:
    found = load_tokenizer(GOLDENS / name)
    assert found is not None
    return found


def ids_of(found: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, with many single bytes, and some the vocabulary does not have."""
    half = [id for id in range(found.vocab_size) if found.token_bytes(id)[:1] >= b"\x80"]
    any_id = st.integers(0, found.vocab_size + 3)
    return st.lists(any_id | st.sampled_from(half) if half else any_id, max_size=30)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_pushes_join_to_decode(name: str, data: Any, skip: bool) -> None:
    found = tokenizer(name)
    prompt, ids = data.draw(ids_of(found)), data.draw(ids_of(found))
    before = found.detokenizer(skip_special=skip)
    complete = "".join(map(before.push, prompt))  # of the prompt, less a character cut in two
    after = found.detokenizer(prompt, skip_special=skip)
    pushed = [after.push(id) for id in ids]
    whole = found.decode(prompt + ids, skip_special=skip)
    assert complete + "".join(pushed) + after.flush() == whole


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_places_of_tokens(name: str, data: Any) -> None:
    """From a token's place on the text is that of it and of what follows."""
    found = tokenizer(name)
    ids = data.draw(ids_of(found))
    part, text = found.detokenizer(), found.decode(ids)
    places = []
    for id in ids:
        places.append(part.offset_of(id))
        part.push(id)
    part.flush()
    assert places == sorted(places)
    assert part.shown == len(text)
    own = [found.token_bytes(id) for id in ids]
    for number, place in enumerate(places):
        assert place <= len(text)
        before, after = b"".join(own[:number]), b"".join(own[number:])
        whole = before.decode("utf-8", "ignore").encode() == before  # no character is cut there
        if whole and not (found.strip_space and not before.strip(b" ")):
            assert text[place:] == after.decode("utf-8", "replace")


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_no_push_shows_half_a_character(name: str, text: str) -> None:
    found = tokenizer(name)
    ids = found.encode(text.replace("\ufffd", ""), special=False, parse_special=False)
    if "\ufffd" in found.decode(ids):  # a token of several bytes was cut by normalisation
        return
    part = found.detokenizer()
    assert not any("\ufffd" in part.push(id) for id in ids)
    assert part.flush() == ""


@pytest.mark.parametrize("name", ["tok_gpt2", "tok_gpt2_slow", "tok_llama3", "tok_spm_bpe"])
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_text_comes_back(name: str, text: str) -> None:
    found = tokenizer(name)
    if name.startswith("tok_gpt2") or name == "tok_llama3":
        known = set("".join(chr(n) for n in range(128)))  # this small alphabet lacks some bytes
        text = "".join(letter for letter in text if letter in known)
    else:
        text = text.replace("▁", "").replace("\0", "")
    assert found.decode(found.encode(text, parse_special=False)) == text


@pytest.mark.parametrize("name", ["tok_spm_bpe", "tok_spm_unigram_t5"])
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_decode_agrees_with_sentencepiece(name: str, text: str) -> None:
    found = tokenizer(name)
    assert isinstance(found, SentencePieceTokenizer)
    ids = found.encode(text, special=False, parse_special=False)
    assert found.decode(ids) == found._processor.decode(ids)


def test_a_word_after_the_prompt_keeps_its_space() -> None:
    found = tokenizer("tok_spm_bpe")
    hello, world = (found.encode(word, special=False) for word in ("Hello", "world"))
    assert found.decode(hello) == "Hello"
    after = found.detokenizer([1, *hello])
    assert "".join(map(after.push, world)) == " world"
    first = found.detokenizer([1])  # nothing of the text is in the prompt yet
    assert "".join(map(first.push, world)) == "world"


def test_a_character_of_several_tokens_comes_with_the_last() -> None:
    found = tokenizer("tok_spm_bpe")
    ids = found.encode("東", special=False)
    part = found.detokenizer()
    assert [part.push(id) for id in ids] == [""] * (len(ids) - 1) + ["東"]
    cut = found.detokenizer(ids[:-1])
    assert cut.push(ids[-1]) == "東"
    assert found.detokenizer(ids[:-1]).flush() == "\ufffd"


def test_lone_surrogates_are_replaced() -> None:
    for name in KINDS:
        found = tokenizer(name)
        assert found.encode("a\ud800b") == found.encode("a\ufffdb")
        assert found.encode("\ud83d\ude42") == found.encode("🙂")


@pytest.mark.parametrize("name", ["tok_gpt2", "tok_llama3", "tok_wordpiece"])
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_decode_agrees_with_tokenizers(name: str, text: str) -> None:
    found = tokenizer(name)
    assert isinstance(found, HuggingFaceTokenizer)
    ids = found.encode(text)
    assert found.decode(ids) == found.backend.decode(ids)
