"""What calls of each size take, measured at a start that makes all programs anyway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jinfer.engine.engine import Engine
from jinfer.engine.engine_stats import DraftCounts
from jinfer.engine.requests import Failed, Request
from jinfer.engine.runner.device_state import Choice
from jinfer.engine.scheduling.scheduler import Running
from jinfer.sampling.sampling_params import SamplingParams
from jinfer.speculate.draft_length import Control, Mean
from jinfer.speculate.drafter import Drafter
from jinfer.speculate.speculative_decoding import Speculation, sizes_of
from jinfer.speculate.token_tree import Tree

_PROMPT, _FIRST = 8, -1  # tokens of a made-up request, and its number, which no other has
_CALLS = 4  # that are measured, after one that is not
_MOST = 4 * _CALLS  # of them, for no other end


@dataclass(eq=False)
class _Any(Drafter):
    """Drafts one and the same token."""

    def draft(self, asked: Sequence[tuple[Running, int]]) -> list[Tree]:
        return [Tree.chain([0] * levels, "any") for _, levels in asked]


def measure(engine: Engine, control: Control) -> None:
    """Fills the table of costs, before anybody asks for anything.

    Nothing is done where it would say nothing: of a model whose decoder needs a text beside it, or
    of a context too short for drafts.
    """
    sizes, slots = sizes_of(engine), engine.programs.sizes.slots
    most = engine.programs.sizes.context - _PROMPT - 1
    if engine.model.has_cross_attention or most < 2 * sizes[-1]:
        return
    speculator = engine.speculator
    try:
        for streams in sorted({engine.row_count(count) for count in range(1, slots + 1)}):
            plain = Speculation([_Any()])
            if (
                known := _seconds(engine, plain, streams, plain.control.plain, streams)
            ) is not None:
                control.plain[streams] = known
        for size in sizes:
            drafts = Speculation([_Any()], Control(size), branched=False)
            known = _seconds(engine, drafts, 1, drafts.control.costs, size)
            if known is not None:
                control.costs[size] = known
    finally:
        engine.speculator, engine.drafted = speculator, DraftCounts()


def _seconds(
    engine: Engine, speculator: Speculation, streams: int, table: dict[int, Mean], entry: int
) -> Mean | None:
    """An entry of a table, after made-up requests that fill it; None: they did not.

    Args:
        streams: requests at a time.
    """
    engine.speculator = speculator
    vocab, context = engine.programs.sizes.vocab, engine.programs.sizes.context
    drafts = table is speculator.control.costs
    sampling = SamplingParams(temperature=0, ignore_eos=True, speculation=drafts)
    numbers = [_FIRST - stream for stream in range(streams)]
    for number in numbers:
        request = Request(number, (number % 2,) * _PROMPT, sampling, context, reuse=False)
        engine.submit(request, Choice.of(sampling, (), vocab, None))
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
    # What comes later soon outweighs it.
    return None if known is None else replace(known, count=min(known.count, 2.0))
