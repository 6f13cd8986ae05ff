"""Damaged tokenizer files: a tokenizer that can be used, or a `TokenizerError`, soon."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jinfer.loader.checkpoint.gguf import open_gguf
from jinfer.tokenizer import TokenizerError, load_tokenizer

from ..hostile import EXAMPLES, ODD, damaged, endures, many

GOLDENS = Path(__file__).parents[1] / "goldens"
TEXT = "Hello 東京 <s> <|im_end|> aaaaaaaaaaaaaaaaaaaaaa\ud800 12345\n\t"
KINDS = {  # folder -> the file that is damaged
    "tok_llama3": "tokenizer.json",
    "tok_gpt2": "tokenizer.json",
    "tok_wordpiece": "tokenizer.json",
    "tok_gpt2_slow": "vocab.json",
    "tok_m2m100": "vocab.json",
}
CONFIG: dict[str, Any] = {
    "tokenizer_class": "LlamaTokenizer",
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "special": True, "lstrip": False},
    "add_bos_token": True,
    "add_eos_token": False,
    "extra_ids": 3,
    "src_lang": "en",
    "additional_special_tokens": ["<x>", {"content": "<y>"}],
    "added_tokens_decoder": {"600": {"content": "<new>", "special": True}},
}
NAMES = [kind for kind, file in KINDS.items() if (GOLDENS / kind / file).exists()]


def use(path: Path, metadata: Any = None) -> None:
    """Everything that a tokenizer does; the wrong kinds of files are not tried out first."""
    found = load_tokenizer(path, metadata=metadata, trust=True)
    if found is None:
        return
    ids = found.encode(TEXT)
    assert isinstance(found.decode([*ids, 5, 10**9]), str)
    found.encode(TEXT, parse_special=False)
    found.encode_marked(found.hide_control(TEXT))
    for id in (0, 1, found.vocab_size - 1):
        found.token_bytes(id)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_json(tmp_path: Path, examples: int) -> None:
    values = {k: json.loads((GOLDENS / k / KINDS[k]).read_text("utf-8")) for k in NAMES}

    @many(examples)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(NAMES))
        folder = tmp_path / kind
        if not folder.exists():
            shutil.copytree(GOLDENS / kind, folder)
        file = folder / KINDS[kind]
        shorter = without_most(values[kind], data)
        file.write_text(damaged(shorter, data))
        endures(lambda: use(folder), (TokenizerError,), file)

    run()


def without_most(value: Any, data: st.DataObject) -> Any:
    """A tokenizer.json with few of its merges and all else, so that the rest is hit."""
    if not isinstance(value, dict) or "model" not in value or data.draw(st.booleans()):
        return value
    model = {**value["model"], "merges": value["model"].get("merges", [])[:20]}
    return {**value, "model": model}


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_configuration(tmp_path: Path, examples: int) -> None:
    kinds = ["tok_spm_bpe", "tok_spm_unigram_t5", *NAMES]
    names = ["LlamaTokenizer", "T5Tokenizer", "XLMRobertaTokenizer", "NllbTokenizer", "x"]
    names += ["MBartTokenizer", "ChatGLMTokenizer", "AlbertTokenizer", "MarianTokenizer", ""]

    @many(examples)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(kinds))
        folder = tmp_path / kind
        if not folder.exists():
            shutil.copytree(GOLDENS / kind, folder)
        file = folder / data.draw(
            st.sampled_from(["tokenizer_config.json", "special_tokens_map.json", "config.json"])
        )
        value = {**CONFIG, "tokenizer_class": data.draw(st.sampled_from(names))}
        file.write_text(damaged(value, data))
        endures(lambda: use(folder), (TokenizerError,), file)

    run()


BINARY = {
    "tok_spm_bpe": "tokenizer.model",
    "tok_spm_unigram_t5": "spiece.model",
    "tok_llama2c": "tokenizer.bin",
}
BYTES = [
    b"",
    b"\xff",
    b"\xff\xff\xff\x7f",
    b"\xff" * 10,
    b"\0" * 4,
    b"\0\0\x80\x7f",
    b"\x0a\x80\x80",
]


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_models(tmp_path: Path, examples: int) -> None:
    """sentencepiece's files and llama2.c's, byte by byte."""
    for kind in BINARY:
        shutil.copytree(GOLDENS / kind, tmp_path / kind)
    whole = {kind: (tmp_path / kind / file).read_bytes() for kind, file in BINARY.items()}

    @many(examples)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(sorted(BINARY)))
        content = bytearray(whole[kind])
        for _ in range(data.draw(st.integers(1, 4))):
            # What comes first and last says how all of it is to be read.
            at = data.draw(st.integers(-2000, 400) | st.integers(0, len(content)))
            end = at + data.draw(st.integers(0, 12))
            content[at : end if at >= 0 else min(end, -1)] = data.draw(st.sampled_from(BYTES))
        file = tmp_path / kind / BINARY[kind]
        file.write_bytes(content)
        endures(lambda: use(tmp_path / kind), (TokenizerError,), file)

    run()


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_metadata(tmp_path: Path, examples: int) -> None:
    kinds = ("gpt-2", "bert-bge", "llama-spm")
    whole = [dict(open_gguf(GOLDENS / f"vocab/ggml-vocab-{k}.gguf").metadata) for k in kinds]
    few = [
        {k: v[:400] if isinstance(v, list) else v for k, v in each.items() if "tokenizer" in k}
        for each in whole
    ]
    odd = [*ODD, ["\udcff"] * 400, [-1] * 400, [7] * 400, [float("nan")] * 400, ["a"] * 400, [300]]
    report = tmp_path / "none"
    report.write_bytes(b"")

    @many(examples)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        metadata = dict(data.draw(st.sampled_from(few)))
        for _ in range(data.draw(st.integers(1, 3))):
            key = data.draw(st.sampled_from(sorted(metadata)))
            value = metadata[key]
            if isinstance(value, list) and value and data.draw(st.booleans()):
                value = list(value)
                value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.sampled_from(odd))
                metadata[key] = value
            else:
                metadata[key] = data.draw(st.sampled_from(odd))
        if data.draw(st.booleans()):
            metadata["tokenizer.ggml.model"] = data.draw(
                st.sampled_from(["gpt2", "llama", "bert", "t5", "gemma4"])
            )
        endures(lambda: use(report, metadata), (TokenizerError,), report)

    run()
