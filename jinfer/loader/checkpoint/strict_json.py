"""Strict JSON of untrusted files: UTF-8 only, no repeated keys, no surprises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from jinfer.loader.checkpoint.checkpoint_reader import CheckpointError

MAX_JSON_BYTES = 100_000_000  # the bound the safetensors format sets to its header


def parse_object(path: Path, data: bytes, offset: int = 0) -> dict[str, Any]:
    """Parses `data`, found at `offset` of `path`, as a JSON object (RFC 8259).

    Raises:
        CheckpointError: invalid JSON, a repeated key, too deep nesting, or not an object.
    """
    try:
        # A file may begin with a mark of its encoding; a part of one is what its format says.
        text = data.decode("utf-8" if offset else "utf-8-sig")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise CheckpointError(path, "JSON is nested too deeply", offset) from None
    except ValueError as error:  # bad UTF-8, bad JSON, a number of thousands of digits
        raise CheckpointError(path, f"JSON is not valid: {error}"[:300], offset) from None
    if not isinstance(value, dict):
        raise CheckpointError(path, "JSON is not an object", offset)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        again = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {again[:100]!r} is given twice")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
