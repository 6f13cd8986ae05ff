"""Fill-in-the-middle prompts, token by token, as each family's own documentation has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jinfer.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from jinfer.tokenizer.fill_in_middle import continued, infill_prompt
from tests.tokenizer.test_files import SPM, build
from tests.tokenizer.test_gguf_special_tokens import CONTROL, byte_pairs

PRE, SUF, MID = 4, 5, 6
QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def vocabulary(*names: str, **keys: Any) -> Tokenizer:
    """Tokens of these names from id 4 on, after those of the letters < / s >."""
    return byte_pairs(dict.fromkeys(names, CONTROL), **keys)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (QWEN, "{pre}s{suf}>{mid}"),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "{pre}s{suf}>{mid}"),
        (("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), "{pre}s{suf}>{mid}"),
        (
            ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
            "{pre}s{suf}>{mid}",
        ),
        (("▁<PRE>", "▁<SUF>", "▁<MID>"), "{pre}s{suf}>{mid}"),
        (("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"), "{pre}s{suf}>{mid}"),
        (("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"), "{suf}>{pre}s{mid}"),
        (("[PREFIX]", "[SUFFIX]", "[MIDDLE]"), "{suf}>{pre}s"),
    ],
)
def test_tokens_and_their_order(names: tuple[str, ...], expected: str) -> None:
    found = vocabulary(*names)
    marks = dict(zip(("pre", "suf", "mid"), map(chr, (PRE, SUF, MID)), strict=True))
    letters = {"s": 2, ">": 3}
    ids = [letters.get(sign, ord(sign)) for sign in expected.format(**marks)]
    assert infill_prompt(found, "s", ">") == ids
    assert infill_prompt(found, [2], ">") == ids
    assert found.fim is not None
    assert set(found.fim.ends) >= {PRE, SUF}


@pytest.mark.parametrize("key", ["fim_{}_token_id", "{}_token_id"])
def test_fim_ids_named_in_a_file(key: str) -> None:
    """Keys of GGUF, new and old, for any names of the tokens."""
    parts = ("pre", "suf", "mid") if "fim" in key else ("prefix", "suffix", "middle")
    keys = {key.format(part): id for part, id in zip(parts, (MID, PRE, SUF), strict=True)}
    found = vocabulary("<a>", "<b>", "<c>", **keys)
    assert infill_prompt(found, "s", ">") == [MID, 2, PRE, 3, SUF]
    spm = vocabulary("[PREFIX]", "[SUFFIX]", "[MIDDLE]", prefix_token_id=4, suffix_token_id=5)
    assert infill_prompt(spm, "s", ">") == [SUF, 3, PRE, 2]


def test_marks_in_a_text_are_text() -> None:
    found = vocabulary(*QWEN)
    ids = infill_prompt(found, "s<|fim_middle|>", "")
    assert ids.count(MID) == 1


def test_other_files() -> None:
    found = vocabulary(*QWEN, "<|repo_name|>", "<|file_sep|>")
    ids = infill_prompt(found, "s", ">", [("s", ">")])
    assert ids[0] == 7
    assert [id for id in ids if id > 3] == [7, 8, 8, PRE, SUF, MID]
    assert ids[-5:] == [PRE, 2, SUF, 3, MID]
    assert infill_prompt(vocabulary(*QWEN), "s", ">", [("s", ">")])[-5:] == ids[-5:]


def test_fim_text_beyond_the_context_is_cut() -> None:
    """The files go first, then the prefix's beginning and the suffix's end, three to one."""
    found = vocabulary(*QWEN, "<|file_sep|>")
    whole = infill_prompt(found, "<s", "s>", [("s" * 40, "s")], room=60)
    assert whole[-7:] == [PRE, 0, 2, SUF, 2, 3, MID]
    assert len(whole) <= 60
    cut = infill_prompt(found, "s" * 99 + "<", ">" + "s" * 99, [("s", "s")], room=11)
    assert cut == [PRE, 2, 2, 2, 2, 2, 0, SUF, 3, 2, MID]
    short = infill_prompt(found, "s" * 99, "", room=11)
    assert short == [PRE, *[2] * 8, SUF, MID]
    assert infill_prompt(found, "s", "s", room=1) == [PRE, SUF, MID]


def test_a_suffix_begins_without_a_space(tmp_path: Path) -> None:
    """A SentencePiece vocabulary adds one to a text's beginning, which a suffix is not."""
    found = build(tmp_path, {"tokenizer.model": SPM})
    assert found.strip_space
    for text in ("hello world", " hello", "", "):\n  x"):
        ids = continued(found, text)
        assert b"".join(map(found.token_bytes, ids)).decode() == text
    with pytest.raises(TokenizerError, match="no tokens for fill-in-the-middle; leave the suffix"):
        infill_prompt(found, "a", "b")


def test_a_vocabulary_without_them() -> None:
    assert vocabulary("<|fim_prefix|>", "<|fim_suffix|>").fim is None
    assert load_tokenizer(Path("a.gguf"), metadata={"tokenizer.ggml.model": "none"}) is None
