"""GGUF tokenizer: BPE, SentencePiece and WordPiece from a file's metadata (`tokenizer.ggml.*`).

Keys and defaults are those of the GGUF specification and of llama.cpp, which writes and reads most
of these files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers

from jinfer.tokenizer import fim_tokens
from jinfer.tokenizer.huggingface_tokenizer import HuggingFaceTokenizer, frame_like_bert, word_piece
from jinfer.tokenizer.piece_bytes import SPACE_MARK
from jinfer.tokenizer.pretokenizers import PRE_TOKENIZERS, PreTokenizer, splitter
from jinfer.tokenizer.sentencepiece_tokenizer import PieceType, SentencePieceModel, build
from jinfer.tokenizer.tokenizer_base import SpecialTokens, Tokenizer, TokenizerError
from jinfer.tokenizer.tokenizer_config import MAX_TOKENS, format_value

_KEY = "tokenizer.ggml."
_NONE = ("none", "no_vocab")
_BETWEEN = "\0"  # merges
_KNOWN = ("gpt2", "llama", "bert", "t5", "gemma4")
_TYPES = {0, *map(int, PieceType)}  # 0 (undefined) occurs in some files


def from_gguf(metadata: Mapping[str, Any], source: Path) -> Tokenizer | None:
    """The tokenizer of a GGUF file; None if it has none (model "none", or no key).

    Args:
        metadata: the file's keys and values.
        source: the file, for errors.

    Raises:
        TokenizerError: a missing or wrong key, an unknown model or pre-tokenizer.
    """
    kind = metadata.get(_KEY + "model")
    if kind is None or kind in _NONE:
        return None
    vocabulary = _Vocabulary(metadata, source)
    match kind:
        case "gpt2" | "gemma4":
            return _byte_pairs(vocabulary, kind)
        case "llama":
            return _sentence_pieces(vocabulary, SentencePieceModel.BPE)
        case "t5":
            return _sentence_pieces(vocabulary, SentencePieceModel.UNIGRAM)
        case "bert":
            return _word_pieces(vocabulary)
    raise TokenizerError(
        f"{source}: {_KEY}model is {format_value(kind)}, which is not known; "
        f"known: {', '.join(_KNOWN)}"
    )


class _Vocabulary:
    """Metadata with checked types: a wrong type is a `TokenizerError` that names the key."""

    def __init__(self, metadata: Mapping[str, Any], source: Path) -> None:
        self.metadata = metadata
        self.source = source
        self.tokens: list[str] = self.array("tokens", str, None)
        if not 0 < len(self.tokens) <= MAX_TOKENS:
            raise self.error("tokens", f"has {len(self.tokens)} tokens")
        normal = [int(PieceType.NORMAL)] * len(self.tokens)
        types = self.array("token_type", int, normal)
        if len(types) != len(self.tokens):
            raise self.error(
                "token_type", f"has {len(types)} entries for {len(self.tokens)} tokens"
            )
        if wrong := set(types) - _TYPES:
            raise self.error("token_type", f"has {min(wrong)}, which is no type of a token")
        self.types: list[int] = list(types)
        for id in control_ids(metadata, self.tokens, types):
            self.types[id] = int(PieceType.CONTROL)
        self._kinds = np.array(self.types, np.int8)
        self.damaged: dict[int, bytes] = {}
        if not _is_utf8("".join(self.tokens)):
            self.damaged = {
                id: name.encode("utf-8", "surrogateescape")
                for id, name in enumerate(self.tokens)
                if not _is_utf8(name)
            }

    def names(self) -> list[str]:
        """Token names for a Unicode library: names that are not UTF-8 are replaced."""
        names = list(self.tokens)
        for id in self.damaged:
            names[id] = f"\ue000{id}\ue001"
        return names

    def error(self, key: str, reason: str) -> TokenizerError:
        return TokenizerError(f"{self.source}: {_KEY}{key} {reason}")

    def array(self, key: str, kind: type, default: list[Any] | None) -> list[Any]:
        value = self.metadata.get(_KEY + key, default)
        if value is None:
            raise self.error(key, "is missing")
        if not isinstance(value, list) or not set(map(type, value)) <= {kind}:
            raise self.error(key, f"must be a list of {kind.__name__}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(_KEY + key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be a bool, not {format_value(value)}")
        return value

    def id(self, *names: str) -> int | None:
        """The first of the keys `<name>_token_id` that is present."""
        for name in names:
            value = self.metadata.get(f"{_KEY}{name}_token_id")
            if value is None:
                continue
            if type(value) is not int or not 0 <= value < len(self.tokens):
                raise self.error(
                    f"{name}_token_id",
                    f"is {format_value(value)}, not an id below {len(self.tokens)}",
                )
            return value
        return None

    def of_type(self, *kinds: PieceType) -> dict[str, int]:
        """Name -> id of the tokens of these types, without empty and non-UTF-8 names."""
        ids: list[int] = np.flatnonzero(np.isin(self._kinds, kinds)).tolist()
        return {self.tokens[id]: id for id in ids if self.tokens[id] and id not in self.damaged}

    def ends(self) -> tuple[int, ...]:
        control = self.of_type(PieceType.CONTROL)
        ids = [self.id(key) for key in END_KEYS]
        ids += [control[name] for name in end_names(self.metadata, control)]
        goes_on_after = control.get(message_end_name(control) or "")
        return tuple(dict.fromkeys(id for id in ids if id not in (None, goes_on_after)))

    def special(
        self, prefix: tuple[int | None, ...], suffix: tuple[int | None, ...]
    ) -> SpecialTokens:
        control = self.of_type(PieceType.CONTROL)
        parsed = self.of_type(PieceType.USER_DEFINED, PieceType.UNKNOWN)
        lstrip, rstrip = stripping_names(self.metadata, {*control, *parsed})
        fim = {key: self.id(key, OLD_KEYS.get(key, key)) for key in FIM_KEYS}
        return SpecialTokens(
            bos=self.id("bos"),
            eos=self.ends(),
            pad=self.id("padding"),
            unk=self.id("unknown"),
            mask=self.id("mask"),
            control=control,
            parsed=parsed,
            lstrip=lstrip,
            rstrip=rstrip,
            prefix=tuple(id for id in prefix if id is not None),
            suffix=tuple(id for id in suffix if id is not None),
            fim={key: id for key, id in fim.items() if id is not None},
        )


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _frame(vocabulary: _Vocabulary, add_bos: bool, add_eos: bool) -> SpecialTokens:
    """BOS before and EOS after the text, by the flags or by the defaults given."""
    bos = vocabulary.id("bos") if vocabulary.flag("add_bos_token", add_bos) else None
    eos = vocabulary.id("eos") if vocabulary.flag("add_eos_token", add_eos) else None
    return vocabulary.special((bos,), (eos,))


def _byte_pairs(vocabulary: _Vocabulary, kind: str) -> Tokenizer:
    rule = _rule(vocabulary, "gemma4" if kind == "gemma4" else "default")
    merges = _merges(vocabulary)
    # Of several tokens with one name, the first counts.
    reverse = vocabulary.names()[::-1]
    names = dict(zip(reverse, range(len(reverse) - 1, -1, -1), strict=True))
    bpe = _bpe(names, merges, rule)
    backend = tokenizers.Tokenizer(bpe)
    if rule.byte_level:
        backend.normalizer = normalizers.NFC() if rule.nfc else None
        backend.decoder = decoders.ByteLevel()
    else:
        backend.normalizer = normalizers.Replace(" ", SPACE_MARK)
        backend.decoder = decoders.Sequence(
            [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    backend.pre_tokenizer = splitter(rule, vocabulary.flag("add_space_prefix", False))
    return _finish(vocabulary, backend, _frame(vocabulary, rule.add_bos, False))


def _bpe(names: dict[str, int], merges: list[tuple[str, str]], rule: PreTokenizer) -> models.BPE:
    plain = not rule.byte_level

    def make(merges: list[tuple[str, str]]) -> models.BPE:
        return models.BPE(
            vocab=names,
            merges=merges,
            ignore_merges=rule.ignore_merges,
            byte_fallback=plain,
            fuse_unk=plain,
        )

    try:
        return make(merges)
    except Exception:  # the library raises plain `Exception`
        # Merges of tokens outside the vocabulary cannot apply; llama.cpp skips them too.
        return make([(a, b) for a, b in merges if a in names and b in names and a + b in names])


def _rule(vocabulary: _Vocabulary, default: str) -> PreTokenizer:
    name = vocabulary.metadata.get(_KEY + "pre", default)
    rule = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if rule is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise vocabulary.error(
            "pre", f"is {format_value(name)}, which is not known; known: {known}"
        )
    return rule


def _merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    merges = vocabulary.array("merges", str, None)
    # Nearly all files: two words each, which one split of all finds in half the time.
    words = f" {_BETWEEN} ".join(merges).split(" ")
    usual = len(words) == 3 * len(merges) - 1 and "" not in words
    if usual and words[2::3] == [_BETWEEN] * (len(merges) - 1):
        return list(zip(words[::3], words[1::3], strict=False))
    parts = [merge.partition(" ") for merge in merges]
    if not all(map(all, parts)):
        wrong = next(merge for merge, part in zip(merges, parts, strict=True) if not all(part))
        raise vocabulary.error("merges", f"has {wrong[:80]!r}, which is not two tokens")
    return [(left, right) for left, _, right in parts]


def _finish(
    vocabulary: _Vocabulary, backend: tokenizers.Tokenizer, special: SpecialTokens
) -> Tokenizer:
    defined = vocabulary.of_type(PieceType.USER_DEFINED)
    backend.add_special_tokens([_added(name, special, True) for name in special.control])
    backend.add_tokens([_added(name, special, False) for name in defined])
    size = len(vocabulary.tokens)
    return HuggingFaceTokenizer(vocabulary.source, backend, special, size, vocabulary.damaged)


def _added(name: str, tokens: SpecialTokens, special: bool) -> tokenizers.AddedToken:
    lstrip, rstrip = name in tokens.lstrip, name in tokens.rstrip
    return tokenizers.AddedToken(
        name, lstrip=lstrip, rstrip=rstrip, normalized=False, special=special
    )


def _word_pieces(vocabulary: _Vocabulary) -> Tokenizer:
    """GGUF marks word beginnings with ▁; WordPiece marks continuations with ##."""
    unk = vocabulary.id("unknown")
    if unk is None:
        raise vocabulary.error("unknown_token_id", "is missing, which WordPiece needs")
    names = [_unmarked(name) for name in vocabulary.names()]
    lowercase = vocabulary.flag("normalizer.lowercase", True)
    backend = word_piece(
        vocabulary.source,
        {name: id for id, name in reversed(list(enumerate(names)))},
        names[unk],
        normalizers.BertNormalizer(
            lowercase=lowercase,
            strip_accents=vocabulary.flag("normalizer.strip_accents", lowercase),
        ),
    )
    cls = vocabulary.id("cls", "bos")
    sep = vocabulary.id("seperator", "separator", "eos")  # the misspelt key is the usual one
    frame_like_bert(backend, cls, sep)
    return _finish(vocabulary, backend, vocabulary.special((cls,), (sep,)))


