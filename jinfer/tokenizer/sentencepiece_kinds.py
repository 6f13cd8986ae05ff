"""SentencePiece conventions: how each family numbers its pieces and frames a text.

The library numbers pieces 0, 1, 2...; the model's Python class (`tokenizer_class`) determines their
ids in the model, the added tokens, and the special tokens around a text. The rules are those of the
classes of that name in transformers, and of ChatGLM's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import sentencepiece

from jinfer.sandbox.safe_files import path_exists
from jinfer.tokenizer.sentencepiece_tokenizer import (
    SentencePieceTokenizer,
    load,
    without_dummy_prefix,
)
from jinfer.tokenizer.tokenizer_base import Tokenizer, TokenizerError
from jinfer.tokenizer.tokenizer_config import (
    M2M100_LANGUAGES,
    TokenizerConfig,
    languages,
    read_file,
    read_vocabulary,
    special_ids,
)

_CHATGLM = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")
_CHATGLM_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_MAX_GAPS = 100_000  # unused ids
_FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")


@dataclass(frozen=True)
class _Layout:
    """names: name of every id ("" for none). to_token: id of every piece, None for the same number.
    prefix, suffix: names around a text. control: added names that are not text."""

    names: Sequence[str]
    to_token: Sequence[int] | None = None
    prefix: tuple[str, ...] = ()
    suffix: tuple[str, ...] = ()
    control: frozenset[str] = frozenset()


def load_sentencepiece(file: Path, config: TokenizerConfig) -> Tokenizer:
    """Load a .model (or .spm) file and the folder's JSON files. Raises `TokenizerError`."""
    data = read_file(file)
    spaced = config.flag("add_prefix_space") is not False
    processor = load(data if spaced else without_dummy_prefix(data), file)
    pieces: list[str] = processor.id_to_piece(list(range(processor.vocab_size())))
    layout = _with_added(_layout(file, pieces, processor, config), config)
    ids = {name: id for id, name in reversed(list(enumerate(layout.names))) if name}
    special = special_ids(config, ids.get)

    def named(piece: int) -> int | None:
        return ids.get(pieces[piece]) if piece >= 0 else None

    eos = named(processor.eos_id())
    unk = special.unk if special.unk is not None else ids.get(pieces[processor.unk_id()])
    missing = [name for name in layout.prefix + layout.suffix if name not in ids]
    if missing:
        raise TokenizerError(f"{file}: has no token {missing[0]!r}, which starts or ends a text")
    control = {piece for id, piece in enumerate(pieces) if processor.is_control(id)}
    control |= layout.control
    words = {token.content for token in config.added if not token.special}
    added = {name: ids[name] for name in sorted(words - control) if name in ids}
    special = replace(
        special,
        bos=named(processor.bos_id()) if special.bos is None else special.bos,
        eos=special.eos or (() if eos is None else (eos,)),
        unk=unk,
        control={name: ids[name] for name in sorted(control) if name in ids},
        parsed={**{name: id for name, id in ids.items() if id == unk}, **added},
        lstrip=frozenset(token.content for token in config.added if token.lstrip),
        rstrip=frozenset(token.content for token in config.added if token.rstrip),
        prefix=tuple(ids[name] for name in layout.prefix),
        suffix=tuple(ids[name] for name in layout.suffix),
        languages=languages(config, ids.get),
    )
    legacy = config.flag("legacy") is not False
    return SentencePieceTokenizer(
        file, processor, special, layout.names, layout.to_token, spaced_parts=legacy, always=added
    )


def _layout(
    file: Path,
    pieces: list[str],
    processor: sentencepiece.SentencePieceProcessor,
    config: TokenizerConfig,
) -> _Layout:
    kind = config.kind
    vocabulary = file.with_name("vocab.json")
    if path_exists(vocabulary):
        return _m2m100_or_marian(vocabulary, pieces, config)
    if kind.startswith(("XLMRoberta", "MBart", "Nllb")):
        return _fairseq(pieces, config)
    if kind.startswith("ChatGLM"):
        names = [*pieces, *_CHATGLM, *_CHATGLM_ROLES]
        control = frozenset((*_CHATGLM, *_CHATGLM_ROLES))
        return _Layout(names, prefix=("[gMASK]", "sop"), control=control)
    if kind.startswith(("T5", "MT5", "Pegasus")) or (not kind and file.name == "spiece.model"):
        return _t5(pieces, config)
    if kind.startswith(("Albert", "DebertaV2")):
        cls, sep = config.text("cls_token") or "[CLS]", config.text("sep_token") or "[SEP]"
        return _Layout(pieces, prefix=(cls,), suffix=(sep,), control=frozenset((cls, sep)))
    return _llama(pieces, processor, config)


