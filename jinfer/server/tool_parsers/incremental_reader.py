"""Incremental reader: streamed text for parsers written as generators."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

# A generator that pauses where it needs more text; it returns the parsed value.
type Parse[T] = Generator[None, None, T]
type Sink = Callable[[str], object]


class IncrementalReader:
    """Buffered text that has not been parsed yet.

    Attributes:
        ended: whether the text is complete.
        cut: whether the token limit ended the text. A parser that was waiting for more then has
            incomplete, not wrong, input.
        bound: whether a grammar allows calls only.
    """

    def __init__(self, *, bound: bool = False) -> None:
        self.ended = self.cut = False
        self.bound = bound
        self._text = ""
        self._at = 0
        self._raw: list[str] = []

    def feed(self, text: str) -> None:
        """Append text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def rest(self) -> str:
        """Return the unread text."""
        return self._text[self._at :]

    def mark(self, before: str = "") -> None:
        """Start recording the read text, after a prefix."""
        self._raw = [before] if before else []

    def raw(self) -> str:
        """Return the text since the mark, and stop recording."""
        text = "".join(self._raw)
        self._raw = []
        return text

    def drop(self) -> None:
        """Discard the recorded and the unread text."""
        self._raw, self._at = [], len(self._text)

    def take(self, count: int) -> str:
        """Read buffered characters."""
        text = self._text[self._at : self._at + count]
        self._at += len(text)
        if text:
            self._raw.append(text)
        return text

    def char(self) -> Parse[str]:
        """Peek at the next character; "" at the end."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def starts(self, text: str) -> Parse[bool]:
        """Consume a text if it follows."""
        while True:
            there = self._text[self._at : self._at + len(text)]
            if there == text:
                self.take(len(text))
                return True
            if self.ended or not text.startswith(there):
                if text.startswith(there) and self._begins_mark(there, 1):
                    self._at += len(there)  # a partial mark at the end is not shown
                return False
            yield

    def space(self) -> Parse[None]:
        """Skip white space."""
        while (yield from self.char()).isspace():
            rest = self.rest()
            self.take(len(rest) - len(rest.lstrip()))

    def until(
        self, marks: Sequence[str], sink: Sink, *, take: bool = True, min_overlap: int = 2
    ) -> Parse[str | None]:
        """Read up to the first of several marks, none of which is part of another.

        Args:
            sink: receives the text before the mark.
            take: also consume the mark.
            min_overlap: characters of a partial mark at the cut end that are withheld from `sink`.

        Returns:
            The mark; None at the end.
        """
        while True:
            rest = self.rest()
            found = min(
                ((at, mark) for mark in marks if (at := rest.find(mark)) >= 0), default=None
            )
            if found is not None:
                at, mark = found
                self._give(at, sink)
                self.take(len(mark) if take else 0)
                return mark
            kept = max(_overlap(rest, mark) for mark in marks)
            if self.ended and not self._begins_mark(rest[len(rest) - kept :], min_overlap):
                kept = 0
            self._give(len(rest) - kept, sink)
            if self.ended:
                self._at += kept
                return None
            yield

    def _begins_mark(self, end: str, min_overlap: int) -> bool:
        """Return whether a cut text ends in a partial mark rather than in ordinary text.

        Args:
            end: the end of the text.
            min_overlap: number of characters from which an overlap counts as a partial mark.
        """
        return self.cut and (self.bound or (len(end) >= min_overlap and not end[:1].isalnum()))

    def _give(self, count: int, sink: Sink) -> None:
        if count:
            sink(self.take(count))


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of the mark."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
