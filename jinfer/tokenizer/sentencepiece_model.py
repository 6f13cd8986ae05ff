"""A sentencepiece model written from a vocabulary: the file format is a small protocol buffer.

Fields and numbers: sentencepiece's `sentencepiece_model.proto`. Writing it by hand takes a page
and spares the protobuf package.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from jinfer.tokenizer.tokenizer_base import TokenizerError, library_errors

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
    """What a sentencepiece model holds.

    Attributes:
        algorithm: UNIGRAM or BPE.
        pieces, scores, types: one each per id; `types` are `PieceType` numbers.
        unk: the id of the piece for what is not covered; needed where no piece has that type.
        charsmap: the compiled normalisation; empty for none.
        add_dummy_prefix: a space is put before a text.
        remove_extra_whitespaces: spaces at the ends and runs of them are cut.
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
    """A processor that runs the model. Raises: TokenizerError: it is not consistent."""
    return load(serialize(model), source)


def load(data: bytes, source: Path) -> sentencepiece.SentencePieceProcessor:
    """A processor for the bytes of a .model file. Raises: TokenizerError."""
    import sentencepiece  # here: most tokenizers need no such library

    if not data:  # which the library takes for "load nothing"
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
    byte_fallback = list(model.types).count(PieceType.BYTE) == 256  # the library wants them all
    trainer = _number(3, model.algorithm) + _number(35, byte_fallback)
    return b"".join(_pieces(model, byte_fallback)) + _bytes(2, trainer) + _bytes(3, normalizer)


def without_dummy_prefix(data: bytes) -> bytes:
    """The same model without `add_dummy_prefix`: of a field given twice, the last one counts."""
    return data + _bytes(3, _number(3, False))


def _pieces(model: SentencePieceModel, byte_fallback: bool) -> Iterator[bytes]:
    """Field 1, once a piece. sentencepiece wants each name once and exactly one unknown piece."""
    unk = model.unk
    if unk is None:
        unk = next((id for id, kind in enumerate(model.types) if kind == PieceType.UNKNOWN), 0)
    seen: set[str] = set()
    for id, (piece, score, kind) in enumerate(
        zip(model.pieces, model.scores, model.types, strict=True)
    ):
        name = piece.encode("utf-8", "replace")
        # Two pieces that are not UTF-8 would be the same one.
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
