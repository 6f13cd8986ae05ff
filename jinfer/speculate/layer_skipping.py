"""Self-speculative decoding (layer skipping): the target drafts without some of its layers."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp

from jinfer.engine.runner.model_runner import ModelRunner
from jinfer.modelspec.layer_spec import some_layers
from jinfer.modelspec.spec_errors import SpecError
from jinfer.nn.abstract_model import build_abstract_model
from jinfer.speculate.draft_model import DraftModel, draft_programs
from jinfer.speculate.drafter import DraftContext
from jinfer.speculate.open_draft_model import KEY


def layer_skipping(context: DraftContext) -> DraftModel:
    """A drafter that runs the target without some layers; the weights are the same arrays.

    Raises:
        SpecError: a layer that is not there, or a model whose layers cannot be skipped.
    """
    target, opened = context.engine.runner, context.opened
    spec = opened.spec
    assert spec.decoder is not None, "it has a cache"
    if spec.type != "decoder-only":
        raise SpecError(spec.path, KEY, "layers are only skipped in models without an encoder")
    if not spec.partition.is_plain:
        reason = "skip shares the weights of a model that is whole; leave out [partition], or skip"
        raise SpecError(spec.path, KEY, reason)
    count = len(spec.decoder.layers)
    skipped = context.entry.skip
    if wrong := [i for i in skipped if i >= count]:
        raise SpecError(spec.path, KEY, f"skip has layer {wrong[0]}; there are 0 to {count - 1}")
    remaining = [i for i in range(count) if i not in skipped]
    if not remaining:
        raise SpecError(spec.path, KEY, "skip leaves no layer; name fewer")
    try:
        layers = some_layers(spec.decoder.layers, remaining)
    except LookupError as error:
        raise SpecError(spec.path, KEY, f"{error}, which skip leaves out; keep it") from None
    shorter = replace(spec.decoder, layers=layers)
    if lost := set(shorter.values_before(0)) - shorter.stem.assigned:
        reason = f"skip leaves out the layer that assigns {min(lost)}; keep it"
        raise SpecError(spec.path, KEY, reason)
    stacks = tuple(shorter if s.name == "decoder" else s for s in spec.stacks)
    built = build_abstract_model(replace(spec, stacks=stacks), jnp.dtype(opened.dtype))
    indices = [target.model.names.index(_name_in_target(n, remaining)) for n in built.names]
    model = replace(built, parameters=tuple(target.model.parameters[i] for i in indices))
    programs = draft_programs(model, target.programs.sizes, opened.kv_cache)
    runner = ModelRunner(programs=programs)
    drafter = DraftModel(runner=runner, target=target, name="skip")

    def share(progress: bool) -> None:
        parameters = target.parameters
        runner.parameters = tuple(parameters[i] for i in indices)

    context.load.append(share)
    return drafter


def _name_in_target(name: str, remaining: list[int]) -> str:
    """The target's name of a parameter of the model without some layers."""
    stack, _, rest = name.partition(".")
    index, _, inner = rest.partition(".")
    if stack != "decoder" or not index.isdecimal():
        return name
    return f"decoder.{remaining[int(index)]}.{inner}"
