"""Draft sources: the table of names in `[speculation] draft`, and the drafters that run models.

A new draft source is a module with a `Drafter`, its test, and a line of `DRAFT_SOURCES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jinfer.engine.runner.compiled_programs import CompiledPrograms
from jinfer.engine.runner.model_runner import ModelRunner
from jinfer.loader.open_model import Opened, open_model
from jinfer.loader.weights import load_weights
from jinfer.loader.weights.plan_weights import WeightPlan, plan_weights
from jinfer.loader.weights.quantized_cache import with_formats
from jinfer.loader.weights.read_weights import on_device
from jinfer.modelspec.layer_spec import some_layers
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.spec_errors import SpecError, show_value
from jinfer.modelspec.speculation_table import DraftSpec
from jinfer.nn.abstract_model import build_abstract_model
from jinfer.speculate.draft_model import DraftModel, draft_programs, put_on
from jinfer.speculate.drafter import DraftContext, Drafter
from jinfer.speculate.eagle_drafter import EagleDrafter, eagle_weights
from jinfer.speculate.prompt_lookup import PromptLookup
from jinfer.speculate.suffix_tree import SuffixDrafter
from jinfer.tokenizer import Tokenizer

KEY = "speculation.draft"

# The target's source and overrides, of which a draft may be a narrower copy.
type ModelSource = tuple[str | Path, Mapping[str, Any]]


def open_draft_model(opened: Opened, entry: DraftSpec, target: ModelSource) -> Opened:
    """Opens the model that an entry names, or the target with narrower weights.

    Raises:
        SpecError: a model that does not fit the target.
        SourceError, CheckpointError, TokenizerError: one that cannot be opened.
    """
    if entry.source is None:
        return _open_target_again(target, _changes(entry))
    draft = open_model(_resolved(entry.source, opened.spec), _changes(entry), alone=False)
    if draft.spec.follows is None:
        _check_tokens(opened, draft, entry.source)
    elif draft.spec.dims["vocab"] != opened.spec.dims["vocab"]:
        vocabs = draft.spec.dims["vocab"], opened.spec.dims["vocab"]
        reason = f"{entry.source} is for {vocabs[0]} tokens, and the model has {vocabs[1]}"
        raise SpecError(opened.spec.path, KEY, f"{reason}; take a head that was made for it")
    if not draft.spec.partition.is_plain:
        reason = (
            "a draft model runs on one device; leave it out, and set device in the entry of draft"
        )
        raise SpecError(draft.spec.path, "partition", reason)
    return draft


def open_own_head(opened: Opened, entry: DraftSpec, target: ModelSource) -> Opened:
    """Opens the head that the target's checkpoint has. Raises `SpecError` if it has none."""
    if opened.spec.speculation.head is None:
        reason = "the model's family knows of no head in its checkpoints; name a draft"
        raise SpecError(opened.spec.path, KEY, reason)
    return _open_target_again(target, _changes(entry) | {"family": opened.spec.speculation.head})


def _changes(entry: DraftSpec) -> dict[str, Any]:
    """Overrides that an entry's narrower weights ask for."""
    if entry.weights is None:
        return {}
    # Fast to quantize; a draft that is a little worse changes no token.
    return {"quantization.weights": entry.weights, "quantization.method": "mse"}


def _open_target_again(target: ModelSource, changes: Mapping[str, Any]) -> Opened:
    source, overrides = target
    dropped = ("speculation", "partition")
    common = {k: v for k, v in overrides.items() if k.partition(".")[0] not in dropped}
    return open_model(source, {**common, "speculation.draft": [], **changes}, alone=False)


def _resolved(source: str, spec: ModelSpec) -> str | Path:
    """A source in a specification file may be relative to that file."""
    near = Path(spec.path).parent / source
    return near if spec.path.endswith(".toml") and near.exists() else source


def _check_tokens(opened: Opened, draft: Opened, source: str) -> None:
    """Raises `SpecError` if a draft model's tokens are not the target's."""
    path = opened.spec.path
    if draft.spec.decoder is None or draft.spec.type != opened.spec.type:
        reason = f"{source} is {draft.spec.type}, and the model is {opened.spec.type}"
        raise SpecError(path, KEY, reason)
    if not draft.spec.generates:
        raise SpecError(path, KEY, f"{source} has no vocabulary head, and so drafts no tokens")
    if opened.spec.type != "decoder-only":
        raise SpecError(
            path, KEY, 'an encoder-decoder can only be drafted for by "ngram", "suffix"'
        )
    sizes = [model.spec.dims["vocab"] for model in (opened, draft)]
    if (opened.tokenizer is None) != (draft.tokenizer is None):
        whose = source if draft.tokenizer is None else "the model"
        raise SpecError(path, KEY, f"{whose} has no tokenizer, so {source} cannot be compared")
    if opened.tokenizer is None or draft.tokenizer is None:
        if sizes[0] != sizes[1]:
            reason = f"{source} has {sizes[1]} tokens, and the model {sizes[0]}; take another draft"
            raise SpecError(path, KEY, reason)
        return
    if (id := _first_difference(opened.tokenizer, draft.tokenizer, min(sizes))) is not None:
        mine, other = (t.token(id) for t in (opened.tokenizer, draft.tokenizer))
        raise SpecError(
            path,
            KEY,
            f"the tokenizer of {source} is another one: token {id} is {show_value(other)} "
            f"there and {show_value(mine)} here; take a draft of the same family",
        )


