"""GGUF special tokens: llama.cpp's rules by name, where a file's keys and types are not enough.

Converters wrote wrong types or only one of several EOS tokens, and GGUF has no key for `lstrip` and
`rstrip`. Tables and rules: `llama_vocab::impl::load` in llama.cpp's src/llama-vocab.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from jinfer.tokenizer import fim_tokens
from jinfer.tokenizer.sentencepiece_model import PieceType

# Names of tokens that end a turn or a text. Files often have only one of them in eos_token_id.
ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<turn|>",
    "<|tool_response>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "[e~[",
    "<end_of_utterance>",
    "<\uff5cend▁of▁sentence\uff5c>",
    "</s>",
    "<eos>",
)
# Fill-in-the-middle (FIM) tokens, by the key that may name them instead.
_FIM = {
    "fim_pre": tuple(row[0] for row in fim_tokens.NAMES),
    "fim_suf": tuple(row[1] for row in fim_tokens.NAMES),
    "fim_mid": tuple(row[2] for row in fim_tokens.NAMES if row[2]),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
OLD_KEYS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
FIM_KEYS = (*OLD_KEYS, "fim_pad", "fim_rep", "fim_sep")  # of `tokenizer.ggml.<key>_token_id`
_FIM_ENDS = ("fim_pad", "fim_rep", "fim_sep")  # padding and file separators also end an answer
END_KEYS = ("eos", "eot", "eom", *_FIM_ENDS)  # of `tokenizer.ggml.<key>_token_id`
# An HTML tag: Qwen's vocabularies have it as ordinary text, as the token's type can say.
_ALSO_TEXT = frozenset({"</s>"})
_KEY = "tokenizer.ggml."
_NAMED_KEYS = ("bos", "eos", "eot", "eom", "padding", "mask", "cls", "seperator", "separator")
_BRACKETED = re.compile(r"<.+>|\[.+\]", re.DOTALL)
_BARE = frozenset({"<unk>", "<s>", "<|endoftext|>"})  # of Phi-3, which keeps white space after them


def control_ids(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> Iterator[int]:
    """The ids of tokens that are control tokens by name, regardless of their types.

    Also ordinary tokens that a key names, if they look like one: templates write them.
    """
    groups = [names for key, names in _FIM.items() if not _has(metadata, key)]
    special = frozenset(name for names in (ENDS, *groups) for name in names)
    for id, name in enumerate(tokens):
        if name in special and (name not in _ALSO_TEXT or types[id] != PieceType.NORMAL):
            yield id
    for key in _NAMED_KEYS:
        named = metadata.get(f"{_KEY}{key}_token_id")
        if type(named) is not int or not 0 <= named < len(tokens):
            continue  # handled where it is used
        if types[named] == PieceType.NORMAL and _BRACKETED.fullmatch(tokens[named]):
            yield named


def end_names(metadata: Mapping[str, Any], control: Collection[str]) -> list[str]:
    """The names of control tokens that end a text."""
    groups = [_FIM[key] for key in _FIM_ENDS if not _has(metadata, key)]
    return [name for names in (ENDS, *groups) for name in names if name in control]


def message_end_name(control: Collection[str]) -> str | None:
    """The token that ends a message but not the answer, in the formats of gpt-oss and Solar."""
    calls = "<|call|>" in control or "<|calls|>" in control
    harmony = calls and ("<|return|>" in control or "<|flush|>" in control)
    return "<|end|>" if harmony else None


def stripping_names(
    metadata: Mapping[str, Any], special: Collection[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """The special tokens that strip white space before them, and those that strip it after them.

    As transformers' `lstrip` and `rstrip` of the original tokenizers.
    """
    name, architecture = (
        str(metadata.get(f"general.{key}", "")).lower() for key in ("name", "architecture")
    )
    pre = str(metadata.get(_KEY + "pre", ""))
    if "modern-bert" in name or "modern-bert" in architecture:
        return frozenset({"[MASK]"}), frozenset()
    if "bert" in architecture or "jina-v2-" in pre:  # BERT's own [MASK] strips nothing
        return frozenset({"<mask>"}), frozenset()
    if "phi-3" in name or "phi3" in name:
        return frozenset(), frozenset(special) - _BARE
    return frozenset(), frozenset()


def _has(metadata: Mapping[str, Any], key: str) -> bool:
    keys = (key, OLD_KEYS.get(key, key))
    return any(metadata.get(f"{_KEY}{each}_token_id") is not None for each in keys)
