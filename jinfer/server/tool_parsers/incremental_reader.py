"""Text as it comes, for generators that pause where they need more of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

# Pauses where more text is needed; its value is what it has found.
type Reading[T] = Generator[None, None, T]
type Sink = Callable[[str], object]


class Reader:
    """Text that has come and is not yet read.

    Attributes:
        ended: whether no more will come.
        cut: whether more would have come, but for the limit of tokens. What was pausing then is
            not wrong, only not whole.
        bound: whether a grammar lets nothing but calls come.
    """

    def __init__(self, *, bound: bool = False) -> None:
        self.ended = self.cut = False
        self.bound = bound
        self._text = ""
        self._at = 0
        self._raw: list[str] = []

    def feed(self, text: str) -> None:
        """More text has come."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def rest(self) -> str:
        """What has come and is not yet read."""
        return self._text[self._at :]

    def mark(self, before: str = "") -> None:
        """From here on what is read is remembered, with this text before it."""
        self._raw = [before] if before else []

    def raw(self) -> str:
        """What was read since the mark, which is then forgotten."""
        text = "".join(self._raw)
        self._raw = []
        return text

    def drop(self) -> None:
        """Forgets what was read since the mark, and what is not yet read."""
        self._raw, self._at = [], len(self._text)

    def take(self, count: int) -> str:
        """Reads so many characters, which are there."""
        text = self._text[self._at : self._at + count]
        self._at += len(text)
        if text:
            self._raw.append(text)
        return text

    def char(self) -> Reading[str]:
        """The next character, which is not read by this; "" at the end."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def starts(self, text: str) -> Reading[bool]:
        """Reads this text if it comes next."""
        while True:
            there = self._text[self._at : self._at + len(text)]
            if there == text:
                self.take(len(text))
                return True
            if self.ended or not text.startswith(there):
                if text.startswith(there) and self._begins_mark(there, 1):
                    self._at += len(there)  # which is not shown
                return False
            yield

    def space(self) -> Reading[None]:
        """Reads white space."""
        while (yield from self.char()).isspace():
            rest = self.rest()
            self.take(len(rest) - len(rest.lstrip()))

    def until(
        self, marks: Sequence[str], sink: Sink, *, take: bool = True, least: int = 2
    ) -> Reading[str | None]:
        """Reads up to the first of some marks, none of which is a part of another.

        Args:
            sink: is given what stands before it, as it comes.
            take: reads the mark too.
            least: characters of a mark that are not given where the limit cut it.

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
            if self.ended and not self._begins_mark(rest[len(rest) - kept :], least):
                kept = 0
            self._give(len(rest) - kept, sink)
            if self.ended:
                self._at += kept
                return None
            yield

    def _begins_mark(self, end: str, least: int) -> bool:
        """Whether a text that was cut ends in the beginning of a mark, and not in a text's own.

        Args:
            end: it may be either.
            least: characters that a text does not end in.
        """
        return self.cut and (self.bound or (len(end) >= least and not end[:1].isalnum()))

    def _give(self, count: int, sink: Sink) -> None:
        if count:
            sink(self.take(count))


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that the mark begins with, without being whole."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
