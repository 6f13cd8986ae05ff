"""Speculation put together as a specification asks: lookups, draft models, their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jinfer.engine.engine import Engine
from jinfer.model import build
from jinfer.opening.settings import Opened, open_model
from jinfer.spec.errors import SpecError, show
from jinfer.spec.model import ModelSpec
from jinfer.spec.speculation import DraftSpec
from jinfer.speculate.control import Control
from jinfer.speculate.drafter import Drafter
from jinfer.speculate.lookup import Lookup
from jinfer.speculate.model import DraftModel, draft_programs
from jinfer.speculate.placed import PlacedPrograms
from jinfer.speculate.speculation import Speculation
from jinfer.speculate.suffix import Suffix
from jinfer.tokenizer import Tokenizer
from jinfer.weights.find import find_weights

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


def find_drafts(
    engine: Engine, opened: Opened, source: str | Path, overrides: Mapping[str, Any]
) -> Drafts | None:
    """What `[speculation]` asks for; None: nothing.

    Args:
        source, overrides: the model's own, of which a draft may be a narrower copy.

    Raises:
        SpecError: a draft that does not fit the model.
        SourceError, CheckpointError, LoadError, TokenizerError: a draft that cannot be opened.
    """
    asked = opened.spec.speculation
    if not asked.draft or not engine.model.caches:
        return None
    load: list[Callable[[bool], None]] = []
    drafters: list[Drafter] = []
    for entry in asked.draft:
        if entry.source == "ngram":
            drafters.append(Lookup(branches=2))
        elif entry.source == "suffix":
            drafters.append(Suffix())
        elif entry.skip:
            drafters.append(_without_layers(engine, opened, entry, load))
        else:
            drafters.append(_other(engine, opened, entry, (source, overrides), load))
    for drafter in drafters:
        if isinstance(drafter, DraftModel):
            drafter.expansion = asked.expansion
    nodes = None if asked.nodes == "auto" else asked.nodes
    return Drafts(Speculation(drafters, Control(nodes)), load)


def _other(
    engine: Engine,
    opened: Opened,
    entry: DraftSpec,
    own: tuple[str | Path, Mapping[str, Any]],
    load: list[Callable[[bool], None]],
) -> DraftModel:
    """Another model, or this one at fewer bits."""
    name, changes = entry.source or "", dict[str, Any]()
    if entry.weights is not None:
        changes["quantization.weights"] = entry.weights
    if entry.source is None:
        given = {k: v for k, v in own[1].items() if k.partition(".")[0] != "speculation"}
        draft = open_model(own[0], {**given, "speculation.draft": [], **changes})
        name = f"own {entry.weights}"
    else:
        draft = open_model(_beside(entry.source, opened.spec), changes)
        _check(opened, draft, entry.source)
        if not draft.spec.partition.is_plain:
            reason = "a draft is whole on one device; leave it out, and say device beside source"
            raise SpecError(draft.spec.path, "partition", reason)
    weights = find_weights(
        build(draft.spec, jnp.dtype(draft.dtype)), draft.spec, draft.checkpoint, draft.activations
    )
    device = _device(engine, opened, entry)
    programs = draft_programs(weights.model, engine.programs.sizes, draft.kv_cache, device)
    made = DraftModel(programs=programs, target=engine, name=Path(name).stem)

    def fill(progress: bool) -> None:
        if isinstance(programs, PlacedPrograms):
            made.parameters = weights.place(programs.place, progress)
        else:
            made.parameters = weights.load(progress)

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
