"""Unused config keys: what a checkpoint says that nothing read, and which of it changes answers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Set
from typing import Any

from jinfer.loader.config.config_key_rules import Rule
from jinfer.loader.config.known_config_keys import KNOWN, ROTARY, WINDOW
from jinfer.loader.config.quantization_config import CONFIG_KEYS
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.spec_errors import SpecError, show_value

_log = logging.getLogger("jinfer")

# Read by others than specifications.
_ELSEWHERE = frozenset(
    {"architectures", "text_config", "eos_token_id", *CONFIG_KEYS}
    | {"decoder_start_token_id", "forced_bos_token_id", "general", "tokenizer", "split"}
)

_ROTARY_TABLES = ("rope_scaling", "rope_parameters")


def unread(config: Mapping[str, Any], asked: Set[str]) -> dict[str, Any]:
    """The keys that nothing looked up and that have a value, with it.

    Of a table of which some keys were looked up, the others, with dots.

    Args:
        config: config.json, or GGUF's metadata.
        asked: the keys that were looked up, with dots where they are in tables.
    """
    return dict(_unread(config, asked, ""))


def _unread(table: Mapping[str, Any], asked: Set[str], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        key = f"{prefix}{name}"
        if value is None or key in asked or key.partition(".")[0] in _ELSEWHERE:
            continue
        if isinstance(value, Mapping) and any(other.startswith(f"{key}.") for other in asked):
            yield from _unread(value, asked, f"{key}.")
        else:
            yield key, value


def consequences(
    keys: Mapping[str, Any], config: Mapping[str, Any], spec: ModelSpec
) -> dict[str, tuple[Any, str]]:
    """Keys of `unread` that are known to change the computation -> their value, and how.

    Those are left out whose value changes nothing, or says what the specification says as well.
    """
    architecture = f"{config.get('general.architecture', '')}."
    found: dict[str, tuple[Any, str]] = {}
    for key, value in _leaves(keys):
        known = _known(key.removeprefix(architecture), config)
        if known is not None and not _holds(known[1], value, spec):
            found[key] = value, known[0]
    return found


def _holds(rule: Rule, value: Any, spec: ModelSpec) -> bool:
    try:
        return rule(value, spec)
    except (TypeError, ValueError, ArithmeticError, LookupError):  # no value for such a key
        return False


def _leaves(keys: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys with their values, those inside tables with dots."""
    for name, value in keys.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value


def _known(key: str, config: Mapping[str, Any]) -> tuple[str, Rule] | None:
    """What the key says, and its rule; None if it is not used."""
    first, _, inner = key.partition(".")
    types = config.get("layer_types")
    if first in _ROTARY_TABLES and inner:
        kind, _, last = inner.rpartition(".")
        is_used = not kind or not isinstance(types, list) or kind in types
        return ROTARY.get(last) if is_used else None
    known = KNOWN.get(key)
    if known is WINDOW:
        has_windows = not isinstance(types, list) or not types or "sliding_attention" in types
        return known if has_windows and config.get("use_sliding_window") is not False else None
    return known


def check_followed(keys: Mapping[str, Any], config: Mapping[str, Any], spec: ModelSpec) -> None:
    """Refuses a checkpoint with keys that change the computation and that nothing follows.

    Raises:
        SpecError: names them, unless `trust_config` is "warn".
    """
    known = consequences(keys, config, spec)
    for key, (value, how) in known.items():
        reason = f"{show_value(value)} is not followed: {how}"
        if spec.trust_config == "warn":
            _log.warning("%s: %s = %s", spec.path, key, reason)
            continue
        others = f"; nor are {', '.join(list(known)[1:9])}" if len(known) > 1 else ""
        ways = 'write a specification that does, or set trust_config = "warn" to go on without'
        raise SpecError(spec.path, key, f"{reason}{others}; {ways}")
