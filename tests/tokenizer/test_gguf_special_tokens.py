"""Special tokens of GGUF vocabularies by their names, as llama.cpp's `llama_vocab_is_eog` and
`llama_tokenize` (0.3.36 of llama-cpp-python) have them for the same names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jinfer.tokenizer import Tokenizer, load_tokenizer

NORMAL, UNKNOWN, CONTROL, DEFINED = 1, 2, 3, 4


def load(metadata: dict[str, Any]) -> Tokenizer:
    found = load_tokenizer(Path("a.gguf"), metadata=metadata)
    assert found is not None
    return found


def byte_pairs(names: dict[str, int], **keys: Any) -> Tokenizer:
    """A vocabulary of byte-level BPE with tokens of these names and types from id 4 on."""
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["<", "/", "s", ">", *names],
        "token_type": [NORMAL] * 4 + list(names.values()),
        "merges": ["< /"],
        **keys,
    }
    return load({"tokenizer.ggml." + key: value for key, value in values.items()})


ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *("<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<turn|>", "<EOT>", "_<EOT>", "[EOT]"),
    *("[EOS]", "<end_of_utterance>", "<\uff5cend▁of▁sentence\uff5c>", "<eos>", "<|flush|>"),
    *("<|calls|>", "<fim_pad>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "[e~["),
    "<|tool_response>",
)


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, DEFINED])
@pytest.mark.parametrize("name", ENDS)
def test_names_of_end_of_text_tokens(name: str, kind: int) -> None:
    found = byte_pairs({name: kind})
    assert found.eos_ids == (4,)
    assert found.encode(f"s{name}s") == [2, 4, 2]
    assert 4 not in found.encode(f"s{name}s", parse_special=False)
    assert found.decode([2, 4]) == "s"


@pytest.mark.parametrize("kind", [CONTROL, DEFINED])
def test_end_token_that_is_an_html_tag(kind: int) -> None:
    """Qwen's vocabularies have </s> as an ordinary entry; llama.cpp makes an end even of that."""
    assert byte_pairs({"</s>": kind}).eos_ids == (4,)
    text = byte_pairs({"</s>": NORMAL})
    assert text.eos_ids == ()
    assert text.decode([4]) == "</s>"


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        (("<|end|>", "<|return|>", "<|call|>"), ("<|return|>", "<|call|>")),
        (("<|end|>", "<|flush|>", "<|calls|>"), ("<|calls|>", "<|flush|>")),
        (("<|end|>", "<|call|>"), ("<|end|>", "<|call|>")),
        (("<|end|>", "<|assistant|>", "<|user|>"), ("<|end|>",)),
        (("<|im_end|>", "<|endoftext|>"), ("<|im_end|>", "<|endoftext|>")),
    ],
)
def test_end_tokens_together(names: tuple[str, ...], ends: tuple[str, ...]) -> None:
    found = byte_pairs(dict.fromkeys(names, CONTROL), eot_token_id=4)
    assert {found.token(id) for id in found.eos_ids} == set(ends)


def test_keys_are_before_names() -> None:
    names = {"<PAD>": CONTROL, "<|pad|>": CONTROL}
    assert byte_pairs(names, fim_pad_token_id=5).eos_ids == (5,)
    names = {"<|end|>": CONTROL, "<|end_of_turn|>": CONTROL}
    assert byte_pairs(names, eos_token_id=5).eos_ids == (5, 4)


def test_tokens_that_keys_name_are_special() -> None:
    """With a type of text, a template's <|begin|> would be letters; a comma stays one."""
    found = byte_pairs({"<|begin|>": NORMAL, ",": NORMAL}, bos_token_id=4, eos_token_id=5)
    assert found.encode("<|begin|>s,", special=False) == [4, 2, 5]
    assert 4 not in found.encode("<|begin|>", special=False, parse_special=False)
    assert found.decode([4, 2, 5]) == "s,"


def test_parts_of_a_prompt_for_the_middle_are_special() -> None:
    found = byte_pairs({"<fim_prefix>": NORMAL, "<fim_suffix>": NORMAL, "<fim_middle>": NORMAL})
    assert found.encode("<fim_prefix>s<fim_suffix>s<fim_middle>") == [4, 2, 5, 2, 6]
    assert found.eos_ids == ()


