"""Answers on a terminal, their lines broken between words."""

from __future__ import annotations

import os
import sys
import unicodedata

from jinfer import progress

_TAB = 8


class Screen:
    """Where an answer is written while it comes.

    On a terminal a word that does not fit its line goes to the next one. Elsewhere a text stays as
    it is.

    Attributes:
        columns: of the terminal; 0 where there is none.
        column: where the next letter goes.
    """

    def __init__(self, columns: int | None = None) -> None:
        self.columns = _columns() if columns is None else columns
        self.column = 0
        self._word = ""  # the beginning of one, each of its letters a column wide

    def __call__(self, text: str) -> None:
        """Writes a piece of an answer."""
        wrapped = self.wrapped(text)  # which moves the column
        progress.write(wrapped, self.column)

    def end(self, mark: str = "") -> None:
        """Ends an answer's line, with a mark behind it."""
        self.column, self._word = 0, ""
        progress.write(f"{mark}\n")

    def wrapped(self, text: str) -> str:
        """A piece with what breaks its lines."""
        return "".join(map(self._placed, text)) if self.columns else text

    def _placed(self, letter: str) -> str:
        if letter == "\n":
            self.column, self._word = 0, ""
            return letter
        width = _TAB - self.column % _TAB if letter == "\t" else _width(letter)
        fits = self.column + width < self.columns
        if letter in " \t":
            self._word = ""
            self.column += width if fits else 0  # at the end of a line nobody sees it
            return letter if fits else ""
        broken = ""
        if not fits:
            moved = self._word if len(self._word) < min(self.column, self.columns // 2) else ""
            back = f"\x1b[{len(moved)}D\x1b[K" if moved else ""
            broken, self.column, self._word = f"{back}\n{moved}", len(moved), moved
        self.column += width
        # Between wide letters, as of Chinese, a line may be broken.
        self._word = self._word + letter if width == 1 else ""
        return broken + letter


def _width(letter: str) -> int:
    if letter < "\u0300":
        return 1
    if unicodedata.combining(letter) or letter in "\u200b\u200d\ufe0f":
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def _columns() -> int:
    """Of the terminal that standard output is; 0 where it is none, or one that only prints."""
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return 0
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80  # some say 0
    except (OSError, ValueError):
        return 0
