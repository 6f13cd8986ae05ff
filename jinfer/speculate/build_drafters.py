"""From `[speculation]` to who drafts for an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jinfer.engine.engine import Engine
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.spec_errors import SpecError, show
from jinfer.modelspec.speculation_table import HEAD, LOOKUPS, DraftSpec
from jinfer.nn.abstract_model import build
from jinfer.opening.open_model import Opened, open_model
from jinfer.speculate.calibrate_costs import measure
from jinfer.speculate.draft_length import Control
from jinfer.speculate.draft_model import DraftModel, draft_programs
from jinfer.speculate.drafter import Drafter
from jinfer.speculate.head_drafter import HeadModel
from jinfer.speculate.head_weights import head_weights, with_taps
from jinfer.speculate.other_device import PlacedPrograms
from jinfer.speculate.prompt_lookup import Lookup
from jinfer.speculate.speculative_decoding import Speculation
from jinfer.speculate.suffix_tree import Suffix
from jinfer.tokenizer import Tokenizer
from jinfer.weights.plan_weights import find_weights
from jinfer.weights.qk_equalization import equalized

_KEY = "speculation.draft"


@dataclass(frozen=True)
class Drafts:
    """What drafts for an engine.

    Attributes:
        speculation: as the engine is given it.
        load: of draft models: gives them their weights, once the engine has its own.
    """

    speculation: Speculation
    load: list[Callable[[bool], None]]


@dataclass(frozen=True)
class OpenedDrafts:
    """What `[speculation]` asks for, opened.

    Attributes:
        opened: the model, which keeps what heads take of it.
        plain: the same without.
        models: of each entry of `draft`; None: it needs none, or is a part of the model.
    """

    opened: Opened
    plain: Opened
    models: tuple[Opened | None, ...]

    def drafts(self, engine: Engine) -> Drafts | None:
        """Who drafts for an engine; None: nobody.

        Raises:
            SpecError: a draft that does not fit the model.
            LoadError, CheckpointError: one whose weights are not there.
        """
        opened, asked = self.plain, self.opened.spec.speculation
        if not engine.model.caches:
            return None
        load: list[Callable[[bool], None]] = []
        drafters: list[Drafter] = []
        for entry, model in zip(asked.draft, self.models, strict=True):
            if entry.source == "ngram":
                drafters.append(Lookup(branches=2))
            elif entry.source == "suffix":
                drafters.append(Suffix())
            elif model is None:
                drafters.append(_without_layers(engine, opened, entry, load))
            elif model.spec.follows is not None:
                drafters.append(_head(engine, opened, entry, model, load))
            else:
                drafters.append(_other(engine, opened, entry, model, load))
        for drafter in drafters:
            if isinstance(drafter, DraftModel):
                drafter.expansion = asked.expansion
        control = Control(None if asked.nodes == "auto" else asked.nodes)
        if self.opened.spec.engine.warm_up and control.nodes is None:
            # Its weights are there by then, and nobody has asked for anything.
            load.append(lambda _: measure(engine, control))
        return Drafts(Speculation(drafters, control), load)


def open_drafts(opened: Opened, source: str | Path, overrides: Mapping[str, Any]) -> OpenedDrafts:
    """Opens what `[speculation]` asks for.

    Args:
        source, overrides: the model's own, of which a draft may be a narrower copy.

    Raises:
        SpecError: a draft that does not fit the model.
        SourceError, CheckpointError, TokenizerError: a draft that cannot be opened.
    """
    asked = opened.spec.speculation
    if opened.spec.decoder is None:
        return OpenedDrafts(opened, opened, (None,) * len(asked.draft))
    own = (source, overrides)
    models = tuple(_opened(opened, entry, own) for entry in asked.draft)
    kept, seen = opened, list[str]()
    for entry, model in zip(asked.draft, models, strict=True):
        if model is None or model.spec.follows is None:
            continue
        seen.append(entry.source or "")
        if len(seen) > 1:
            reason = f"{seen[0]} and {seen[1]} are heads, but one can follow the model; leave one"
            raise SpecError(opened.spec.path, _KEY, reason)
        if asked.expansion:
            reason = "is of draft models; a head drafts a chain with one token beside each"
            raise SpecError(opened.spec.path, "speculation.expansion", reason)
        kept = with_taps(opened, model, seen[0])
    return OpenedDrafts(kept, opened, models)


def _opened(
    opened: Opened, entry: DraftSpec, own: tuple[str | Path, Mapping[str, Any]]
) -> Opened | None:
    """A draft's model; None where it is no model of its own."""
    if entry.source in LOOKUPS or entry.skip:
        return None
    changes = dict[str, Any]()
    if entry.weights is not None:
        # Quick to make; a draft that is a little worse changes no token.
        changes |= {"quantization.weights": entry.weights, "quantization.method": "search"}
    if entry.source is None or entry.source == HEAD:
        if entry.source == HEAD:
            if opened.spec.speculation.head is None:
                reason = "the model's family knows of no head in its checkpoints; name a draft"
                raise SpecError(opened.spec.path, _KEY, reason)
            changes["family"] = opened.spec.speculation.head
        apart = ("speculation", "partition")
        given = {k: v for k, v in own[1].items() if k.partition(".")[0] not in apart}
        return open_model(own[0], {**given, "speculation.draft": [], **changes}, alone=False)
    draft = open_model(_beside(entry.source, opened.spec), changes, alone=False)
    if draft.spec.follows is None:
        _check(opened, draft, entry.source)
    elif draft.spec.dims["vocab"] != opened.spec.dims["vocab"]:
        vocabs = draft.spec.dims["vocab"], opened.spec.dims["vocab"]
        reason = f"{entry.source} is for {vocabs[0]} tokens, and the model has {vocabs[1]}"
        raise SpecError(opened.spec.path, _KEY, f"{reason}; take a head that was made for it")
    if not draft.spec.partition.is_plain:
        reason = "a draft is whole on one device; leave it out, and say device beside source"
        raise SpecError(draft.spec.path, "partition", reason)
    return draft


