"""Beam search: the beams of a request are forks of its block tables that share blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jinfer.engine.requests import Failed, NotFiniteError, Token
from jinfer.engine.runner.edit_tables import taps_of
from jinfer.engine.runner.flat_batch import FlatBatch
from jinfer.engine.runner.forward_passes import NoRoomError
from jinfer.engine.runner.model_runner import ModelRunner
from jinfer.engine.runner.step_key import StepKey
from jinfer.engine.scheduling.block_manager import BlockTables
from jinfer.engine.scheduling.scheduler import Scheduler
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

    def release_blocks(self, scheduler: Scheduler) -> None:
        """As `SearchDriver.release_blocks`; a search that restarts ends the same."""
        for tables in self._beam_blocks:
            scheduler.blocks.free(tables)
        self._beam_blocks, self._beams = [], None

    def advance(
        self, runner: ModelRunner, scheduler: Scheduler, sequence: RunningSequence
    ) -> list[Token | Failed]:
        """One step of the search."""
        if self._beams is None:
            self._beams = self.start()
            self._parents = [0] * self._beams.count
        length = len(sequence.request.prompt) + len(self._beams.sequences[0]) - 1
        self._fork(runner, scheduler, sequence, length)
        return self._step(runner, sequence, self._beams, length)

    def _fork(
        self, runner: ModelRunner, scheduler: Scheduler, sequence: RunningSequence, length: int
    ) -> None:
        """Fork the block tables, each with room for one more token. Raises `NoRoomError`."""
        assert sequence.block_tables is not None, "it is admitted"
        blocks, before = scheduler.blocks, self._beam_blocks or [sequence.block_tables]
        parents = [before[parent] for parent in self._parents]
        forked = blocks.fork_all(parents, length, [length + 1] * len(parents))
        if forked is None:
            raise NoRoomError
        for old in self._beam_blocks:
            blocks.free(old)
        self._beam_blocks, copies = forked
        runner.copy_blocks(copies)

    def _step(
        self, runner: ModelRunner, sequence: RunningSequence, beams: Beams, length: int
    ) -> list[Token | Failed]:
        request, count = sequence.request, beams.count
        last = [(*request.prompt, *tokens)[-1] for tokens in beams.sequences]
        taps = taps_of([request.activations])
        program = runner.programs.get(StepKey("beam", count, rows=count, taps=taps))
        tokens, rows = np.array(last, np.int32), np.arange(count, dtype=np.int32)
        lengths = length, len(request.prompt), len(request.encoder)
        tables = runner.block_tables(count, list(enumerate(self._beam_blocks)))
        if taps is not None and (use := request.activations) is not None:
            tables |= runner.edit_tables(taps, count, [(row, use) for row in range(count)])
        batch: Any = tokens, rows, *(np.full(count, n, np.int32) for n in lengths), tables
        before = np.array(beams.scores, np.float32)
        cache, *best = program(runner.leaves, runner.cache, FlatBatch(*batch), before)
        runner.set_cache(cache)
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
