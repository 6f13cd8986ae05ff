"""Token texts with all characters visible, and PNG images of matrices."""

import struct
import zlib

import numpy as np
import pytest

from jinfer.html.html_page import matrix_png
from jinfer.html.token_text import byte_text, clipped, columns_of, flowing, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" a b", "␣a␣b"),
        ("\r\n\t", "⟨0D⟩↵⇥"),
        ("\x00\x1b\x7f\x85", "⟨00⟩⟨1B⟩⟨7F⟩⟨85⟩"),
        ("\u202eabc\u200f\ufeff", "⟨202E⟩abc⟨200F⟩⟨FEFF⟩"),
        ("\ud800\uffff\ue000", "⟨D800⟩⟨FFFF⟩⟨E000⟩"),
        ("\u0301x", "\u25cc\u0301x"),
        ("e\u0301", "e\u0301"),
        ("👩\u200d👧", "👩\u200d👧"),
        ("\u200d", "⟨200D⟩"),
        ("\xa0\u3000", "⟨A0⟩⟨3000⟩"),
        ("<b>&", "<b>&"),
        ("", ""),
    ],
)
def test_every_character_is_visible(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_invalid_utf8_is_shown() -> None:
    assert byte_text(" né".encode() + "🙂".encode()[:2]) == " né⟨F0⟩⟨9F⟩"


def test_line_ends_stay() -> None:
    assert flowing("a  b\n\tc\x00") == "a  b↵\n\tc⟨00⟩"
    assert flowing("a\nb", "\n") == "a\nb"


def test_wide_characters_count_twice() -> None:
    assert [columns_of(text) for text in ("abc", "中文", "e\u0301", "👧")] == [3, 4, 1, 2]
    assert clipped("中文字符", 8) == "中文字符"
    assert clipped("中文字符", 7) == "中文字…"
    assert clipped("中文字符", 6) == "中文…"
    assert visible("a" * 20, 5) == "aaaa…"


def test_png_has_the_values() -> None:
    """Read by PNG's own rules: pixels are the values in 255ths, opaque where these are 1."""
    values = np.array([[0, 0.5, 1], [0.2, np.nan, 2]])
    png = matrix_png(values)
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        name, content = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        (check,) = struct.unpack(">I", png[at + 8 + size : at + 12 + size])
        assert check == zlib.crc32(name + content)
        chunks[name], at = content, at + 12 + size
    assert struct.unpack(">IIBBBBB", chunks[b"IHDR"]) == (3, 2, 8, 3, 0, 0, 0)
    assert zlib.decompress(chunks[b"IDAT"]) == bytes([0, 0, 128, 255, 0, 51, 0, 255])
    opacity = chunks[b"tRNS"]
    assert (opacity[0], opacity[255]) == (0, 255)
    assert sorted(opacity) == list(opacity)
    assert chunks[b"PLTE"][:3] == bytes([217, 95, 2])
