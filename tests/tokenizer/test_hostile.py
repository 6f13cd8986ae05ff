"""Tokenizer files made to cost much: refused soon, with an error that names the file."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jinfer.tokenizer import Tokenizer, TokenizerError, load_tokenizer

GOLDENS = Path(__file__).parents[1] / "goldens"
BASE: dict[str, Any] = json.loads((GOLDENS / "tok_llama3/tokenizer.json").read_text("utf-8"))
TEXT = "a" * 3000 + " Hello"


def split(pattern: str) -> dict[str, Any]:
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return {"pre_tokenizer": {**step, "invert": False}}


def replacing(pattern: dict[str, str], content: str, times: int) -> dict[str, Any]:
    step = {"type": "Replace", "pattern": pattern, "content": content}
    return {"normalizer": {"type": "Sequence", "normalizers": [step] * times}}


def model(**changes: Any) -> dict[str, Any]:
    return {"model": {**BASE["model"], **changes}}


WORDPIECE: dict[str, Any] = {
    "model": {
        "type": "WordPiece",
        "unk_token": "a",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 10**12,
        "vocab": {"a": 0, "##a": 1},
    },
    **dict.fromkeys(("pre_tokenizer", "post_processor", "decoder")),
    "added_tokens": [],
}
FRAME = {
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "X", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {"X": {"id": "X", "ids": [2**31] * 1000, "tokens": ["X"] * 1000}},
    }
}


def folder(path: Path, changes: dict[str, Any]) -> Path:
    (path / "tokenizer.json").write_text(json.dumps({**BASE, **changes}))
    return path


def used(path: Path, **options: Any) -> Tokenizer:
    """A tokenizer that has been loaded and used. Raises what either raises."""
    found = load_tokenizer(path, **options)
    assert found is not None
    found.decode(found.encode(TEXT))
    return found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (replacing({"String": "a"}, "aa", 40), r"makes a text 1\.1e\+12 times as long"),
        (replacing({"Regex": "."}, "aaaa", 4), "makes a text 256 times as long"),
        (replacing({"String": ""}, "a", 1), "a Replace of nothing"),
        (replacing({"String": "a"}, "b", 1000), "has 1000 steps before its model"),
        (model(vocab={**BASE["model"]["vocab"], "huge": 2**31}), "has a token of id 2147483648"),
        (model(vocab={**BASE["model"]["vocab"], "a": 2**31}), "has a token of id 2147483648"),
        (split("(a|a){22}[bc]"), "its tokenizer takes too long"),
        (split("(a+)+[bc]"), "cannot encode this text: Onig: Regex search error"),
        (split("((((a{1,1000}){1,1000}){1,1000}){1,1000})[bc]"), "tokenizer"),
        (WORDPIECE, "max_input_chars_per_word is 1000000000000; at most 1000"),
        (FRAME, "puts other tokens around a text than it has"),
        ({"normalizer": {"type": "Sequence", "normalizers": 3}}, "not a tokenizer.json"),
    ],
)
def test_refused_soon(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    begun = time.monotonic()
    with pytest.raises(TokenizerError, match=words) as error:
        used(folder(tmp_path, changes))
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)
    assert time.monotonic() - begun < 30  # a third of it where the machine has nothing else to do


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"normalizer": {"type": "Upper"}}, "normalizer: the kind 'Upper' is not known"),
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digit"}]}},
            "pre_tokenizer: the kind 'Digit' is not known",
        ),
        ({"post_processor": {"type": "Frame"}}, "post_processor: the kind 'Frame' is not known"),
        ({"decoder": {"type": "BPE"}}, "decoder: the kind 'BPE' is not known"),
        ({"decoder": {"kind": "Fuse"}}, "decoder: the kind None is not known"),
        (model(type="SentencePiece"), "model: the kind 'SentencePiece' is not known"),
        ({"normalizer": {"type": "Replace"}}, "normalizer: Replace: missing field `pattern`"),
        ({"pre_tokenizer": {"type": "Split"}}, "pre_tokenizer: Split: missing field `pattern`"),
    ],
)
def test_unknown_parts_of_tokenizer_json_are_named(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(TokenizerError) as error:
        used(folder(tmp_path, changes))
    assert str(error.value).startswith(f"{tmp_path / 'tokenizer.json'}: {words}")
    assert "\n" not in str(error.value)


def test_a_panic_is_a_tokenizer_error(tmp_path: Path) -> None:
    """pyo3's PanicException is no Exception."""
    with pytest.raises(TokenizerError, match="retry-limit-in-match over"):
        used(folder(tmp_path, split("(a+)+[bc]")), trust=True)


@pytest.mark.parametrize("prefix", ["\0", "a", "##", "é"])
def test_merges_are_not_cut_inside_a_letter(tmp_path: Path, prefix: str) -> None:
    """The library ends the process there, or panics; with a key that is hidden too."""
    folder(tmp_path, model(continuing_subword_prefix=prefix))
    file = tmp_path / "tokenizer.json"
    for text in (file.read_text(), file.read_text().replace('"continuing_', '"c\\u006fntinuing_')):
        file.write_text(text)
        with pytest.raises(TokenizerError, match="which is its continuing_subword_prefix"):
            load_tokenizer(tmp_path, trust=True)


