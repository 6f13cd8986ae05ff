"""JSON schemas, prepared for llguidance: an unsupported keyword is an error with its location.

Schemas are those of JSON Schema 2020-12 and of the older drafts where these agree. llguidance
compiles most of them; this module finds those that it would misread or reject too late.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from functools import cache
from typing import Any
from urllib.parse import quote

from llguidance import LLMatcher, LLTokenizer

from jinfer.sampling.request_errors import ConstraintError, short

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


MAX_DEPTH = 100  # nesting of lists and objects; llguidance's own limit is a little higher
MAX_PROPERTIES = 2_000  # of one object: the grammar of optional ones grows with their square
MAX_PATTERNS = 100  # of all names: each pair of one object is intersected
MAX_MULTIPLE = 100_000  # the automaton has a state for each remainder
MAX_BOUND = 2**63 - 1024  # the greatest float that is a 64-bit integer

# After a brace, a comma or a colon: nothing, a space, or a line break and an indentation. A model
# that may write any amount of white space sometimes writes only that.
WHITESPACE = r" |\r?\n[ \t]{0,20}"

_ONE = ("additionalProperties", "additionalItems", "items")  # keywords whose value is a schema
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
UNSUPPORTED = frozenset(
    {
        *("not", "if", "then", "else"),
        *("dependencies", "dependentRequired", "dependentSchemas", "propertyNames"),
        *("contains", "minContains", "maxContains", "uniqueItems"),
        *("unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
    }
)
# Keywords whose meaning depends on one another. llguidance reads keywords in order, and those
# before a `$ref` or `anyOf` apart from those after it.
_TOGETHER = frozenset({*_ONE, "properties", "patternProperties", "prefixItems"})
_COUNTS = (
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "minProperties",
    "maxProperties",
)
_UPPER = ("maximum", "exclusiveMaximum")
_LOWER = ("minimum", "exclusiveMinimum")
_TYPES = frozenset(["null", "boolean", "object", "array", "number", "string", "integer"])


def prepare_schema(schema: Any) -> Any:
    """Prepares a schema so that llguidance reads it as intended.

    Args:
        schema: a schema, its JSON text, or True for any JSON object.

    Returns:
        a copy with numeric bounds that floats can hold, `uniqueItems: false` left out, and the
        white space of `WHITESPACE` unless `x-guidance` in it says otherwise.

    Raises:
        ConstraintError: not a schema, or an unsupported keyword, with its location.
    """
    schema = {"type": "object"} if schema is True else copied(schema)
    if schema is True:
        schema = {}
    if schema is False:
        raise ConstraintError("json_schema: false allows no answer at all")
    if not isinstance(schema, dict):
        raise ConstraintError(f"json_schema must be an object, not {short(json.dumps(schema))}")
    for pointer, part in subschemas(schema):
        _check(pointer, part)
    _settle_names(schema)
    options = schema.setdefault("x-guidance", {})
    if isinstance(options, dict):
        if not options.keys() & {"whitespace_flexible", "whitespace_pattern"}:
            options["whitespace_pattern"] = WHITESPACE
        if not _has_control_characters(schema):
            options.setdefault("json_allowed_escapes", ESCAPES)
    if not _drop_endless(schema):
        raise ConstraintError(
            "json_schema: no answer ever ends: a required part contains itself through $ref"
        )
    return schema


def _has_control_characters(schema: dict[str, Any]) -> bool:
    r"""Whether an answer may have to have an escape such as \u0001.

    Raises:
        ConstraintError: names could be escaped too, so that a name could equal another.
    """
    parts = [(pointer, part) for pointer, part in subschemas(schema) if isinstance(part, dict)]
    if not any(needs_escapes(part) for _, part in parts):
        return False
    for pointer, part in parts:
        named = part.keys() & {"properties", "patternProperties", "required"}
        if named and part.get("additionalProperties") is not False:
            raise ConstraintError(
                f"json_schema{at(pointer)}: additionalProperties must be false in a schema whose"
                " const, enum or pattern needs control characters"
            )
    return True


def _settle_names(schema: dict[str, Any]) -> None:
    """Turns patterns that match few names into `properties`; rejects others."""
    parts = [(pointer, part) for pointer, part in subschemas(schema) if isinstance(part, dict)]
    patterns = {name for _, part in parts for name in part.get("patternProperties", ())}
    if not patterns:
        return
    if len(patterns) > MAX_PATTERNS:
        raise ConstraintError(
            f"json_schema: patternProperties has more than {MAX_PATTERNS} patterns"
        )
    names = property_names(part for _, part in parts)
    for _, part in reversed(parts):  # inner ones first
        without_empty_names(part, names)
    left = {name for _, part in parts for name in part.get("patternProperties", ())}
    if any(map(_merges, (part for _, part in parts))):
        refuse_few_names(left, names)


def _merges(schema: dict[str, Any]) -> bool:
    """Whether llguidance has to intersect several schemas."""
    combinators = [
        schema.get("allOf", ()),
        schema.keys() & {"$ref", "anyOf", "oneOf", "const", "enum"},
    ]
    return sum(map(len, combinators)) + bool(schema.keys() & _TOGETHER) > 1


def subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yields (JSON pointer, schema) of a schema and its parts, each before its own parts."""
    waiting = [("", schema)]
    while waiting:
        pointer, part = waiting.pop()
        yield pointer, part
        if isinstance(part, dict):
            waiting += reversed(list(_parts(pointer, part)))