def _other(
    engine: Engine,
    opened: Opened,
    entry: DraftSpec,
    draft: Opened,
    load: list[Callable[[bool], None]],
) -> DraftModel:
    """Another model, or this one at fewer bits."""
    name = Path(entry.source).stem if entry.source is not None else f"own {entry.weights}"
    weights = find_weights(
        build(draft.spec, jnp.dtype(draft.dtype)), draft.spec, draft.checkpoint, draft.activations
    )
    weights = equalized(weights, draft.kv_cache)
    device = _device(engine, opened, entry)
    programs = draft_programs(weights.model, engine.programs.sizes, draft.kv_cache, device)
    made = DraftModel(programs=programs, target=engine, name=name)

    def fill(progress: bool) -> None:
        if isinstance(programs, PlacedPrograms):
            names = dict.fromkeys(weights.model.names)
            made.parameters = weights.place(programs.place, progress, names)
        else:
            made.parameters = weights.load(progress)

    load.append(fill)
    return made


def _head(
    engine: Engine,
    opened: Opened,
    entry: DraftSpec,
    head: Opened,
    load: list[Callable[[bool], None]],
) -> HeadModel:
    """A head that follows the model."""
    weights = head_weights(engine, opened, head, same=entry.source == HEAD)
    device = _device(engine, opened, entry)
    programs = draft_programs(weights.model, engine.programs.sizes, head.kv_cache, device)
    made = HeadModel(programs=programs, target=engine, name=Path(entry.source or "").stem)

    def fill(progress: bool) -> None:
        made.parameters = weights.load(engine, programs, progress)

    load.append(fill)
    return made


def _device(engine: Engine, opened: Opened, entry: DraftSpec) -> jax.Device | None:
    """Where a draft model is to be; None: where a model is that is not divided."""
    if entry.device is None:
        making = getattr(engine.programs, "making", None)
        return None if making is None else making.home.devices[0]
    there = jax.devices()
    if entry.device >= len(there):
        are = f"there are {len(there)}, from 0 on" if len(there) > 1 else "there is one, number 0"
        reason = f"device {entry.device} is not there: {are}"
        raise SpecError(opened.spec.path, f"{_KEY}.device", reason)
    return there[entry.device]


