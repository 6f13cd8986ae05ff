"""What the description of the routes says of sampling parameters: ranges, names, groups.

The page at `/` makes its form of settings from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from jinfer.sampling.param_names import PARAMETERS, SAMPLERS, Strategy
from jinfer.sampling.param_ranges import RANGES
from jinfer.sampling.parameter_docs import described

# Each parameter that a person may set, by its name in requests; the others are aliases of these,
# or ask for more than one answer.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Choice": (
        "strategy",
        "temperature",
        "dynatemp_range",
        "dynatemp_exponent",
        "seed",
        "samplers",
    ),
    "Filters": (
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "tfs_z",
        "top_a",
        "top_n_sigma",
        "xtc_probability",
        "xtc_threshold",
    ),
    "Penalties": (
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "penalty_last_n",
        "dry_multiplier",
        "dry_base",
        "dry_allowed_length",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
    ),
    "Mirostat": ("mirostat", "mirostat_tau", "mirostat_eta"),
    "FSD": (
        "fsd_alpha",
        "fsd_k",
        "fsd_n",
        "fsd_beta",
        "fsd_pool",
        "random_fsd_tokens",
        "random_fsd_probability",
    ),
    "Search": ("penalty_alpha", "beams", "length_penalty", "early_stopping"),
    "Length and end": (
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "include_stop_str_in_output",
        "skip_special_tokens",
    ),
    "Words": (
        "logit_bias",
        "banned_token_ids",
        "allowed_token_ids",
        "bad_words",
        "bad_words_ids",
    ),
    "Structure": ("json_schema", "regex", "choice", "grammar"),
    "Speculation": ("speculation",),
}
# Requests' names that are neither the parameter's own nor another engine's.
_OWN = {"include_stop_str_in_output": "include_stop", "skip_special_tokens": "skip_special"}
# Where -1 stands for none, or for all.
_NONE = ("top_k", "seed", "max_tokens")
_CHOICES: Mapping[str, list[Any]] = {
    "strategy": list(get_args(Strategy)),
    "samplers": [list(SAMPLERS)],
}


def own_name(field: str) -> str:
    """The parameter that a field of a request sets."""
    return _OWN.get(field, PARAMETERS.get(field, field))


def tell(schema: dict[str, Any]) -> None:
    """Adds to the JSON schema of a request what is known of its sampling parameters."""
    texts = {name: text for names, text in described().items() for name in names}
    groups = {name: group for group, names in GROUPS.items() for name in names}
    schema["properties"] = _ordered(schema["properties"], list(groups))
    for name, field in schema["properties"].items():
        own = own_name(name)
        if name in groups:
            field["x-group"] = groups[name]
        if own in texts:
            field.setdefault("description", texts[own])
        if own in RANGES:
            _bound(field, own)
        if name in _CHOICES:
            field["examples"] = _CHOICES[name]


def _ordered(fields: dict[str, Any], order: list[str]) -> dict[str, Any]:
    """Fields of which some stand in an order, in the places that they have among the others."""
    known = iter([name for name in order if name in fields])
    names = [next(known) if name in order else name for name in fields]
    return {name: fields[name] for name in names}


def _bound(field: dict[str, Any], own: str) -> None:
    """Writes a parameter's range to the alternatives that are numbers."""
    bounds = RANGES[own]
    least = -1 if own in _NONE else bounds.least
    for one in field.get("anyOf", ()):
        if one.get("type") in ("integer", "number"):
            one["exclusiveMinimum" if bounds.above else "minimum"] = least
            one["maximum"] = bounds.most
