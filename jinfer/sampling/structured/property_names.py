"""Property names: patterns that match only few names become `properties`.

llguidance writes a name by the regex of its pattern without the names of `properties`. It does not
notice if that leaves no name: it allows the comma before the name, after which no token fits. So
patterns that match only names of the schema are turned into equivalent `properties`, and so are
additional properties if the patterns leave them few names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from jinfer.sampling.request_errors import ConstraintError

# Only short escapes: with \uXXXX an additional name could equal one of `properties`.
ESCAPES = 'nrbtf\\"'

_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_MAYBE_CONTROL = re.compile(_CONTROL.pattern + r"|\\(?:[0cvpP]|x\{?0*[017]|u\{?0*[017])")
_QUOTE = ord('"')


# JSON spellings -> names.
type SpelledNames = Mapping[bytes, str]


def without_empty_names(part: dict[str, Any], names: SpelledNames) -> None:
    """Turns the patterns of one object schema that match few names into `properties`.

    Args:
        part: the schema, which is changed.
        names: every property name of the whole schema.
    """
    patterns = part.get("patternProperties")
    if not patterns:
        return
    named: dict[str, Any] = part.setdefault("properties", {})
    rest = part.get("additionalProperties", True)
    left = None if rest is False else _only({_any_of(patterns): False}, True, names)
    for name in left or ():
        named.setdefault(name, deepcopy(rest))
    if left is not None:
        part["additionalProperties"] = False
    for pattern in list(patterns):
        matching = _only({pattern: True}, False, names)
        if matching is None:
            continue
        own = patterns.pop(pattern)
        for name in matching:
            both = [named[name], own] if name in named else [own]
            named[name] = {"allOf": deepcopy(both)}
    if not patterns:
        del part["patternProperties"]


def refuse_few_names(patterns: Iterable[str], names: SpelledNames) -> None:
    """Rejects patterns that together leave few names or none, for objects that are merged."""
    if (every := _any_of(patterns)) and _only({every: False}, True, names) is not None:
        raise ConstraintError(
            "json_schema: patternProperties of several objects that match every name together are"
            " not supported with allOf, or with $ref or anyOf that has other keywords"
        )


def _any_of(patterns: Iterable[str]) -> str:
    return "|".join(f"(?:{pattern})" for pattern in patterns)


def property_names(parts: Iterable[Any]) -> SpelledNames:
    """Returns the names that schemas spell out, including names in constants."""
    found: set[str] = set()
    for part in parts:
        if isinstance(part, dict):
            found |= {*part.get("properties", {}), *part.get("required", [])}
            found |= set(_keys([part.get("const"), part.get("enum")]))
    return {json.dumps(name, ensure_ascii=False).encode(): name for name in found}


def needs_escapes(part: dict[str, Any]) -> bool:
    """Whether a text that a schema requires may need an escape outside of `ESCAPES`."""
    waiting: list[Any] = [part.get("const"), part.get("enum")]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (dict, list)):
            waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, str) and _CONTROL.search(value):
            return True
    pattern = part.get("pattern")
    if not isinstance(pattern, str) or not _MAYBE_CONTROL.search(pattern):
        return False
    options = {"whitespace_flexible": False, "json_allowed_escapes": ESCAPES}
    matcher = _matcher({"type": "string", "pattern": pattern, "x-guidance": options})
    return not matcher.is_error() and not _allowed(matcher)


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, (dict, list)):
            yield from _keys(inner)


def _only(patterns: dict[str, bool], rest: bool, names: SpelledNames) -> list[str] | None:
    """Returns the names that an object's properties may have; None: other names are possible.

    Follows the names byte by byte. llguidance allows no byte that leads to no name, so an allowed
    byte outside these names shows that other names exist.
    """
    schema = {
        "type": "object",
        "patternProperties": patterns,
        "additionalProperties": rest,
        "minProperties": 1,
        "x-guidance": {"whitespace_flexible": False, "json_allowed_escapes": ESCAPES},
    }
    matcher = _matcher(schema)
    if not matcher.consume_token(ord("{")):
        return None if "Unsatisfiable" not in matcher.get_error() else []
    found: list[str] = []
    waiting: list[tuple[bytes, list[bytes]]] = [(b"", list(names))]
    while waiting:
        written, ahead = waiting.pop()
        state = matcher.deep_copy()
        state.consume_tokens(list(written))
        allowed = _allowed(state)
        nexts = {name[len(written)] for name in ahead}
        if allowed - nexts:
            return None
        for byte in allowed:
            longer = written + bytes([byte])
            if longer in names and byte == _QUOTE:
                found.append(names[longer])
            else:
                waiting.append((longer, [name for name in ahead if name.startswith(longer)]))
    return sorted(found)


def _allowed(state: LLMatcher) -> set[int]:
    mask = int.from_bytes(state.compute_bitmask(), "little")
    return set() if state.is_error() else {byte for byte in range(256) if mask >> byte & 1}


def _matcher(schema: dict[str, Any]) -> LLMatcher:
    return LLMatcher(_bytes(), json.dumps({"grammars": [{"json_schema": schema}]}), log_level=0)


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")