def _beside(source: str, spec: ModelSpec) -> str | Path:
    """A source in a specification may be named from where that is."""
    near = Path(spec.path).parent / source
    return near if spec.path.endswith(".toml") and near.exists() else source


def _check(opened: Opened, draft: Opened, source: str) -> None:
    """Raises `SpecError` where a draft's tokens are not the model's."""
    path = opened.spec.path
    if draft.spec.decoder is None or draft.spec.type != opened.spec.type:
        reason = f"{source} is {draft.spec.type}, and the model is {opened.spec.type}"
        raise SpecError(path, _KEY, reason)
    if not draft.spec.generates:
        raise SpecError(path, _KEY, f"{source} has no vocabulary head, and so drafts no tokens")
    if opened.spec.type != "decoder-only":
        raise SpecError(
            path, _KEY, 'an encoder-decoder can only be drafted for by "ngram", "suffix"'
        )
    sizes = [one.spec.dims["vocab"] for one in (opened, draft)]
    if (opened.tokenizer is None) != (draft.tokenizer is None):
        whose = source if draft.tokenizer is None else "the model"
        raise SpecError(path, _KEY, f"{whose} has no tokenizer, so nobody knows if {source} fits")
    if opened.tokenizer is None or draft.tokenizer is None:
        if sizes[0] != sizes[1]:
            reason = f"{source} has {sizes[1]} tokens, and the model {sizes[0]}; take another draft"
            raise SpecError(path, _KEY, reason)
        return
    if (id := _difference(opened.tokenizer, draft.tokenizer, min(sizes))) is not None:
        mine, other = (t.token(id) for t in (opened.tokenizer, draft.tokenizer))
        raise SpecError(
            path,
            _KEY,
            f"the tokenizer of {source} is another one: token {id} is {show(other)} there and "
            f"{show(mine)} here; take a draft of the same family",
        )


def _difference(one: Tokenizer, other: Tokenizer, count: int) -> int | None:
    """The first token that two tokenizers spell differently."""
    return next((id for id in range(count) if one.token(id) != other.token(id)), None)


def _without_layers(
    engine: Engine, opened: Opened, entry: DraftSpec, load: list[Callable[[bool], None]]
) -> DraftModel:
    """The model itself without some layers; the others' weights are the same arrays."""
    spec = opened.spec
    assert spec.decoder is not None, "it has a cache"
    if opened.spec.type != "decoder-only":
        raise SpecError(spec.path, _KEY, "layers are only skipped in models without an encoder")
    if not spec.partition.is_plain:
        reason = "skip shares the weights of a model that is whole; leave out [partition], or skip"
        raise SpecError(spec.path, _KEY, reason)
    count = len(spec.decoder.layers)
    if wrong := [i for i in entry.skip if i >= count]:
        raise SpecError(spec.path, _KEY, f"skip has layer {wrong[0]}; there are 0 to {count - 1}")
    kept = [i for i in range(count) if i not in entry.skip]
    if not kept:
        raise SpecError(spec.path, _KEY, "skip leaves no layer; name fewer")
    layers = tuple(spec.decoder.layers[i] for i in kept)
    stacks = tuple(replace(s, layers=layers) if s.name == "decoder" else s for s in spec.stacks)
    built = build(replace(spec, stacks=stacks), jnp.dtype(opened.dtype))
    places = [engine.model.names.index(_name_of(name, kept)) for name in built.names]
    model = replace(built, parameters=tuple(engine.model.parameters[i] for i in places))
    programs = draft_programs(model, engine.programs.sizes, opened.kv_cache)
    made = DraftModel(programs=programs, target=engine, name="skip")
    load.append(partial(_share, made, engine, places))
    return made


def _name_of(name: str, kept: list[int]) -> str:
    """What the whole model calls a parameter of a model with some of its layers."""
    stack, _, rest = name.partition(".")
    index, _, inner = rest.partition(".")
    if stack != "decoder" or not index.isdecimal():
        return name
    return f"decoder.{kept[int(index)]}.{inner}"


def _share(made: DraftModel, engine: Engine, places: list[int], progress: bool) -> None:
    own = engine.parameters
    made.parameters = tuple(own[i] for i in places)
