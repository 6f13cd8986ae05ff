"""EAGLE/MTP heads, weights: hidden-state taps in the target, and weights shared with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import jax.numpy as jnp

from jinfer.engine.engine_core import EngineCore
from jinfer.loader.open_model import Opened
from jinfer.loader.weights.load_weights import load
from jinfer.loader.weights.plan_weights import WeightPlan, plan_weights
from jinfer.loader.weights.tensor_mapping import by_name
from jinfer.modelspec.draft_head import add_taps, target_layers
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.quantization_table import RuleSpec
from jinfer.modelspec.spec_errors import SpecError
from jinfer.nn.abstract_model import AbstractModel, build_abstract_model
from jinfer.speculate.other_device import put_on


def with_taps(opened: Opened, head: Opened, source: str) -> Opened:
    """The target with taps on the layers that a head reads.

    Args:
        source: name of the head, for messages.

    Raises:
        SpecError: the head does not fit the target.
    """
    follows, decoder = head.spec.follows, opened.spec.decoder
    assert follows is not None, "it is a head"
    assert decoder is not None, "it is a decoder"
    if opened.spec.type != "decoder-only":
        reason = f"{source} is a head, and the model is {opened.spec.type}; a head follows decoders"
        raise SpecError(opened.spec.path, "speculation.draft", reason)
    layers = target_layers(follows, len(decoder.layers))
    if layers is None:
        wanted = ", ".join(map(str, follows.layers))
        reason = f"{source} follows layers {wanted}, but the model has {len(decoder.layers)}"
        raise SpecError(opened.spec.path, "speculation.draft", reason)
    hidden = opened.spec.dims.get("hidden", 0)
    if len(layers) * hidden != follows.width:
        reason = (
            f"{source} is given {follows.width} numbers of a token, but {len(layers)} layers of "
            f"the model give {len(layers) * hidden}; take a head that was made for it"
        )
        raise SpecError(opened.spec.path, "speculation.draft", reason)
    return replace(opened, spec=add_taps(opened.spec, layers))


@dataclass(frozen=True)
class HeadWeights:
    """The weights of a head, some of which are the target's.

    Attributes:
        model: the head, with its parameters as they are stored.
        own, shared: weights from the head's files, and from the target's.
    """

    model: AbstractModel
    own: WeightPlan
    shared: WeightPlan

    def load(self, engine: EngineCore, programs: Any, progress: bool) -> tuple[Any, ...]:
        """Loads all parameters; on the target's device the shared ones are the target's arrays."""
        if programs.device is not None:
            put = put_on(programs.device)
            loaded = load(self.own, put, progress=progress)
            known: tuple[Any, ...] = load(self.shared, put, progress=progress)
        else:
            loaded = load(self.own, progress=progress)
            every = dict(zip(engine.model.names, engine.parameters, strict=True))
            known = tuple(every[name] for name in self.shared.model.names)
        named = dict(zip(self.own.model.names, loaded, strict=True))
        named |= dict(zip(self.shared.model.names, known, strict=True))
        return tuple(named[name] for name in self.model.names)


def head_weights(engine: EngineCore, opened: Opened, head: Opened, *, same: bool) -> HeadWeights:
    """Finds the weights of a head.

    Args:
        same: the head is in the target's checkpoint, so that all common weights are shared.

    Raises:
        LoadError, CheckpointError: weights that are missing.
    """
    model = build_abstract_model(head.spec, jnp.dtype(head.dtype))
    shapes = {n: p.shape for n, p in zip(engine.model.names, engine.model.parameters, strict=True)}
    stacks = tuple(f"{stack.name}." for stack in head.spec.stacks)
    files = by_name(head.checkpoint, head.spec.tensors)

    def is_shared(name: str, parameter: Any) -> bool:
        if name.startswith(stacks) or shapes.get(name) != parameter.shape:
            return False
        place = head.spec.tensors.source_of(name)
        there = place is not None and any(n in files for p in place.candidates() for n in p.names)
        return same or not there

    of_model = {n for n, p in zip(model.names, model.parameters, strict=True) if is_shared(n, p)}
    own_part = _only(model, (n for n in model.names if n not in of_model))
    ruled = _ruled(head.spec, own_part)
    own = plan_weights(own_part, ruled, head.checkpoint, head.activations, kv_cache=head.kv_cache)
    whole = build_abstract_model(opened.spec, jnp.dtype(opened.dtype))
    part = _only(whole, of_model)
    # The rest of the checkpoint is not reported as unused.
    tensors = replace(opened.spec.tensors, ignore=("*",))
    spec = replace(_ruled(opened.spec, part), tensors=tensors)
    shared = plan_weights(part, spec, opened.checkpoint, opened.activations)
    stored = {
        name: parameter
        for plan in (own, shared)
        for name, parameter in zip(plan.model.names, plan.model.parameters, strict=True)
    }
    full = replace(model, parameters=tuple(stored[name] for name in model.names))
    return HeadWeights(full, own, shared)


def _ruled(spec: ModelSpec, part: AbstractModel) -> ModelSpec:
    """The specification with only those quantization rules that match a part's weights."""

    def is_about(rule: RuleSpec) -> bool:
        names = [*part.names, *(name.removesuffix(".weight") for name in part.names)]
        return any(fnmatchcase(name, rule.match) for name in names)

    rules = tuple(rule for rule in spec.quantization.rules if is_about(rule))
    return replace(spec, quantization=replace(spec.quantization, rules=rules))


def _only(model: AbstractModel, names: Iterable[str]) -> AbstractModel:
    """The model with only some of its parameters."""
    wanted = set(names)
    places = [place for place, name in enumerate(model.names) if name in wanted]
    parts: dict[str, Any] = {
        key: tuple(getattr(model, key)[place] for place in places)
        for key in ("names", "parameters", "axes", "roles")
    }
    return replace(model, **parts)
