"""Draft heads (EAGLE, MTP): which hidden states of the target model they take, and their cache.

A draft head is a model that runs one token ahead: its inputs are tokens and the target model's
hidden states at the positions before. The target model stores these in its paged cache, like keys,
so they are shared, copied and freed like those.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from jinfer.modelspec.block import Block, CachedKV
from jinfer.modelspec.bounded_types import Size
from jinfer.modelspec.formula import Formula
from jinfer.modelspec.layer_spec import FollowSpec, LayerSpec
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.spec_errors import SpecError, show_value
from jinfer.modelspec.spec_values import SpecValues
from jinfer.modelspec.table_reader import read_value
from jinfer.modelspec.toml_tables import as_table, check_keys

FOLLOW_KEYS = ("layers", "width", "hidden")
TAP = "tap"  # module that caches a layer's hidden states
MIDDLE = "middle"
_MOST = 16  # layers whose hidden states a head takes


@dataclass(frozen=True, kw_only=True)
class HiddenTapSpec(Block):
    """Caches the hidden states of a layer, for a draft head."""

    kind: Literal["tap"] = "tap"
    width: int
    passes: ClassVar[int] = 1

    def cached(self) -> CachedKV:
        return CachedKV(1, self.width, 0)


def read_follows(written: Any, hidden: Formula, values: SpecValues, key: str) -> FollowSpec:
    """Reads a head's `follows` table. Raises `SpecError`.

    Args:
        hidden: its formula, compiled.
    """
    table = check_keys(as_table(written, values.path, key), FOLLOW_KEYS, values.path, key)
    found = values.value(table.get("layers", [-1]), f"{key}.layers", names={MIDDLE: MIDDLE})
    listed = found if isinstance(found, list | tuple) else [found]
    right = ((type(one) is int and abs(one) < 10_000) or one == MIDDLE for one in listed)
    if not 0 < len(listed) <= _MOST or not all(right):
        layers = f'no list of layers, from 0 on, from the end -1 on, or "{MIDDLE}"'
        reason = f"{show_value(found)} is {layers}"
        raise SpecError(values.path, f"{key}.layers", reason)
    width = read_value(Size, table.get("width", "hidden"), values, f"{key}.width")
    return FollowSpec(tuple(listed), width, hidden)


def target_layers(follows: FollowSpec, count: int) -> tuple[int, ...] | None:
    """The target layers that a head takes, for a model of `count` layers; None: it has too few."""
    found = sorted(
        count // 2 - 1 if one == MIDDLE else int(one) + (count if int(one) < 0 else 0)
        for one in follows.layers
    )
    fits = all(0 <= one < count for one in found) and len(set(found)) == len(found)
    return tuple(found) if fits else None


def add_taps(spec: ModelSpec, layers: Sequence[int]) -> ModelSpec:
    """The model with taps that cache the hidden states of some decoder layers."""
    width = int(spec.dims["hidden"])

    def own(index: int, layer: LayerSpec) -> LayerSpec:
        return _tapped(layer, width) if index in layers else layer

    stacks = tuple(
        replace(stack, layers=tuple(own(i, layer) for i, layer in enumerate(stack.layers)))
        if stack.name == "decoder"
        else stack
        for stack in spec.stacks
    )
    return replace(spec, stacks=stacks)


def _tapped(layer: LayerSpec, width: int) -> LayerSpec:
    *lines, (_, value) = layer.wiring.statements
    written = [
        f"{target} = {ast.unparse(expression)}" if target else "" for target, expression in lines
    ]
    text = "\n".join([*filter(None, written), f"x = {TAP}({ast.unparse(value)})"])
    old = layer.wiring
    passing = (*(old.passing or ()), (TAP, HiddenTapSpec.passes))
    wiring = replace(old, text=text, calls=(*old.calls, TAP), passing=passing)
    modules: Any = (*layer.modules, (TAP, HiddenTapSpec(width=width)))
    return replace(layer, wiring=wiring, modules=modules)


def tap_names(caches: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of a model's tap caches, in the order of layers."""
    return tuple(name for name in caches if name.rpartition(".")[2] == TAP)