def _unmarked(name: str) -> str:
    if name.startswith(SPACE_MARK):
        return name[1:]
    return name if name.startswith("[") and name.endswith("]") else "##" + name


def _sentence_pieces(vocabulary: _Vocabulary, algorithm: int) -> Tokenizer:
    unigram = algorithm == SentencePieceModel.UNIGRAM
    scores = vocabulary.array("scores", float, None)
    if len(scores) != len(vocabulary.tokens):
        raise vocabulary.error(
            "scores", f"has {len(scores)} entries for {len(vocabulary.tokens)} tokens"
        )
    if not all(map(isfinite, scores)):
        raise vocabulary.error("scores", "has one that is not a number")
    charsmap = vocabulary.metadata.get(_KEY + "precompiled_charsmap", [])
    try:
        charsmap = bytes(byte % 256 for byte in charsmap)  # stored as signed or unsigned bytes
    except (TypeError, ValueError):
        raise vocabulary.error("precompiled_charsmap", "must be a list of bytes") from None
    model = SentencePieceModel(
        algorithm=algorithm,
        pieces=vocabulary.tokens,
        scores=scores,
        types=vocabulary.types,
        unk=vocabulary.id("unknown"),
        charsmap=charsmap,
        add_dummy_prefix=vocabulary.flag("add_space_prefix", True),
        remove_extra_whitespaces=vocabulary.flag("remove_extra_whitespaces", unigram),
    )
    # Imported here, because others do not need the library.
    from jinfer.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer

    frame = _frame(vocabulary, not unigram, unigram)
    # Names that contain the mark represent texts with spaces, which sentencepiece matches itself.
    defined = vocabulary.of_type(PieceType.USER_DEFINED)
    added = {name: id for name, id in defined.items() if SPACE_MARK not in name}
    special = replace(frame, parsed={**vocabulary.of_type(PieceType.UNKNOWN), **added})
    processor = build(model, vocabulary.source)
    return SentencePieceTokenizer(
        vocabulary.source, processor, special, vocabulary.tokens, always=added
    )


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
    return any(metadata.get(f"{_KEY}{key}_token_id") is not None for key in keys)