def test_a_hidden_expression_is_tried_too(tmp_path: Path) -> None:
    folder(tmp_path, split("(a|a){22}[bc]"))
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace('"Regex"', '"\\u0052egex"'))
    with pytest.raises(TokenizerError, match="takes too long"):
        load_tokenizer(tmp_path)


def test_sandboxed_tokenizer_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from jinfer.tokenizer import load

    tried: list[Path] = []

    def count(path: Path, *rest: Any) -> None:
        tried.append(path)
        known(path, *rest)

    known: Callable[..., None] = load.__dict__["_check_in_sandbox"]
    monkeypatch.setattr(load, "_check_in_sandbox", count)
    for number, name in enumerate(("tok_llama3", "tok_spm_bpe", "tok_wordpiece"), 1):
        usual = load_tokenizer(GOLDENS / name)
        assert len(tried) == number - 1
        careful = load_tokenizer(GOLDENS / name, trust=False)
        assert len(tried) == number
        assert usual is not None
        assert careful is not None
        assert careful.encode(TEXT) == usual.encode(TEXT)


def test_many_tokens_are_added_in_linear_time(tmp_path: Path) -> None:
    """One by one, 5,000 of them took six seconds."""
    added = {str(600 + n): {"content": f"<|t{n}|>", "special": True} for n in range(20_000)}
    folder(tmp_path, {})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    begun = time.thread_time()
    assert used(tmp_path).vocab_size == 20_600
    assert time.thread_time() - begun < 20


def test_token_with_an_impossible_id(tmp_path: Path) -> None:
    folder(tmp_path, {})
    added = {"700": {"content": "<far>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(TokenizerError, match=r"has id 600, but tokenizer_config\.json says"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"bos_token": "\ud800"}, "surrogates not allowed"),
        ({"added_tokens_decoder": {"600": {"content": "\udc00"}}}, "surrogates not allowed"),
        ({"added_tokens_decoder": {"9" * 30: {"content": "x"}}}, "for an id"),
        ({"added_tokens_decoder": {"²": {"content": "x"}}}, "for an id"),
        ({"add_bos_token": [[[]]]}, "add_bos_token must be true or false"),
    ],
)
def test_wrong_configuration_next_to_a_model(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    folder(tmp_path, {})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match=words):
        used(tmp_path)


@pytest.mark.parametrize("id", ["2147483648", "10000000", "1" + "0" * 400, "-1", "1e3"])
def test_vocab_json_with_a_huge_id(tmp_path: Path, id: str) -> None:
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / "vocab.json").write_text(f'{{"a": 0, "b": {id}}}')
    with pytest.raises(TokenizerError, match=r"vocab\.json: token 'b' must have an id"):
        load_tokenizer(tmp_path)


def test_ids_with_a_gap_are_counted(tmp_path: Path) -> None:
    vocabulary = {**BASE["model"]["vocab"], "zzzz": 700}
    found = used(folder(tmp_path, model(vocab=vocabulary)))
    assert found.vocab_size == 701
    assert found.id("zzzz") == 700


def test_names_that_are_no_unicode_or_too_long(tmp_path: Path) -> None:
    folder = tmp_path / "m2m100"
    shutil.copytree(GOLDENS / "tok_m2m100", folder)
    file = folder / "vocab.json"
    vocabulary = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps({**vocabulary, "\udc00": len(vocabulary)}))
    assert used(folder).token_bytes(len(vocabulary)) == b"?"
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token": "x" * 5000}))
    with pytest.raises(TokenizerError, match="has no token 'xxx") as error:
        load_tokenizer(folder)
    assert len(str(error.value)) == 1000


def test_extra_ids_without_end(tmp_path: Path) -> None:
    shutil.copy(GOLDENS / "tok_spm_unigram_t5/spiece.model", tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"tokenizer_class": "T5Tokenizer", "extra_ids": 1000000}')
    with pytest.raises(TokenizerError, match="extra_ids must be a whole number up to 10000"):
        load_tokenizer(tmp_path)
    config.write_text('{"tokenizer_class": "T5Tokenizer", "extra_ids": 10000}')
    begun = time.thread_time()
    assert used(tmp_path).vocab_size == 10_700
    assert time.thread_time() - begun < 10


FILES = ("tokenizer.json", "tokenizer.model", "vocab.txt", "tokenizer.bin", "tokenizer_config.json")


@pytest.mark.parametrize("name", [*FILES, "config.json", "added_tokens.json"])
@pytest.mark.parametrize("what", ["pipe", "/dev/zero"])
def test_paths_that_are_no_files(tmp_path: Path, name: str, what: str) -> None:
    if what == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to(what)
    with pytest.raises(TokenizerError, match="is not a regular file") as error:
        load_tokenizer(tmp_path)
    assert str(error.value).startswith(str(tmp_path / name))
