"""Token texts: tokens with all characters visible.

White space is replaced by signs, and so are characters that would change their neighbours (line
ends, marks of direction, combining marks) or that XML does not allow.
"""

from __future__ import annotations

import unicodedata

_MARKS = {" ": "␣", "\n": "↵", "\t": "⇥"}
_JOINER = "\u200d"  # joins emoji, within a token
_CIRCLE = "\u25cc"  # base of a combining mark without a letter
_HIDDEN = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"}


def visible(text: str, columns: int | None = None) -> str:
    """A token in one line, every character visible: " a\\n" -> "␣a↵".

    Args:
        columns: maximum width in characters of a monospaced font, where wide characters count
            two; a longer text ends in "…". None: no limit.
    """
    shown = _on_circle("".join(_shown(text, at) for at in range(len(text))))
    return shown if columns is None else clipped(shown, columns)


def byte_text(data: bytes) -> str:
    """Bytes as text; invalid UTF-8, such as a part of a character, becomes "⟨F0⟩"."""
    text = data.decode("utf-8", "surrogateescape")
    return "".join(f"⟨{ord(c) - 0xDC00:02X}⟩" if "\udc80" <= c <= "\udcff" else c for c in text)


def flowing(text: str, line_end: str = "↵\n") -> str:
    """A token within a text: spaces and tabs stay, and a sign precedes each line end."""
    kept = {" ": " ", "\t": "\t", "\n": line_end}
    return _on_circle("".join(kept.get(c) or _shown(text, at) for at, c in enumerate(text)))


def columns_of(text: str) -> int:
    """Width of a text in characters of a monospaced font."""
    return sum(
        0
        if unicodedata.category(c) in ("Mn", "Me")
        else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in text
    )


def clipped(text: str, columns: int) -> str:
    """A text cut to a number of columns; "…" replaces the rest."""
    if columns_of(text) <= columns:
        return text
    kept, width = "", 1
    for c in text:
        width += columns_of(c)
        if width > columns:
            break
        kept += c
    return f"{kept}…"


def _shown(text: str, at: int) -> str:
    c = text[at]
    if c in _MARKS:
        return _MARKS[c]
    if c == _JOINER and 0 < at < len(text) - 1:
        return c
    return f"⟨{ord(c):02X}⟩" if unicodedata.category(c) in _HIDDEN else c


def _on_circle(text: str) -> str:
    return _CIRCLE + text if text and unicodedata.category(text[0])[0] == "M" else text
