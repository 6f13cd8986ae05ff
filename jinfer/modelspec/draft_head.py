"""Heads that draft for another model from what its layers give: what they take, and where it is.

A head is a model of its own that stands one token ahead: beside each token it is given vectors of
the followed model at the place before. The followed model keeps these in its paged cache, as it
does keys; so they are shared, copied and given back as those are.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jinfer.modelspec.bounded_types import Size
from jinfer.modelspec.formula import Formula
from jinfer.modelspec.layer_spec import FollowSpec, LayerSpec
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.spec_errors import SpecError, show
from jinfer.modelspec.spec_values import Values
from jinfer.modelspec.table_reader import read
from jinfer.modelspec.toml_tables import as_table, check_keys

FOLLOW_KEYS = ("layers", "width", "hidden")
TAP = "tap"  # the module that keeps what a layer gives
MIDDLE = "middle"
_MOST = 16  # layers that a head takes the vectors of


@dataclass(frozen=True, kw_only=True)
class Tap:
    """Keeps the vectors that a layer gives, for a head that follows the model."""

    kind: Literal["tap"] = "tap"
    width: int


def read_follows(written: Any, hidden: Formula, values: Values, key: str) -> FollowSpec:
    """Reads the table of a head. Raises `SpecError`.

    Args:
        hidden: its formula, compiled.
    """
    table = check_keys(as_table(written, values.path, key), FOLLOW_KEYS, values.path, key)
    found = values.value(table.get("layers", [-1]), f"{key}.layers", names={MIDDLE: MIDDLE})
    listed = found if isinstance(found, list | tuple) else [found]
    right = ((type(one) is int and abs(one) < 10_000) or one == MIDDLE for one in listed)
    if not 0 < len(listed) <= _MOST or not all(right):
        reason = f'{show(found)} is no list of layers, from 0 on, from the end -1 on, or "{MIDDLE}"'
        raise SpecError(values.path, f"{key}.layers", reason)
    width = read(Size, table.get("width", "hidden"), values, f"{key}.width")
    return FollowSpec(tuple(listed), width, hidden)


def layers_of(follows: FollowSpec, count: int) -> tuple[int, ...] | None:
    """The layers that a head takes the vectors of, in a model of so many; None: it has fewer."""
    found = sorted(
        count // 2 - 1 if one == MIDDLE else int(one) + (count if int(one) < 0 else 0)
        for one in follows.layers
    )
    fits = all(0 <= one < count for one in found) and len(set(found)) == len(found)
    return tuple(found) if fits else None


def tapped(spec: ModelSpec, layers: Sequence[int]) -> ModelSpec:
    """The model, which keeps what some of its decoder's layers give."""
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
    wiring = replace(layer.wiring, text=text, calls=(*layer.wiring.calls, TAP))
    modules: Any = (*layer.modules, (TAP, Tap(width=width)))
    return replace(layer, wiring=wiring, modules=modules)


def taps(caches: Mapping[str, Any]) -> tuple[str, ...]:
    """The caches of a model that keep what layers give, in the layers' order."""
    return tuple(name for name in caches if name.rpartition(".")[2] == TAP)