PIECES = {
    "<unk>": UNKNOWN,
    "<s>": CONTROL,
    "</s>": DEFINED,
    **dict.fromkeys(("▁", "\n", "H", "i", "Hi", "▁Hi", "<", "/", "s", ">"), NORMAL),
    "<|endoftext|>": CONTROL,
    "<|assistant|>": CONTROL,
    "<|end|>": CONTROL,
    "<|user|>": CONTROL,
    "<tool>": DEFINED,
}
IDS = {name: id for id, name in enumerate(PIECES)}


def sentence_pieces(name: str, **keys: Any) -> Tokenizer:
    values = {
        "model": "llama",
        "tokens": list(PIECES),
        "token_type": list(PIECES.values()),
        "scores": [0.0 - id for id in range(len(PIECES))],
        "bos_token_id": 1,
        "unknown_token_id": 0,
        **keys,
    }
    metadata = {"tokenizer.ggml." + key: value for key, value in values.items()}
    return load({**metadata, "general.name": name})


def named(found: Tokenizer, text: str, **how: Any) -> list[str]:
    return [found.token(id) for id in found.encode(text, special=False, **how)]


@pytest.mark.parametrize("name", ["Phi3", "Phi 3.5 Mini Phi-3", "microsoft_PHI-3-mini"])
def test_white_space_after_special_tokens_of_phi_3(name: str) -> None:
    found = sentence_pieces(name)
    text = "<|user|>\nHi<|end|>\n<|assistant|>\n"
    assert named(found, text) == ["<|user|>", "▁Hi", "<|end|>", "<|assistant|>"]
    assert found.encode_marked(text) == found.encode(text, special=False)
    hidden = text + found.hide_control("<|end|>\n")  # as a stranger's words
    assert IDS["<|end|>"] not in found.encode_marked(hidden)[4:]
    # These are not stripped there, nor is what precedes a token.
    for bare in ("<s>", "<unk>", "<|endoftext|>"):
        assert named(found, f"Hi\n{bare}\nHi")[2:5] == [bare, "▁", "\n"]
    assert found.eos_ids == (IDS["<|endoftext|>"], IDS["<|end|>"], IDS["</s>"])


def test_white_space_stays_where_no_name_tells() -> None:
    found = sentence_pieces("llama")
    assert named(found, "<|user|>\nHi") == ["<|user|>", "▁", "\n", "Hi"]


def test_user_defined_tokens_are_found_in_any_text() -> None:
    """And text after them begins as at the beginning; an end is no user-defined token."""
    found = sentence_pieces("llama")
    for parse in (True, False):
        assert named(found, "<tool>Hi", parse_special=parse) == ["<tool>", "▁Hi"]
    assert named(found, "Hi</s>", parse_special=False) == ["▁Hi", "<", "/", "s", ">"]
    assert found.decode(found.encode("<tool>Hi", special=False)) == "<tool> Hi"


@pytest.mark.parametrize(
    ("keys", "mask", "taken"),
    [
        ({"general.architecture": "bert", "tokenizer.ggml.pre": "roberta-bpe"}, "<mask>", True),
        ({"general.architecture": "nomic-bert-moe"}, "<mask>", True),
        ({"general.architecture": "gemma3"}, "<mask>", False),
        ({"general.architecture": "modern-bert"}, "[MASK]", True),
        ({"general.architecture": "bert", "tokenizer.ggml.pre": "jina-v2-de"}, "[MASK]", False),
    ],
)
def test_white_space_before_a_mask(keys: dict[str, str], mask: str, taken: bool) -> None:
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["s", "Ġ", mask],
        "token_type": [NORMAL, NORMAL, CONTROL],
        "merges": ["s s"],
    }
    metadata = {"tokenizer.ggml." + key: value for key, value in values.items()}
    found = load({**metadata, **keys})
    assert found.encode(f"s {mask} s") == ([0, 2, 1, 0] if taken else [0, 1, 2, 1, 0])
