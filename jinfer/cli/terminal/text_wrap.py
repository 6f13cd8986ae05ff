"""Text wrapping: breaks the lines of a streamed answer between words."""

from __future__ import annotations

import os
import sys
import unicodedata

from jinfer import progress

_TAB = 8


class WrappingWriter:
    """Write an answer as it comes.

    On a terminal, a word that does not fit its line moves to the next one. Elsewhere the text is
    unchanged.

    Attributes:
        columns: width of the terminal; 0 if output is not a terminal.
        column: column of the next character.
    """

    def __init__(self, columns: int | None = None) -> None:
        self.columns = _columns() if columns is None else columns
        self.column = 0
        self._word = ""  # an unfinished word of single-width characters

    def __call__(self, text: str) -> None:
        """Write a piece of an answer."""
        wrapped = self.wrapped(text)  # also advances the column
        progress.write(wrapped, line_open=self.column > 0)

    def end(self, mark: str = "") -> None:
        """End an answer's line, with a mark after it."""
        self.column, self._word = 0, ""
        progress.write(f"{mark}\n")

    def wrapped(self, text: str) -> str:
        """A piece with line breaks inserted."""
        return "".join(map(self._placed, text)) if self.columns else text

    def _placed(self, letter: str) -> str:
        if letter == "\n":
            self.column, self._word = 0, ""
            return letter
        width = _TAB - self.column % _TAB if letter == "\t" else _width(letter)
        fits = self.column + width < self.columns
        if letter in " \t":
            self._word = ""
            self.column += width if fits else 0  # invisible at the end of a line
            return letter if fits else ""
        broken = ""
        if not fits:
            moved = self._word if len(self._word) < min(self.column, self.columns // 2) else ""
            back = f"\x1b[{len(moved)}D\x1b[K" if moved else ""
            broken, self.column, self._word = f"{back}\n{moved}", len(moved), moved
        self.column += width
        # Wide characters (Chinese, ...) may be separated by a line break.
        self._word = self._word + letter if width == 1 else ""
        return broken + letter


def _width(letter: str) -> int:
    if letter < "\u0300":
        return 1
    if unicodedata.combining(letter) or letter in "\u200b\u200d\ufe0f":
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def _columns() -> int:
    """The width of the terminal on standard output; 0 if it is none, or cannot move the cursor."""
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return 0
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80  # some terminals report 0
    except (OSError, ValueError):
        return 0
