"""llguidance's error messages, translated to one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from jinfer.sampling.request_errors import ConstraintError, short
from jinfer.sampling.structured.grammar_source import GrammarSource, Kind
from jinfer.sampling.structured.json_schema import at, fragment, subschemas

NOTHING = "allows no answer at all"

_MOST_CHARACTERS = 1 << 20  # total size of schemas that are tried to find the invalid part

_IMPOSSIBLE = re.compile("Unsatisfiable|Regex is empty|NoExtension")

_FORCED = "too much forced"

# Pattern of a message -> translation. The first match applies.
_MEANINGS = (
    (r"NoExtension", NOTHING),
    (
        r"Regex is empty",
        f"{NOTHING}: no text fits pattern, format, minLength and maxLength together",
    ),
    (
        r"Unable to determine if regex is empty",
        "pattern, format, minLength and maxLength together are too complex",
    ),
    (r"oneOf constraints", "oneOf is supported where no two branches can both fit; use anyOf"),
    (r"Unsatisfiable schema: (.*)", rf"{NOTHING}: \1"),
    (r"Unimplemented keys: \[(.*)\]", r"\1 is not supported"),
    (r"Unknown format: (.*)", r"format \1 is not supported"),
    (r"Failed to generate regex for (\w+) range: (.*)", r"minimum and maximum of \1: \2"),
    (r"Resource '(.*)' is not present", r"$schema or $ref names \1, which is not at hand"),
    (r"Pointer '(.*)' does not exist", r"$ref to #\1, which the schema does not have"),
    (r"circular references", "$ref to itself with other keywords is not supported"),
    (r"Schema intersection stack", "$ref leads back to itself through anyOf, oneOf or allOf"),
    (r"schema too large", "it has more parts than are supported once $ref and allOf are resolved"),
    (r"Current row has", "it leaves too many alternatives open at one place"),
    (r"'multipleOf' has too many digits", "multipleOf has too many digits"),
    (r"unknown field `(.*?)`", r"x-guidance has no option \1"),
    (
        rf"{_FORCED}: (\d+)",
        r"more than \1 bytes without a choice are forced, which is too much at once; use"
        " shorter texts and smaller counts",
    ),
    (r"too big|too many|too complex|fuel|Too Complex", "it is too complex"),
    (r"deep\w* nested|recursion limit", "it is nested too deeply"),
    (
        r"min/maxProperties only",
        "minProperties and maxProperties are supported where every name in properties is required",
    ),
    (r"patternProperty regexes (.*)", r"patternProperties \1"),
    (r"<non-verbose/>", ""),
)


def too_much_forced(limit: int) -> str:
    """Returns a message in llguidance's form for a grammar that forces more than `limit` bytes."""
    return f"{_FORCED}: {limit}"


def one_line(kind: Kind, message: str) -> str:
    """Translates an error to one line.

    Args:
        kind: the parameter of the request.
        message: llguidance's message.
    """
    reason = re.search(r"^error: (.*)", message, re.MULTILINE)  # the regex parser's, at the end
    position = re.match(r"(?:at )?(\d+)\((\d+)\): ", message)
    what = message[position.end() :] if position else message
    if reason and kind in ("regex", "json_schema"):
        word = "pattern: " if kind == "json_schema" else ""
        return f"{word}{reason[1]}{_caret(message)}"
    what = what.splitlines()[0] if what else ""
    for pattern, meaning in _MEANINGS:
        if found := re.search(pattern, what):
            what = found.expand(meaning)
            break
    if reason:
        what = f"{what.removesuffix(':')}: {reason[1]}"
    if position and kind == "grammar":
        what = f"line {position[1]}, column {position[2]}: {what}"
    return short(what.strip(), 300) or "it cannot be compiled"


def _caret(message: str) -> str:
    """Returns the location that the regex parser marks."""
    found = re.search(r"^    (.*)\n    ( *)\^", message, re.MULTILINE)
    return f" at {short(found[1][len(found[2]) :], 20)!r}" if found else ""


def failure(
    source: GrammarSource, message: str, errors_of: Callable[[list[str]], list[str]]
) -> ConstraintError:
    """Returns the error of a constraint that does not compile, with its location in a schema.

    Args:
        errors_of: grammars -> llguidance's messages, "" for valid grammars; it may give up early.
    """
    pointer = ""
    if source.kind == "json_schema":
        pointer, message = _wrong_part(json.loads(source.body), message, errors_of)
    return ConstraintError(f"{source.kind}{at(pointer)}: {one_line(source.kind, message)}")


def _wrong_part(
    schema: dict[str, Any], message: str, errors_of: Callable[[list[str]], list[str]]
) -> tuple[str, str]:
    """Finds the innermost schema that fails alone: its JSON pointer ("": the whole), the message.

    Each part is compiled by itself; `$ref` still finds the other parts.
    """
    schema.pop("x-guidance", None)
    parts = [pointer for pointer, part in subschemas(schema) if isinstance(part, dict)]
    whole = _moved(schema)
    parts = parts[: _MOST_CHARACTERS // len(json.dumps(whole))]
    alone = [
        json.dumps({"whole": whole, "$ref": f"#/whole{fragment(pointer)}"}) for pointer in parts
    ]
    found = ""
    messages = errors_of(
        [GrammarSource("json_schema", body, False, "").grammar() for body in alone]
    )
    impossible = _IMPOSSIBLE.search(message)
    for pointer, wrong in zip(parts, messages, strict=False):
        # An optional part may allow nothing.
        if wrong and pointer.startswith(found) and (impossible or not _IMPOSSIBLE.search(wrong)):
            found, message = pointer, wrong
    return found, message.replace("/whole", "")


def _moved(schema: Any) -> Any:
    """Adapts a schema's references to its position as the part `whole` of another schema."""
    if isinstance(schema, list):
        return [_moved(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value) for key, value in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str):
        moved["$ref"] = "#/whole" + target.removeprefix("#")
    return moved
