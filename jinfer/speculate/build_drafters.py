"""Speculative decoding, building: from `[speculation]` to an engine's drafters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinfer.engine.engine import Engine
from jinfer.loader.open_model import Opened
from jinfer.modelspec.block import CachedState
from jinfer.modelspec.layer_spec import StackSpec
from jinfer.modelspec.spec_errors import SpecError
from jinfer.speculate.calibrate_costs import calibrate_costs
from jinfer.speculate.draft_length import DraftLength
from jinfer.speculate.draft_model import DraftModel
from jinfer.speculate.draft_sources import draft_source
from jinfer.speculate.drafter import DraftContext
from jinfer.speculate.head_weights import with_taps
from jinfer.speculate.open_draft_model import KEY
from jinfer.speculate.speculative_decoding import SpeculativeDecoder


@dataclass(frozen=True)
class Drafters:
    """Speculative decoding for an engine.

    Attributes:
        speculation: the engine's speculator.
        load: functions that load the draft models' weights, once the engine has its own.
    """

    speculation: SpeculativeDecoder
    load: list[Callable[[bool], None]]


@dataclass(frozen=True)
class OpenedDrafters:
    """What `[speculation]` asks for, opened.

    Attributes:
        opened: the target, with hidden-state taps for a head.
        plain: the target without them.
        models: the draft model of each entry of `draft`; None: it needs none.
    """

    opened: Opened
    plain: Opened
    models: tuple[Opened | None, ...]

    def drafts(self, engine: Engine) -> Drafters | None:
        """The drafters for an engine; None if its model does not generate.

        Raises:
            SpecError: a draft that does not fit the model.
            LoadError, CheckpointError: one whose weights are not there.
        """
        spec = self.opened.spec
        if not engine.model.caches:
            return None
        load: list[Callable[[bool], None]] = []
        drafters = [
            draft_source(entry).make(DraftContext(engine, self.plain, entry, model, load))
            for entry, model in zip(spec.speculation.draft, self.models, strict=True)
        ]
        for drafter in drafters:
            if isinstance(drafter, DraftModel):
                drafter.expansion = spec.speculation.expansion
        nodes = spec.speculation.nodes
        draft_length = DraftLength(None if nodes == "auto" else nodes)
        if spec.engine.warm_up and draft_length.nodes is None:
            # Last: all weights are loaded by then, and no request has come.
            load.append(lambda _: calibrate_costs(engine, draft_length))
        return Drafters(SpeculativeDecoder(drafters, draft_length), load)


def open_drafters(
    opened: Opened, source: str | Path, overrides: Mapping[str, Any]
) -> OpenedDrafters:
    """Opens what `[speculation]` asks for.

    Args:
        opened: the target.
        source, overrides: the target's, of which a draft may be a narrower copy.

    Raises:
        SpecError: a draft that does not fit the model.
        SourceError, CheckpointError, TokenizerError: a draft that cannot be opened.
    """
    spec, asked = opened.spec, opened.spec.speculation
    for i, entry in enumerate(asked.draft):
        if wrong := draft_source(entry).check(entry):
            key = KEY if len(asked.draft) == 1 else f"{KEY}[{i}]"
            raise SpecError(spec.path, f"{key}.{wrong[0]}", wrong[1])
    if spec.decoder is None:
        return OpenedDrafters(opened, opened, (None,) * len(asked.draft))
    models: list[Opened | None] = []
    for entry in asked.draft:
        open_ = draft_source(entry).open
        models.append(None if open_ is None else open_(opened, entry, (source, overrides)))
    for model in models:
        draft = None if model is None or model.spec.follows is None else model.spec.decoder
        if draft is not None and (name := _recurrent_block(draft)):
            reason = f"{name} of the head has a state, which it cannot draft with; take another"
            raise SpecError(spec.path, KEY, reason)
    tapped, heads = opened, list[str]()
    for entry, model in zip(asked.draft, models, strict=True):
        if model is None or model.spec.follows is None:
            continue
        heads.append(entry.source or "")
        if len(heads) > 1:
            reason = f"{heads[0]} and {heads[1]} are heads, but one can follow the model; leave one"
            raise SpecError(spec.path, KEY, reason)
        if asked.expansion:
            reason = "is of draft models; a head drafts a chain with one token beside each"
            raise SpecError(spec.path, "speculation.expansion", reason)
        tapped = with_taps(opened, model, heads[0])
    return OpenedDrafters(tapped, opened, tuple(models))


def _recurrent_block(stack: StackSpec) -> str:
    """The name of a block with a state; "" if there is none."""
    for i, layer in enumerate(stack.layers):
        for name, block in layer.modules:
            if isinstance(block.cached(), CachedState):
                return f"{stack.name}.{i}.{name}"
    return ""