def at(pointer: str) -> str:
    """Formats a location in a schema for an error; "" for the whole schema."""
    return (
        f" at {re.sub(r'[^ -\U0010ffff]', lambda m: repr(m[0])[1:-1], pointer)}" if pointer else ""
    )


def _parts(pointer: str, schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            for name, part in value.items():
                yield f"{pointer}/{key}/{name.replace('~', '~0').replace('/', '~1')}", part
        elif key in _LISTS and isinstance(value, list):
            for number, part in enumerate(value):
                yield f"{pointer}/{key}/{number}", part
        elif key in _ONE:
            yield f"{pointer}/{key}", value


def copied(given: Any) -> Any:
    """Copies a schema, or parses its JSON text. Raises `ConstraintError`."""
    try:
        text = given if isinstance(given, str) else json.dumps(given, allow_nan=False)
        copy = json.loads(text)
    except RecursionError:
        raise ConstraintError(_too_deep()) from None
    except (TypeError, ValueError) as error:
        raise ConstraintError(f"json_schema is not JSON: {short(str(error))}") from None
    level, depth = [copy], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ConstraintError(_too_deep())
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.values()
            elif isinstance(value, list):
                inner += value
        level = inner
    return copy


def _too_deep() -> str:
    return f"json_schema: lists and objects are nested deeper than {MAX_DEPTH}"


def _check(pointer: str, schema: Any) -> None:
    """Rejects errors in one schema, without its parts, and corrects its bounds."""

    def refuse(key: str, wrong: str) -> ConstraintError:
        return ConstraintError(f"json_schema{at(pointer)}: {key} {wrong}")

    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ConstraintError(
            f"json_schema{at(pointer)}: a schema must be an object, true or false, not"
            f" {short(json.dumps(schema))}"
        )
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    for key in schema:
        if key in UNSUPPORTED:
            raise refuse(key, "is not supported")
    for key in _MAPS:
        if not isinstance(schema.get(key, {}), dict):
            raise refuse(key, "must be an object")
    for key in ("enum", "required", "allOf", "anyOf", "oneOf", "prefixItems"):
        if not isinstance(schema.get(key, []), list):
            raise refuse(key, "must be a list")
    if len(schema.get("properties", {})) > MAX_PROPERTIES:
        raise refuse("properties", f"has more than {MAX_PROPERTIES} names")
    for key in _COUNTS:
        value = schema.get(key, 0)
        if not _is_whole(value) or value < 0:
            raise refuse(key, f"must be a whole number from 0, not {short(json.dumps(value))}")
        if key in schema:
            schema[key] = int(value)
    if not all(isinstance(name, str) for name in schema.get("required", [])):
        raise refuse("required", "must be a list of names")
    if schema.get("enum") == []:
        raise refuse("enum", "is empty, which allows no answer at all")
    types = schema.get("type", [])
    for name in types if isinstance(types, list) else [types]:
        if not isinstance(name, str) or name not in _TYPES:
            known = ", ".join(sorted(_TYPES))
            raise refuse("type", f"cannot be {short(json.dumps(name))}; use one of {known}")
    _check_reference(schema, refuse)
    _mend_numbers(schema, refuse)
    if not isinstance(schema.get("items"), list):
        schema.pop("additionalItems", None)  # no effect then
    _gather(schema)
    _check_literals([schema.get("const")], "const", refuse)
    _check_literals(schema.get("enum", []), "enum", refuse)
    least, certain = schema.get("minProperties", 0), len(set(schema.get("required", [])))
    open_names = schema.get("additionalProperties") is not False or "patternProperties" in schema
    if least > certain + 1 and open_names:
        raise refuse(
            "minProperties",
            "is supported where all properties but one are required, since other names may come"
            " twice",
        )


def _gather(schema: dict[str, Any]) -> None:
    """Moves keywords that depend on each other to the position of the first."""
    together = [key for key in schema if key in _TOGETHER]
    for key in list(schema):
        keys = together if together and key == together[0] else [key]
        for name in keys if keys is together or key not in together else ():
            schema[name] = schema.pop(name)


def _check_literals(values: list[Any], key: str, refuse: Any) -> None:
    """Rejects numbers that llguidance, which reads floats, would write differently."""
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, (list, dict)):
            waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int) and not (abs(value) <= MAX_BOUND and float(value) == value):
            raise refuse(key, f"has {short(str(value))}, which no 64-bit float holds exactly")
        elif isinstance(value, float) and not math.isfinite(value):
            raise refuse(key, "has a number beyond all 64-bit floats")


