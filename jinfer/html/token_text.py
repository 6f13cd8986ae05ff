"""Token texts: tokens as they can be shown, whatever is in them.

White space becomes visible, and so do characters that would change what stands beside them (line
ends, marks of direction, combining marks) or that XML does not allow.
"""

from __future__ import annotations

import unicodedata

_MARKS = {" ": "␣", "\n": "↵", "\t": "⇥"}
_JOINER = "\u200d"  # joins emoji, within a token
_CIRCLE = "\u25cc"  # what a combining mark without a letter stands on
_HIDDEN = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"}


def visible(text: str, columns: int | None = None) -> str:
    """A token in one line, every character visible: " a\\n" -> "␣a↵".

    Args:
        columns: characters of a monospaced font that there is room for, where wide ones count
            two; a longer text ends in "…". None: any.
    """
    shown = _on_circle("".join(_shown(text, at) for at in range(len(text))))
    return shown if columns is None else clipped(shown, columns)


def byte_text(data: bytes) -> str:
    """Bytes as text; those that are no UTF-8, such as parts of a character, as "⟨F0⟩"."""
    text = data.decode("utf-8", "surrogateescape")
    return "".join(f"⟨{ord(c) - 0xDC00:02X}⟩" if "\udc80" <= c <= "\udcff" else c for c in text)


def flowing(text: str, line_end: str = "↵\n") -> str:
    """A token within a text: spaces and tabs stay, and line ends stand behind their mark."""
    kept = {" ": " ", "\t": "\t", "\n": line_end}
    return _on_circle("".join(kept.get(c) or _shown(text, at) for at, c in enumerate(text)))


def columns_of(text: str) -> int:
    """How many characters of a monospaced font a text is wide."""
    return sum(
        0
        if unicodedata.category(c) in ("Mn", "Me")
        else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in text
    )


def clipped(text: str, columns: int) -> str:
    """A text of at most so many columns; what is cut off is "…"."""
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
