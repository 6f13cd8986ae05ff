"""Token bytes: from a token's name in the vocabulary to the UTF-8 bytes it adds to a text.

A text is the concatenation of its tokens' bytes. Every kind of tokenizer fits this rule, so
decoding, incremental decoding and structured outputs agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

SPACE_MARK = "▁"  # U+2581 represents a space in SentencePiece vocabularies

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ENGLISH_SPACING = ((" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"))


@dataclass(frozen=True)
class PieceBytes:
    """How a vocabulary represents text.

    Attributes:
        to_bytes: a token's name -> the bytes it adds, possibly part of a character.
        strip_space: a space at the start of a text was added by the encoder and is not shown.
        added_as_text: names of added tokens are plain text, even if their letters represent bytes
            in the vocabulary: "maçã".
    """

    to_bytes: Callable[[str], bytes]
    strip_space: bool = False
    added_as_text: bool = False


def plain(name: str) -> bytes:
    """The bytes of a name that is plain text.

    Bytes that are not UTF-8 come as "surrogateescape"; JSON may hold other lone surrogates.
    """
    try:
        return name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return name.encode("utf-8", "replace")


@cache
def byte_alphabet() -> dict[str, int]:
    """The 256 characters that byte-level BPE writes bytes with (GPT-2's `bytes_to_unicode`).

    Printable Latin-1 bytes represent themselves, the others are U+0100, U+0101, ... in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    letters.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return letters


def byte_level() -> PieceBytes:
    """Byte-level BPE. A name with other characters is an added token: plain text."""
    letters = byte_alphabet()

    def to_bytes(name: str) -> bytes:
        try:
            return bytes([letters[letter] for letter in name])
        except KeyError:
            return plain(name)

    return PieceBytes(to_bytes, added_as_text=True)


def marked_spaces(strip_space: bool = True, mark: str = SPACE_MARK) -> PieceBytes:
    """SentencePiece: a mark for a space, and `<0xHH>` for a byte that no other piece covers."""

    def to_bytes(name: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(name)
        if byte:
            return bytes([int(byte[1], 16)])
        return plain(name.replace(mark, " "))

    return PieceBytes(to_bytes, strip_space)


def word_pieces(prefix: str = "##", cleanup: bool = True) -> PieceBytes:
    """WordPiece: `##` continues a word, any other piece starts one.

    With `cleanup`, spaces before English punctuation and contractions are removed piece by piece,
    as in `tokenizers`.
    """

    def to_bytes(name: str) -> bytes:
        text = name.removeprefix(prefix) if name.startswith(prefix) else " " + name
        if cleanup and text in (" .", " ?", " !", " ,"):
            text = text[1:]
        elif cleanup:
            for spaced, joined in _ENGLISH_SPACING:
                text = text.replace(spaced, joined)
        return plain(text)

    return PieceBytes(to_bytes, strip_space=True)


def spaced_words() -> PieceBytes:
    """Whole words: a tokenizer without a decoder joins tokens with spaces."""
    return PieceBytes(lambda name: plain(" " + name), strip_space=True)


def from_decoder(decoder: Mapping[str, Any] | None) -> PieceBytes:
    """From the `decoder` of a tokenizer.json.

    Raises:
        ValueError: a decoder whose tokens do not map to bytes one by one.
    """
    if decoder is None:
        return spaced_words()
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        return byte_level()
    if "WordPiece" in kinds:
        step = steps[kinds.index("WordPiece")]
        return word_pieces(step["prefix"], step["cleanup"])
    for step in steps:
        _check_step(step)
    mark = next((_mark(step) for step in steps if _mark(step)), SPACE_MARK)
    return marked_spaces(any(_strips(step) for step in steps), mark)


def _mark(step: Mapping[str, Any]) -> str:
    if step["type"] == "Metaspace":
        return str(step["replacement"])
    return str(step["pattern"]["String"]) if step["type"] == "Replace" else ""


def _strips(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return bool(step["type"] == "Strip" and step["start"])


def _check_step(step: Mapping[str, Any]) -> None:
    kind = step["type"]
    plain_replace = kind == "Replace" and "String" in step["pattern"] and step["content"] == " "
    plain_strip = kind == "Strip" and step["content"] == " " and not step["stop"]
    if not (kind in ("Metaspace", "ByteFallback", "Fuse") or plain_replace or plain_strip):
        raise ValueError(f"decoder step {kind!r} is not supported: {str(dict(step))[:200]}")
