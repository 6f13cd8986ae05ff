"""SentencePiece tokenizer (Unigram, BPE), with ids that may differ from the library's."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import sentencepiece

from jinfer.tokenizer.piece_bytes import SPACE_MARK, marked_spaces
from jinfer.tokenizer.tokenizer_base import (
    SpecialTokens,
    Tokenizer,
    TokenizerError,
    library_errors,
    pattern_of,
    valid_text,
)

if TYPE_CHECKING:
    import sentencepiece


class PieceType(IntEnum):
    """Types of a piece; GGUF's token types are the same numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class SentencePieceModel:
    """The content of a SentencePiece model.

    Attributes:
        algorithm: UNIGRAM or BPE.
        pieces, scores, types: one of each per id; `types` are `PieceType` numbers.
        unk: id of the unknown piece; needed if no piece has that type.
        charsmap: the compiled normalization rules; empty for none.
        add_dummy_prefix: add a space before a text.
        remove_extra_whitespaces: strip the text and collapse runs of spaces.
    """

    UNIGRAM: ClassVar[int] = 1
    BPE: ClassVar[int] = 2

    algorithm: int
    pieces: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    unk: int | None = None
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = False


def build(model: SentencePieceModel, source: Path) -> sentencepiece.SentencePieceProcessor:
    """A processor that runs the model. Raises `TokenizerError` if it is inconsistent."""
    return load(serialize(model), source)


def load(data: bytes, source: Path) -> sentencepiece.SentencePieceProcessor:
    """A processor for the bytes of a .model file. Raises `TokenizerError`."""
    import sentencepiece  # imported here, because most tokenizers do not need it

    if not data:  # the library takes it for "load nothing"
        raise TokenizerError(f"{source}: not a sentencepiece model: the file is empty")
    with library_errors(source, "not a sentencepiece model"):
        return sentencepiece.SentencePieceProcessor(model_proto=data)


def serialize(model: SentencePieceModel) -> bytes:
    """The bytes of a .model file."""
    normalizer = (
        _bytes(1, b"identity")
        + (_bytes(2, model.charsmap) if model.charsmap else b"")
        + _number(3, model.add_dummy_prefix)
        + _number(4, model.remove_extra_whitespaces)
        + _number(5, True)  # escape_whitespaces: ▁ for a space
    )
    byte_fallback = list(model.types).count(PieceType.BYTE) == 256  # it needs all
    trainer = _number(3, model.algorithm) + _number(35, byte_fallback)
    return b"".join(_pieces(model, byte_fallback)) + _bytes(2, trainer) + _bytes(3, normalizer)


def without_dummy_prefix(data: bytes) -> bytes:
    """The same model without `add_dummy_prefix`: of a field given twice, the last one counts."""
    return data + _bytes(3, _number(3, False))


def _pieces(model: SentencePieceModel, byte_fallback: bool) -> Iterator[bytes]:
    """Field 1, once for each piece. Names must be unique, with exactly one unknown piece."""
    unk = model.unk
    if unk is None:
        unk = next((id for id, kind in enumerate(model.types) if kind == PieceType.UNKNOWN), 0)
    seen: set[str] = set()
    for id, (piece, score, kind) in enumerate(
        zip(model.pieces, model.scores, model.types, strict=True)
    ):
        name = piece.encode("utf-8", "replace")
        # Two pieces that are not UTF-8 would have the same name.
        if not piece or piece in seen or b"\0" in name or name.decode() != piece:
            name, kind = f"\ue000{id}\ue001".encode(), PieceType.UNUSED
        seen.add(piece)
        if kind == PieceType.BYTE and not byte_fallback:
            kind = PieceType.UNUSED
        if id == unk:
            kind = PieceType.UNKNOWN
        elif kind == PieceType.UNKNOWN:
            kind = PieceType.CONTROL
        body = b"\x0a" + _varint(len(name)) + name + b"\x15" + struct.pack("<f", score)
        body += b"\x18" + _varint(int(kind))
        yield b"\x0a" + _varint(len(body)) + body


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(int(value))


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


_UNKNOWN_TEXT = " \u2047 "  # how sentencepiece decodes the unknown piece


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model and a table from its pieces to the model's ids.

    Unlike other control tokens, the unknown one is decoded, as ` ⁇ `.
    """

    def __init__(
        self,
        path: Path,
        processor: sentencepiece.SentencePieceProcessor,
        special: SpecialTokens,
        names: Sequence[str] | None = None,
        to_token: Sequence[int] | None = None,
        spaced_parts: bool = True,
        always: Collection[str] = (),
    ) -> None:
        """Wraps a processor.

        Args:
            names: name of every id; None: the processor's pieces.
            to_token: id of every piece of the processor; None: its own numbers.
            spaced_parts: text after a special token gets the space that is added at a text's
                beginning (Llama's "legacy" behaviour, and llama.cpp's).
            always: names in `special.parsed` that are tokens in any text, even with parsing off.
        """
        if names is None:
            names = processor.id_to_piece(list(range(processor.vocab_size())))
        adds_space = processor.normalize("a").startswith((SPACE_MARK, " "))
        unk = special.unk
        if unk is not None:
            control = {name: id for name, id in special.control.items() if id != unk}
            special = replace(special, control=control)
        super().__init__(len(names), special, marked_spaces(strip_space=adds_space))
        if unk is not None:
            self._bytes[unk] = _UNKNOWN_TEXT.encode()
        self._processor = processor
        self._continues = processor
        if adds_space and not spaced_parts:
            self._continues = load(without_dummy_prefix(processor.serialized_model_proto()), path)
        self._names = names
        self._to_token = to_token
        self._always = pattern_of(name for name in always if name in self._found)

    def token(self, id: int) -> str:
        return self._names[id] if 0 <= id < len(self._names) else ""

    def id(self, token: str) -> int | None:
        return self._ids.get(token)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {name: id for id, name in reversed(list(enumerate(self._names))) if name}

    def _encode(self, text: str, parse_special: bool) -> list[int]:
        return self.encode_parts(self.split_special(text) if parse_special else [text])

    def encode_parts(self, parts: Sequence[int | str]) -> list[int]:
        if self._always is not None:
            parts = [piece for part in parts for piece in self._cut(part)]
        ids: list[int] = []
        for place, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
            else:
                processor = self._continues if place else self._processor
                ids += self._pieces(processor, valid_text(part))
        return ids

    def _cut(self, part: int | str) -> list[int | str]:
        return [part] if isinstance(part, int) else self._split(part, self._always)

    def _pieces(self, processor: sentencepiece.SentencePieceProcessor, text: str) -> list[int]:
        pieces: list[int] = processor.encode(text)
        return pieces if self._to_token is None else [self._to_token[piece] for piece in pieces]
