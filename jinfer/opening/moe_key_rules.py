"""Config keys of mixtures of experts: whether a model does what they say nevertheless."""

from __future__ import annotations

from typing import Any

from jinfer.modelspec.feed_forward_blocks import MoESpec
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.opening.config_key_rules import layers_of, values_of


def same_scoring(value: Any, spec: ModelSpec) -> bool:
    """Whether experts are scored so; GGUF numbers the functions, dots1 says how it chooses."""
    names = {"1": "softmax", "2": "sigmoid", "noaux_tc": "sigmoid"}
    return not value or names.get(str(value), str(value)) in (
        values_of(spec, "scoring") or {"softmax"}
    )


def same_choice(value: Any, spec: ModelSpec) -> bool:
    """Whether experts are chosen by that method, in DeepSeek's words."""
    if True in values_of(spec, "correction_bias"):
        return not value or value == "noaux_tc"
    groups = max(values_of(spec, "groups"), default=1)
    return not value or value in ("group_limited_greedy", "greedy" if groups == 1 else "")


def _dense(spec: ModelSpec) -> list[bool]:
    """Whether a layer has no experts, of each; empty where none has any.

    Empty for a head that drafts as well: its file describes the model that it was trained for.
    """
    if spec.follows is not None:
        return []
    dense = [
        not any(isinstance(block, MoESpec) for _, block in layer.modules)
        for layer in layers_of(spec)
    ]
    return [] if all(dense) else dense


def first_dense(value: Any, spec: ModelSpec) -> bool:
    """Whether that many layers at the beginning have no experts, and no more."""
    dense = _dense(spec)
    first = dense.index(False) if dense else 0
    return not dense or min(value, len(dense)) == first


def every_dense(value: Any, spec: ModelSpec) -> bool:
    """Whether experts are in every so-and-so-many-th layer, or in those that a list says.

    The list has 0 or "dense" for layers without.
    """
    dense = _dense(spec)
    if isinstance(value, list):
        return not dense or [each in (0, "dense") for each in value] == dense
    sparse = [i for i, without in enumerate(dense) if not without]
    return value in (0, 1) or len({i % value for i in sparse}) <= 1


def these_dense(value: Any, spec: ModelSpec) -> bool:
    """Whether the layers of those numbers have no experts."""
    dense = _dense(spec)
    return not dense or not value or all(i < len(dense) and dense[i] for i in value)


def sigmoid_scoring(value: Any, spec: ModelSpec) -> bool:
    """Whether experts are scored by a sigmoid if a key says so."""
    return same_scoring("sigmoid" if value else "", spec)
