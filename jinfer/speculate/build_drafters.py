"""Building of speculative decoding: drafters of `[speculation]`, and calibration of costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinfer.engine.engine import Engine
from jinfer.engine.engine_stats import DraftCounts
from jinfer.engine.requests import Failed, Request
from jinfer.engine.runner.device_state import SamplingRow
from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.loader.open_model import Opened
from jinfer.modelspec.block import CachedState
from jinfer.modelspec.layer_spec import StackSpec
from jinfer.modelspec.spec_errors import SpecError
from jinfer.sampling.sampling_params import SamplingParams
from jinfer.speculate.draft_length import DraftLength, RunningMean
from jinfer.speculate.draft_model import DraftModel
from jinfer.speculate.draft_sources import KEY, draft_source
from jinfer.speculate.drafter import DraftContext, Drafter
from jinfer.speculate.eagle_drafter import with_taps
from jinfer.speculate.speculative_decoding import SpeculativeDecoder
from jinfer.speculate.token_tree import TokenTree
from jinfer.speculate.tree_batch import batch_sizes


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
        if not engine.runner.model.caches:
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
        return Drafters(SpeculativeDecoder(engine, drafters, draft_length), load)


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
    spec, speculation = opened.spec, opened.spec.speculation
    for i, entry in enumerate(speculation.draft):
        if wrong := draft_source(entry).check(entry):
            key = KEY if len(speculation.draft) == 1 else f"{KEY}[{i}]"
            raise SpecError(spec.path, f"{key}.{wrong[0]}", wrong[1])
    if spec.decoder is None:
        return OpenedDrafters(opened, opened, (None,) * len(speculation.draft))
    models: list[Opened | None] = []
    for entry in speculation.draft:
        open_ = draft_source(entry).open
        models.append(None if open_ is None else open_(opened, entry, (source, overrides)))
    for model in models:
        draft = None if model is None or model.spec.follows is None else model.spec.decoder
        if draft is not None and (name := _recurrent_block(draft)):
            reason = f"{name} of the head has a state, which it cannot draft with; take another"
            raise SpecError(spec.path, KEY, reason)
    tapped, heads = opened, list[str]()
    for entry, model in zip(speculation.draft, models, strict=True):
        if model is None or model.spec.follows is None:
            continue
        heads.append(entry.source or "")
        if len(heads) > 1:
            reason = f"{heads[0]} and {heads[1]} are heads, but one can follow the model; leave one"
            raise SpecError(spec.path, KEY, reason)
        if speculation.expansion:
            reason = (
                "is for draft models; a head drafts a chain, with one alternative to each token"
            )
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


_PROMPT, _FIRST = 8, -1  # prompt length and id of a made-up request; no other has this id
_CALLS = 4  # timed calls, after one that is not timed
_MOST = 4 * _CALLS  # calls, at most


@dataclass(eq=False)
class _Any(Drafter):
    """Drafts the same token again and again."""

    def draft(self, requests: Sequence[tuple[RunningSequence, int]]) -> list[TokenTree]:
        return [TokenTree.chain([0] * levels, "any") for _, levels in requests]


def calibrate_costs(engine: Engine, control: DraftLength) -> None:
    """Fills the cost tables of `draft_length`, before the first request.

    Does nothing for models with an encoder, and for contexts too short for drafts.
    """
    sizes, slots = batch_sizes(engine.runner), engine.runner.programs.sizes.slots
    max_tokens = engine.runner.programs.sizes.context - _PROMPT - 1
    if engine.runner.model.has_cross_attention or max_tokens < 2 * sizes[-1]:
        return
    speculator = engine.speculator
    try:
        for streams in sorted({engine.runner.padded_rows(count) for count in range(1, slots + 1)}):
            plain = SpeculativeDecoder(engine, [_Any()])
            if (
                known := _seconds(engine, plain, streams, plain.draft_length.plain, streams)
            ) is not None:
                control.plain[streams] = known
        for size in sizes:
            drafts = SpeculativeDecoder(engine, [_Any()], DraftLength(size), branched=False)
            known = _seconds(engine, drafts, 1, drafts.draft_length.costs, size)
            if known is not None:
                control.costs[size] = known
    finally:
        engine.speculator, engine.drafted = speculator, DraftCounts()


def _seconds(
    engine: Engine,
    speculator: SpeculativeDecoder,
    streams: int,
    table: dict[int, RunningMean],
    entry: int,
) -> RunningMean | None:
    """Runs made-up requests that fill an entry of a table; None if they did not.

    Args:
        streams: number of concurrent requests.
        table: `costs` or `plain` of the speculator's draft length.
        entry: key of the entry.
    """
    engine.speculator = speculator
    vocab, context = engine.runner.programs.sizes.vocab, engine.runner.programs.sizes.context
    drafts = table is speculator.draft_length.costs
    sampling = SamplingParams(temperature=0, ignore_eos=True, speculation=drafts)
    numbers = [_FIRST - stream for stream in range(streams)]
    for number in numbers:
        request = Request(number, (number % 2,) * _PROMPT, sampling, context, reuse=False)
        engine.submit(request, SamplingRow.from_params(sampling, (), vocab, None))
    first = True
    for _ in range(_MOST + streams):
        failed = any(isinstance(event, Failed) for event in engine.step())
        known = table.get(entry)
        if failed or (known is not None and known.total >= _CALLS):
            break
        if known is not None and first:
            first = False
            table.clear()
    for number in numbers:
        engine.finish(number)
    list(engine.read_all())
    known = table.get(entry)
    # A low count, so that later measurements soon outweigh it.
    return None if known is None else replace(known, count=min(known.count, 2.0))
