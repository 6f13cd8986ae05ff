"""Beam search: the beams of a request are forks of its block tables that share blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jinfer.engine.engine_core import EngineCore
from jinfer.engine.requests import Failed, NotFiniteError, Token
from jinfer.engine.runner.edit_tables import taps_of
from jinfer.engine.runner.flat_batch import FlatBatch
from jinfer.engine.runner.step_key import StepKey
from jinfer.engine.scheduling.block_manager import BlockTables
from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.sampling.beam_hypotheses import Beams


@dataclass(eq=False)
class BeamSearch:
    """Beam search for one request; its tokens come all at once, at the end.

    Attributes:
        start: makes the initial beams.
        rank: which of the hypotheses is the answer; 0: the best.
    """

    start: Callable[[], Beams]
    rank: int = 0
    _beams: Beams | None = None
    _beam_blocks: list[BlockTables] = field(default_factory=list)
    _parents: list[int] = field(default_factory=list)

    def release_blocks(self, engine: EngineCore) -> None:
        """As `SearchDriver.release_blocks`; a search that restarts ends the same."""
        for tables in self._beam_blocks:
            engine.scheduler.blocks.free(tables)
        self._beam_blocks, self._beams = [], None

    def advance(self, engine: EngineCore, sequence: RunningSequence) -> list[Token | Failed]:
        """One step of the search."""
        events: list[Token | Failed] = []
        if self._beams is None:
            self._beams = self.start()
            self._parents = [0] * self._beams.count
        length = len(sequence.request.prompt) + len(self._beams.sequences[0]) - 1
        while not self._fork(engine, sequence, length):
            events += engine.preempt_for(sequence)
            if sequence.block_tables is None:
                return events
        return [*events, *self._step(engine, sequence, self._beams, length)]

    def _fork(self, engine: EngineCore, sequence: RunningSequence, length: int) -> bool:
        """Forks the block tables, each with room for one more token; False: too few blocks."""
        assert sequence.block_tables is not None, "it is admitted"
        blocks, before = engine.scheduler.blocks, self._beam_blocks or [sequence.block_tables]
        parents = [before[parent] for parent in self._parents]
        forked = blocks.fork_all(parents, length, [length + 1] * len(parents))
        if forked is None:
            return False
        for old in self._beam_blocks:
            blocks.free(old)
        self._beam_blocks, copies = forked
        engine.copy_blocks(copies)
        return True

    def _step(
        self, engine: EngineCore, sequence: RunningSequence, beams: Beams, length: int
    ) -> list[Token | Failed]:
        request, count = sequence.request, beams.count
        last = [(*request.prompt, *tokens)[-1] for tokens in beams.sequences]
        taps = taps_of([request.activations])
        program = engine.programs.get(StepKey("beam", count, rows=count, taps=taps))
        tokens, rows = np.array(last, np.int32), np.arange(count, dtype=np.int32)
        lengths = length, len(request.prompt), len(request.encoder)
        tables = engine.block_tables(count, list(enumerate(self._beam_blocks)))
        if taps is not None and (use := request.activations) is not None:
            tables |= engine.edit_tables(taps, count, [(row, use) for row in range(count)])
        batch: Any = tokens, rows, *(np.full(count, n, np.int32) for n in lengths), tables
        before = np.array(beams.scores, np.float32)
        cache, *best = program(engine.leaves, engine.cache, FlatBatch(*batch), before)
        engine.set_cache(cache)
        if np.isnan(np.asarray(best[2])).any():
            sequence.ended = True
            return [Failed(request.id, NotFiniteError())]
        self._parents = beams.advance(*(np.asarray(part).tolist() for part in best))
        if not beams.done and length + 2 < request.limit:
            return []
        answer = beams.ranked()[self.rank].tokens
        return [
            Token(request.id, id, last="length" if index + 1 == len(answer) else None)
            for index, id in enumerate(answer)
        ]
