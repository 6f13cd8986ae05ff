"""Schema relaxation: JSON schemas without the keywords that cannot be enforced.

A requested schema of an answer is rejected if it cannot be enforced (`json_schema.prepare_schema`).
A tool's schema mainly informs the model: enforcing most of it is better than rejecting the call.
Leaving a keyword out only allows more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from jinfer.sampling.structured.json_schema import UNSUPPORTED, copied, subschemas

_AROUND = re.compile(r"\(\?<?[=!]|\\[bB1-9]")  # look-around, word boundaries, back-references
_TEXTS = ("format", "pattern")
_COUNTS = ("minProperties", "maxProperties", "patternProperties")

type Relaxed = tuple[Any, list[str]]  # a schema, and JSON pointers to the removed parts


def supported(schema: Any) -> Relaxed:
    """Removes the keywords that llguidance never enforces.

    Raises:
        ConstraintError: it is no JSON.
    """
    schema, left_out = copied(schema), []
    for pointer, part in subschemas(schema):
        if not isinstance(part, dict):
            continue
        for key in list(part):
            if key not in UNSUPPORTED and not (key == "$ref" and _leaves(part[key])):
                continue
            demand = part.pop(key)
            if (key, demand) != ("uniqueItems", False):
                left_out.append(f"{pointer}/{key}")
    return schema, left_out


def relaxed(schema: Any, compiles: Callable[[Any], bool]) -> Relaxed:
    """Removes keywords that prevent a schema's compilation, as far as they can be found.

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
    """Drops unknown formats and patterns one by one."""
    for pointer, part in subschemas(schema):
        for key in _TEXTS:
            if isinstance(part, dict) and isinstance(value := part.get(key), str):
                known = not (key == "pattern" and _AROUND.search(value))
                if not (known and compiles({"type": "string", key: value})):
                    del part[key]
                    yield f"{pointer}/{key}"


def _objects(schema: Any, compiles: Callable[[Any], bool]) -> Iterator[str]:
    """Relaxes oneOf to anyOf, and removes limits on the number of members."""
    for pointer, part in subschemas(schema):
        if not isinstance(part, dict):
            continue
        if "oneOf" in part and "anyOf" not in part:
            part["anyOf"] = part.pop("oneOf")
            yield f"{pointer}/oneOf"
        for key in _COUNTS:
            if part.pop(key, None) is not None:
                yield f"{pointer}/{key}"
