"""Schema relaxation: JSON schemas without the keywords that cannot be enforced.

A schema that a client asks an answer to keep to is refused where that cannot be promised
(`schema.prepare_schema`). The schema of a tool is meant for the model first: keeping to most of it
is better than no call at all. Leaving a keyword out only ever allows more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from jinfer.sampling.structured.json_schema import UNSUPPORTED, copied, subschemas

_AROUND = re.compile(r"\(\?<?[=!]|\\[bB1-9]")  # look-around, word boundaries, back-references
_TEXTS = ("format", "pattern")
_COUNTS = ("minProperties", "maxProperties", "patternProperties")

type Relaxed = tuple[Any, list[str]]  # a schema, and JSON pointers to what was left out of it


def supported(schema: Any) -> Relaxed:
    """A schema without the keywords that llguidance never enforces.

    Raises:
        ConstraintError: it is no JSON.
    """
    schema, left_out = copied(schema), []
    for place, part in subschemas(schema):
        if not isinstance(part, dict):
            continue
        for key in list(part):
            if key not in UNSUPPORTED and not (key == "$ref" and _leaves(part[key])):
                continue
            demand = part.pop(key)
            if (key, demand) != ("uniqueItems", False):
                left_out.append(f"{place}/{key}")
    return schema, left_out


def relaxed(schema: Any, compiles: Callable[[Any], bool]) -> Relaxed:
    """A schema without what prevents its compilation, as far as that can be found.

    Args:
        compiles: whether a schema can be compiled.

    Raises:
        ConstraintError: it is no JSON.
    """
    schema, left_out = supported(schema)
    for step, keys in ((_texts, _TEXTS), (_objects, ("oneOf", *_COUNTS))):
        if _has(schema, keys) and not compiles(schema):
            left_out += step(schema, compiles)
    return schema, left_out


def _has(schema: Any, keys: tuple[str, ...]) -> bool:
    return any(isinstance(part, dict) and part.keys() & keys for _, part in subschemas(schema))


def _leaves(target: Any) -> bool:
    """Whether a reference leads to another document."""
    return isinstance(target, str) and not target.startswith("#")


def _texts(schema: Any, compiles: Callable[[Any], bool]) -> Iterator[str]:
    """Drops formats and patterns that are not known, each by itself."""
    for place, part in subschemas(schema):
        for key in _TEXTS:
            if isinstance(part, dict) and isinstance(value := part.get(key), str):
                known = not (key == "pattern" and _AROUND.search(value))
                if not (known and compiles({"type": "string", key: value})):
                    del part[key]
                    yield f"{place}/{key}"


def _objects(schema: Any, compiles: Callable[[Any], bool]) -> Iterator[str]:
    """Takes any of what should be one, and any number of members."""
    for place, part in subschemas(schema):
        if not isinstance(part, dict):
            continue
        if "oneOf" in part and "anyOf" not in part:
            part["anyOf"] = part.pop("oneOf")
            yield f"{place}/oneOf"
        for key in _COUNTS:
            if part.pop(key, None) is not None:
                yield f"{place}/{key}"