def _llama(
    pieces: list[str],
    processor: sentencepiece.SentencePieceProcessor,
    config: TokenizerConfig,
) -> _Layout:
    """Llama and most decoders after it: BOS unless add_bos_token is false."""
    bos, eos = processor.bos_id(), processor.eos_id()
    first = config.text("bos_token") or (pieces[bos] if bos >= 0 else "")
    last = config.text("eos_token") or (pieces[eos] if eos >= 0 else "")
    prefix = (first,) if first and config.flag("add_bos_token") is not False else ()
    return _Layout(pieces, None, prefix, (last,) if last and config.flag("add_eos_token") else ())


def _t5(pieces: list[str], config: TokenizerConfig) -> _Layout:
    """T5: the sentinels follow the pieces in reverse order; EOS after a text."""
    count = config.number("extra_ids", 100 if config.kind in ("", "T5Tokenizer") else 0)
    sentinels = [f"<extra_id_{number}>" for number in reversed(range(count))]
    known = set(pieces)
    sentinels = [name for name in sentinels if name not in known]
    eos = config.text("eos_token") or "</s>"
    return _Layout([*pieces, *sentinels], suffix=(eos,), control=frozenset(sentinels))


def _fairseq(pieces: list[str], config: TokenizerConfig) -> _Layout:
    """XLM-R, mBART, NLLB: <s> <pad> </s> <unk>, then the pieces after the library's first three."""
    codes = [name for name in config.names() if name[:1].isalpha()]
    names = [*_FAIRSEQ, *pieces[3:], *codes, "<mask>"]
    to_token = [3, 0, 2, *range(4, len(pieces) + 1)]
    control = frozenset((*_FAIRSEQ, *codes, "<mask>"))
    if config.kind.startswith("XLMRoberta"):
        return _Layout(names, to_token, ("<s>",), ("</s>",), control)
    language = config.text("src_lang") or ("eng_Latn" if "eng_Latn" in codes else "en_XX")
    if config.kind == "MBartTokenizer" or config.flag("legacy_behaviour"):
        return _Layout(names, to_token, (), ("</s>", language), control)
    return _Layout(names, to_token, (language,), ("</s>",), control)


def _m2m100_or_marian(file: Path, pieces: list[str], config: TokenizerConfig) -> _Layout:
    """M2M100 and Marian: ids of pieces from vocab.json; M2M100's languages come after."""
    vocabulary = read_vocabulary(file)
    names = [""] * (max(vocabulary.values(), default=-1) + 1)
    if len(names) > len(vocabulary) + _MAX_GAPS:
        raise TokenizerError(
            f"{file}: has an id of {len(names) - 1} among {len(vocabulary)} tokens"
        )
    for name, id in vocabulary.items():
        names[id] = name
    unk = vocabulary.get(config.text("unk_token") or "<unk>")
    if unk is None:
        raise TokenizerError(f"{file}: has no unknown token, which pieces without an id need")
    to_token = [vocabulary.get(piece, unk) for piece in pieces]
    eos = config.text("eos_token") or "</s>"
    control = {name for name in vocabulary if name.startswith(">>") and name.endswith("<<")}
    control |= {config.text(key) or "" for key in ("bos_token", "eos_token", "pad_token")}
    if config.kind.startswith("Marian"):
        return _Layout(names, to_token, (), (eos,), frozenset(control))
    codes = [name for name in config.names() if name.startswith("__")] or M2M100_LANGUAGES
    rest = [f"madeupword{number}" for number in range(config.number("num_madeup_words", 8))]
    language = f"__{config.text('src_lang') or 'en'}__"
    control |= {*codes, *rest}
    return _Layout([*names, *codes, *rest], to_token, (language,), (eos,), frozenset(control))


def _with_added(layout: _Layout, config: TokenizerConfig) -> _Layout:
    """The layout with the configuration's added tokens at their ids."""
    names, control = list(layout.names), set(layout.control)
    for token in config.added:
        if token.id is not None and token.id >= len(names) + _MAX_GAPS:
            raise TokenizerError(f"{config.path}: token {token.content!r} has id {token.id}")
        if token.id is not None and token.content:
            names += [""] * (token.id + 1 - len(names))
            names[token.id] = token.content
        if token.special:
            control.add(token.content)
    return replace(layout, names=names, control=frozenset(control))