def _check_reference(schema: dict[str, Any], refuse: Any) -> None:
    target = schema.get("$ref", "#")
    if not isinstance(target, str):
        raise refuse("$ref", "must be a text")
    if not target.startswith("#"):
        raise refuse("$ref", f"must point into the schema itself (#/…), not to {short(target)!r}")
    if "$ref" in schema:
        schema["$ref"] = "#" + fragment(target[1:])


def _mend_numbers(schema: dict[str, Any], refuse: Any) -> None:
    for key, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(exclusive := schema.get(key), bool):  # draft 4's form
            del schema[key]
            if exclusive and bound in schema:
                schema[key] = schema.pop(bound)
    for key in (*_LOWER, *_UPPER, "multipleOf"):
        value = schema.get(key, 1)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise refuse(key, f"must be a number, not {short(json.dumps(value))}")
    for key in _UPPER:
        if key in schema:
            if schema[key] < -MAX_BOUND:
                raise refuse(key, f"must be at least {-MAX_BOUND}")
            schema[key] = _bounded(min(schema[key], MAX_BOUND))
    for key in _LOWER:
        if key in schema:
            if schema[key] > MAX_BOUND:
                raise refuse(key, f"must be at most {MAX_BOUND}")
            schema[key] = -_bounded(min(-schema[key], MAX_BOUND))
    if "multipleOf" in schema and not 0 < schema["multipleOf"] <= MAX_MULTIPLE:
        raise refuse("multipleOf", f"must be above 0, and at most {MAX_MULTIPLE}")


def _bounded(value: int | float) -> int | float:
    """Returns the value, or the next lower number that a float holds."""
    if isinstance(value, int) and int(near := float(value)) != value:
        return near if near < value else math.nextafter(near, -math.inf)
    return value


def fragment(pointer: str) -> str:
    """Encodes a JSON pointer as a URI fragment, unless it is encoded already."""
    return quote(pointer, safe="/%~!$&'()*+,;=:@?")


def _is_whole(value: Any) -> bool:
    return not isinstance(value, bool) and (
        isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    )


def _drop_endless(schema: dict[str, Any]) -> bool:
    """Removes references to endless schemas; returns whether the whole schema has a finite answer.

    Every other keyword counts as satisfiable. The least fixed point over the schemas that `$ref`
    names: each starts as endless, and becomes finite once its required parts are finite.
    """
    by_pointer = {f"#{fragment(pointer)}": part for pointer, part in subschemas(schema)}
    finite: set[str] = set()

    def ends(part: Any) -> bool:
        if not isinstance(part, dict):
            return True
        if "const" in part or "enum" in part:
            return True
        target = part.get("$ref")
        if target in by_pointer and target not in finite:
            return False
        if not all(map(ends, part.get("allOf", []))):
            return False
        for key in ("anyOf", "oneOf"):
            if key in part and not any(map(ends, part[key])):
                return False
        types = part.get("type", "object" if "properties" in part else [])
        if types in ("object", ["object"]):
            named, rest = part.get("properties", {}), part.get("additionalProperties", True)
            return all(ends(named.get(name, rest)) for name in part.get("required", []))
        if types in ("array", ["array"]) and part.get("minItems", 0) > 0:
            first = [*part.get("prefixItems", []), part.get("items", True)]
            return all(map(ends, first[: int(part["minItems"])]))
        return True

    targets = {
        part["$ref"] for part in by_pointer.values() if isinstance(part, dict) and "$ref" in part
    }
    waiting = {target: by_pointer[target] for target in targets if target in by_pointer}
    while found := {target for target, part in waiting.items() if ends(part)}:
        finite |= found
        waiting = {target: part for target, part in waiting.items() if target not in finite}
    for part in by_pointer.values():
        if isinstance(part, dict) and part.get("$ref") in waiting:
            part.clear()
            part["anyOf"] = []
    return ends(schema)
