"""Calibration of speculative decoding: times verifying calls of each size during warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jinfer.engine.engine import Engine
from jinfer.engine.engine_stats import DraftCounts
from jinfer.engine.requests import Failed, Request
from jinfer.engine.runner.device_state import SamplingRow
from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.sampling.sampling_params import SamplingParams
from jinfer.speculate.draft_length import DraftLength, RunningMean
from jinfer.speculate.drafter import Drafter
from jinfer.speculate.speculative_decoding import SpeculativeDecoder
from jinfer.speculate.token_tree import TokenTree
from jinfer.speculate.tree_batch import batch_sizes

_PROMPT, _FIRST = 8, -1  # prompt length and id of a made-up request; no other has this id
_CALLS = 4  # timed calls, after one that is not timed
_MOST = 4 * _CALLS  # calls, at most


@dataclass(eq=False)
class _Any(Drafter):
    """Drafts the same token again and again."""

    def draft(self, asked: Sequence[tuple[RunningSequence, int]]) -> list[TokenTree]:
        return [TokenTree.chain([0] * levels, "any") for _, levels in asked]


def calibrate_costs(engine: Engine, control: DraftLength) -> None:
    """Fills the cost tables of `draft_length`, before the first request.

    Does nothing for models with an encoder, and for contexts too short for drafts.
    """
    sizes, slots = batch_sizes(engine.runner), engine.runner.programs.sizes.slots
    most = engine.runner.programs.sizes.context - _PROMPT - 1
    if engine.runner.model.has_cross_attention or most < 2 * sizes[-1]:
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
