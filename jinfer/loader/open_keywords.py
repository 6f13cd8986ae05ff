"""Overrides of a specification: keys set by the user, and other engines' names for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinfer.modelspec.bounded_types import fields
from jinfer.modelspec.foreign_names import keyword
from jinfer.modelspec.model_spec import EngineSpec, PromptSpec
from jinfer.modelspec.partition_table import PartitionSpec
from jinfer.modelspec.quantization_table import QuantizationSpec
from jinfer.modelspec.resolve_spec import TOP_KEYS
from jinfer.modelspec.speculation_table import SpeculationSpec
from jinfer.modelspec.toml_tables import merge, nested
from jinfer.sampling.request_errors import RequestError
from jinfer.sampling.sampling_keywords import is_parameter

_TABLES: Mapping[str, Any] = {
    "engine": EngineSpec,
    "quantization": QuantizationSpec,
    "partition": PartitionSpec,
    "speculation": SpeculationSpec,
    "prompt": PromptSpec,
}

# Tables that are a single value in other engines -> the key of that value.
_MAIN: Mapping[str, str] = {
    "quantization": "quantization.weights",
    "speculation": "speculation.draft",
    "partition": "partition.devices",
    "prompt": "prompt.chat_template",
    "engine": "engine.context",
}


def override_tables(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Convert dotted keys that the user sets to tables that take precedence over a specification.

    Raises:
        RequestError, SpecError: an unknown key.
    """
    check_keywords(overrides)
    tables: dict[str, Any] = {}
    for key, value in overrides.items():
        tables = merge(tables, nested(key, value))
    return tables


def check_keywords(keywords: Mapping[str, Any]) -> None:
    """Rejects unknown keys, and names the equivalent of other engines' keys.

    Args:
        keywords: keys of a specification, dotted or not, and their values.

    Raises:
        RequestError: another engine's name, a key without its table, a table without a key, or a
            parameter of requests.
    """
    for key, value in keywords.items():
        if key in _MAIN and isinstance(value, str | int | float):
            call = f"LLM(source, **{{{_MAIN[key]!r}: {value!r}}})"
            raise RequestError(f"{key} is a table; this may be {_MAIN[key]}: {call}")
        name = key.partition(".")[0] if isinstance(key, str) else ""
        if name in TOP_KEYS:
            continue
        foreign = keyword(name)
        found = (foreign.key or foreign.python) if foreign else ""
        found = found or next(
            (f"{table}.{name}" for table, spec in _TABLES.items() if name in fields(spec)), ""
        )
        if not found and is_parameter(name):
            found = (
                f"it is a parameter of requests, for generate and SamplingParams; "
                f"generation.{name} is its default"
            )
        if not found:
            continue  # resolving the specification reports unknown keys
        if " " not in found:
            simple = isinstance(value, int | float | str) and found == "engine.context"
            shown = repr(value)[:40] if simple else "..."
            call = f"LLM(source, **{{{found!r}: {shown}}})"
            found = f"here it is {found}: {call}, on the command line --set {found}={shown}"
        raise RequestError(f"there is no key {name!r}: {found}")
