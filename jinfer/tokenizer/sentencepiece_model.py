"""SentencePiece model writer (Unigram, BPE): serializes a vocabulary to the .model format.

Fields and numbers: sentencepiece's `sentencepiece_model.proto`. Writing the protocol buffer by hand
avoids a dependency on the protobuf package.
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