def _first_difference(first: Tokenizer, other: Tokenizer, count: int) -> int | None:
    """The first token id that two tokenizers spell differently."""
    return next((id for id in range(count) if first.token(id) != other.token(id)), None)


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


def model_drafter(context: DraftContext) -> DraftModel:
    """A drafter that runs a model: a head if the model reads the target's hidden states.

    Raises:
        SpecError: its device is not there.
        LoadError, CheckpointError: its weights are not there.
    """
    entry, draft, engine = context.entry, context.draft_model, context.engine
    name = Path(entry.source).stem if entry.source is not None else f"own {entry.weights}"
    target = engine.runner
    if draft.spec.follows is not None:
        weights = eagle_weights(target, context.opened, draft, same=entry.source == "head")
        model, read = weights.model, partial(weights.load, target)
    else:
        whole, files = build_abstract_model(draft.spec, jnp.dtype(draft.dtype)), draft.checkpoint
        plan = with_formats(
            plan_weights(whole, draft.spec, files, draft.activations, kv_cache=draft.kv_cache)
        )
        model, read = plan.model, partial(_load, plan)
    programs = draft_programs(model, target.programs.sizes, draft.kv_cache, _device(context))
    runner = ModelRunner(programs=programs)
    if draft.spec.follows is None:
        drafter = DraftModel(runner=runner, target=target, name=name)
    else:
        scheduler = engine.scheduler
        drafter = EagleDrafter(runner=runner, target=target, name=name, scheduler=scheduler)

    def load(progress: bool) -> None:
        runner.parameters = read(programs, progress)

    context.load.append(load)
    return drafter


def _load(plan: WeightPlan, programs: CompiledPrograms, progress: bool) -> tuple[Any, ...]:
    """The weights of a draft model, on its device."""
    put = on_device if programs.device is None else put_on(programs.device)
    return load_weights.load(plan, put, progress=progress)


def _device(context: DraftContext) -> jax.Device | None:
    """The draft model's device; None: the default one, where a target that is not split is."""
    number, there = context.entry.device, jax.devices()
    if number is None:
        return context.engine.runner.programs.home_device
    if number >= len(there):
        are = f"there are {len(there)}, from 0 on" if len(there) > 1 else "there is one, number 0"
        reason = f"device {number} is not there: {are}"
        raise SpecError(context.opened.spec.path, f"{KEY}.device", reason)
    return there[number]


@dataclass(frozen=True)
class DraftSource:
    """A kind of draft.

    Attributes:
        make: makes the drafter.
        open: opens the model that it drafts with; None if it needs no other model.
        options: keys that an entry of this source may have.
    """

    make: Callable[[DraftContext], Drafter]
    open: Callable[[Opened, DraftSpec, ModelSource], Opened] | None = None
    options: tuple[str, ...] = ()

    def check(self, entry: DraftSpec) -> tuple[str, str] | None:
        """The first option that an entry must not have: its key and the reason."""
        if entry.weights is not None and "weights" not in self.options:
            return "source", f'"{entry.source}" has no weights and no layers'
        if entry.device is not None and "device" not in self.options:
            return "device", "is of a model with weights of its own; leave it out"
        return None


_MODEL = ("weights", "device")

DRAFT_SOURCES: Mapping[str, DraftSource] = {
    "ngram": DraftSource(lambda _: PromptLookup(branches=2)),
    "suffix": DraftSource(lambda _: SuffixDrafter()),
    "head": DraftSource(model_drafter, open_own_head, _MODEL),
}
# Entries that name a model instead, or give `weights` or `skip` of the target itself.
OTHER_MODEL = DraftSource(model_drafter, open_draft_model, _MODEL)
SKIPPED_LAYERS = DraftSource(layer_skipping, options=("skip",))


def draft_source(entry: DraftSpec) -> DraftSource:
    """The source of an entry of `[speculation] draft`."""
    unnamed = SKIPPED_LAYERS if entry.skip else OTHER_MODEL
    return DRAFT_SOURCES.get(entry.source or "", unnamed)
