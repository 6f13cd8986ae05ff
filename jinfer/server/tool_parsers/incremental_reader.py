"""Incremental reader: streamed text and JSON for parsers written as generators."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from typing import Any

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


_CLOSES = {"{": "}", "[": "]"}
_WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's
_LONGEST_ESCAPE = 12  # characters of an escaped surrogate pair
_BETWEEN = frozenset(",:{}[]\"' \t\r\n")


def loads(text: str) -> Any:
    """Parse JSON. Raises `ValueError`."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def is_object(text: str) -> bool:
    """Return whether a text is a JSON object."""
    try:
        return isinstance(loads(text), dict)
    except ValueError:
        return False


def value_as_json(text: str) -> str:
    """Convert a parameter value to JSON: unchanged if it is valid JSON, else as a string."""
    text = text.strip()
    text = _WORDS.get(text, text)
    try:
        loads(text)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    return text


def escape_json(text: str) -> str:
    """Escape a text for the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def decoded_prefix(text: str) -> str:
    """Decode the beginning of an unfinished JSON string, as far as it is certain."""
    for end in range(len(text), max(0, len(text) - _LONGEST_ESCAPE - 1), -1):
        try:
            decoded = loads(f'{text[:end]}"')
        except ValueError:  # the text ends inside an escape
            continue
        if not any("\ud800" <= sign <= "\udfff" for sign in decoded):
            return decoded
    return ""


def parse_string(reader: IncrementalReader, sink: Sink = lambda piece: None) -> Parse[str | None]:
    """Parse a string and return its decoded value; None without a string.

    Args:
        sink: receives its JSON text, with quotes and escapes.
    """
    if (yield from reader.char()) != '"':
        return None
    text = yield from parse_value(reader, sink)
    if text is None:
        return None
    value = loads(text)
    # An unpaired surrogate could not be encoded as UTF-8.
    return None if any("\ud800" <= sign <= "\udfff" for sign in value) else value


def parse_value(reader: IncrementalReader, sink: Sink) -> Parse[str | None]:
    """Parse a value.

    Escapes raw control characters in strings, which JSON forbids but models write.

    Args:
        sink: receives the JSON text.

    Returns:
        The JSON text; None: it is invalid or incomplete.
    """
    first = yield from reader.char()
    text = yield from (_enclosed(reader, sink) if first in (*_CLOSES, '"') else _word(reader, sink))
    try:
        loads(text or "")
    except ValueError:
        return None
    return text


def _enclosed(reader: IncrementalReader, sink: Sink) -> Parse[str | None]:
    """Parse a string, object or array up to its closing delimiter."""
    parts: list[str] = []
    open_: list[str] = []
    quoted = escaping = False
    while True:
        piece: list[str] = []
        rest = reader.rest()
        closed = wrong = False
        for sign in rest:
            written = sign
            if quoted:
                if escaping:
                    escaping = False
                elif sign == "\\":
                    escaping = True
                elif sign == '"':
                    quoted = False
                elif sign < " ":
                    written = escape_json(sign)
            elif sign == '"':
                quoted = True
            elif sign in _CLOSES:
                open_.append(_CLOSES[sign])
            elif sign in "}]":
                wrong = not open_ or open_.pop() != sign
            piece.append(written)
            closed = not quoted and not open_
            if closed or wrong:
                break
        reader.take(len(piece))
        parts.append("".join(piece))
        if parts[-1]:
            sink(parts[-1])
        if closed or wrong or reader.ended:
            return "".join(parts) if closed and not wrong else None
        yield


def _word(reader: IncrementalReader, sink: Sink) -> Parse[str]:
    """Parse a number or a literal such as null."""
    word = ""
    while (sign := (yield from reader.char())) and sign not in _BETWEEN:
        word += reader.take(1)
    sink(word)
    return word
