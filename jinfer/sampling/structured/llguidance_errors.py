"""llguidance's error messages, which may have many lines, as one line of jinfer's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from jinfer.sampling.request_errors import ConstraintError, short
from jinfer.sampling.structured.grammar_source import Kind, Source
from jinfer.sampling.structured.json_schema import at, fragment, subschemas

NOTHING = "allows no answer at all"

_MOST_CHARACTERS = 1 << 20  # of all schemas that are tried to find the wrong part of one

_IMPOSSIBLE = re.compile("Unsatisfiable|Regex is empty|NoExtension")

_FORCED = "too much forced"

# What a message says -> what it means. The first that is found counts.
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
    (r"circular references", "$ref to itself beside other keywords is not supported"),
    (r"Schema intersection stack", "$ref leads back to itself through anyOf, oneOf or allOf"),
    (r"schema too large", "it has more parts than are supported once $ref and allOf are resolved"),
    (r"Current row has", "it leaves too many alternatives open at one place"),
    (r"'multipleOf' has too many digits", "multipleOf has too many digits"),
    (r"unknown field `(.*?)`", r"x-guidance has no option \1"),
    (
        rf"{_FORCED}: (\d+)",
        r"more than \1 bytes have to come that nobody chooses, which is too much at once; use"
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


def too_much_forced(most: int) -> str:
    """A message as llguidance might have it, of a grammar that forces more bytes than these."""
    return f"{_FORCED}: {most}"


def one_line(kind: Kind, message: str) -> str:
    """What is wrong, in one line.

    Args:
        kind: the parameter of the request.
        message: llguidance's.
    """
    reason = re.search(r"^error: (.*)", message, re.MULTILINE)  # of the regex parser, at the end
    place = re.match(r"(?:at )?(\d+)\((\d+)\): ", message)
    what = message[place.end() :] if place else message
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
    if place and kind == "grammar":
        what = f"line {place[1]}, column {place[2]}: {what}"
    return short(what.strip(), 300) or "it cannot be compiled"


def _caret(message: str) -> str:
    """Where the regex parser points to."""
    found = re.search(r"^    (.*)\n    ( *)\^", message, re.MULTILINE)
    return f" at {short(found[1][len(found[2]) :], 20)!r}" if found else ""


def failure(
    source: Source, message: str, errors_of: Callable[[list[str]], list[str]]
) -> ConstraintError:
    """The error of a constraint that does not compile, with the place in a schema.

    Args:
        errors_of: grammars -> llguidance's messages, empty for those that are fine; it may give
            up before it has tried all.
    """
    place = ""
    if source.kind == "json_schema":
        place, message = _place(json.loads(source.body), message, errors_of)
    return ConstraintError(f"{source.kind}{at(place)}: {one_line(source.kind, message)}")


def _place(
    schema: dict[str, Any], message: str, errors_of: Callable[[list[str]], list[str]]
) -> tuple[str, str]:
    """JSON pointer of the innermost schema that fails alone, "" for the whole; its message.

    Each part is compiled by itself, where `$ref` still finds the others.
    """
    schema.pop("x-guidance", None)
    parts = [place for place, part in subschemas(schema) if isinstance(part, dict)]
    whole = _moved(schema)
    parts = parts[: _MOST_CHARACTERS // len(json.dumps(whole))]
    alone = [json.dumps({"whole": whole, "$ref": f"#/whole{fragment(place)}"}) for place in parts]
    found = ""
    messages = errors_of([Source("json_schema", body, False, "").grammar() for body in alone])
    impossible = _IMPOSSIBLE.search(message)
    for place, wrong in zip(parts, messages, strict=False):
        # A part may allow nothing where it is optional.
        if wrong and place.startswith(found) and (impossible or not _IMPOSSIBLE.search(wrong)):
            found, message = place, wrong
    return found, message.replace("/whole", "")


def _moved(schema: Any) -> Any:
    """The schema with references for where it stands as the part `whole` of another."""
    if isinstance(schema, list):
        return [_moved(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value) for key, value in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str):
        moved["$ref"] = "#/whole" + target.removeprefix("#")
    return moved
