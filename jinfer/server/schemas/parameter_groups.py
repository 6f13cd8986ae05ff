"""Sampling parameters in the OpenAPI description: ranges, texts, groups.

The settings of the page at `/` are made from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from jinfer.modelspec.field_types import TINY, documentation
from jinfer.sampling.param_field import ALIASES, Group, Parameter
from jinfer.sampling.samplers import SELECTABLE
from jinfer.sampling.sampling_params import PARAMETERS, SamplingParams
from jinfer.sampling.strategies import Strategy

# The request's fields under each heading; other fields are aliases of these, or ask for more than
# one answer.
GROUPS: Mapping[str, tuple[str, ...]] = {
    group: tuple(p.fields[0] for p in PARAMETERS.values() if p.group == group)
    for group in get_args(Group)
    if group
}
_PARAMETER_OF = {field: p.name for p in PARAMETERS.values() for field in p.fields}
_EXAMPLES: Mapping[str, list[Any]] = {
    "strategy": list(get_args(Strategy)),
    "samplers": [list(SELECTABLE)],
}


def parameter_of(field: str) -> str:
    """The parameter that a field of a request sets."""
    return _PARAMETER_OF.get(field, ALIASES.get(field, field))


def describe(schema: dict[str, Any]) -> None:
    """Adds ranges, texts and groups of sampling parameters to a request's JSON schema."""
    texts = {name: text for names, text in documentation(SamplingParams).items() for name in names}
    groups = {name: group for group, names in GROUPS.items() for name in names}
    schema["properties"] = _ordered(schema["properties"], list(groups))
    for name, field in schema["properties"].items():
        own = parameter_of(name)
        if name in groups:
            field["x-group"] = groups[name]
        if own in texts:
            field.setdefault("description", texts[own])
        if own in PARAMETERS:
            _bound(field, PARAMETERS[own])
        if name in _EXAMPLES:
            field["examples"] = _EXAMPLES[name]


def _ordered(fields: dict[str, Any], order: list[str]) -> dict[str, Any]:
    """The fields, those of `order` sorted by it among the places that they have."""
    sorted_names = iter([name for name in order if name in fields])
    names = [next(sorted_names) if name in order else name for name in fields]
    return {name: fields[name] for name in names}


def _bound(field: dict[str, Any], parameter: Parameter) -> None:
    """Writes a parameter's bounds to the alternatives that are numbers."""
    if (bounds := parameter.bounds) is None:
        return
    low = -1 if parameter.minus_one else bounds.low
    lowest = {"exclusiveMinimum": 0} if low == TINY else {"minimum": low}
    for option in field.get("anyOf", ()):
        if option.get("type") in ("integer", "number"):
            option |= {**lowest, "maximum": bounds.high}
