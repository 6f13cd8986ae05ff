"""Incremental JSON parser: reads values from a stream, character by character."""

from __future__ import annotations

import json
from typing import Any

from jinfer.server.tool_parsers.incremental_reader import IncrementalReader, Parse, Sink

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
