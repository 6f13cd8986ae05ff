"""Contrastive search: every candidate is computed before one of them is chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jinfer.engine.requests import Failed, NotFiniteError, Token
from jinfer.engine.runner.flat_batch import FlatBatch, padded
from jinfer.engine.runner.forward_passes import NoRoomError, forward, run_to_end
from jinfer.engine.runner.model_runner import ModelRunner
from jinfer.engine.runner.step_key import StepKey
from jinfer.engine.scheduling.block_manager import BlockTables
from jinfer.engine.scheduling.scheduler import Scheduler
from jinfer.engine.scheduling.sequence import RunningSequence


@dataclass(eq=False)
class ContrastiveSearch:
    """Contrastive search for one request (arXiv 2202.06417).

    The candidates are rows of a flat batch that share all blocks but the last. The sequence goes on
    with the row of the chosen one, whose logits give the next candidates.

    Attributes:
        count: number of candidates.
        alpha: weight of the degeneration penalty, the similarity to earlier hidden states.
    """

    count: int
    alpha: float
    _length: int = 0  # tokens in the cache: all before the candidates
    _past: Any = None  # hidden states of all tokens but the candidates
    _candidates: list[int] = field(default_factory=list)
    _probabilities: np.ndarray | None = None

    def release_blocks(self, scheduler: Scheduler) -> None:
        """As `SearchDriver.release_blocks`: the hidden states are recomputed."""
        self._past = None

    def advance(
        self, runner: ModelRunner, scheduler: Scheduler, sequence: RunningSequence
    ) -> list[Token | Failed]:
        """One step of the search."""
        if sequence.remaining <= 0:
            return []
        if self._past is None:
            self._begin(runner, scheduler, sequence)
        rows = self._rows(runner, scheduler, sequence)
        return self._step(runner, scheduler, sequence, rows)

    def _begin(self, runner: ModelRunner, scheduler: Scheduler, sequence: RunningSequence) -> None:
        """Computes past hidden states; the last token is the only candidate of the first step."""
        *before, last = sequence.tokens
        width = runner.programs.sizes.context
        past = np.zeros((width, runner.programs.hidden), np.float32)
        if before:
            passes = forward(runner, scheduler, before, "hidden", sequence.request.encoder)
            past[: len(before)] = run_to_end(runner, passes)
        self._past, self._length = past, len(before)
        self._candidates = [last]
        self._probabilities = np.eye(1, self.count, dtype=np.float32)[0]

    def _rows(
        self, runner: ModelRunner, scheduler: Scheduler, sequence: RunningSequence
    ) -> list[BlockTables]:
        """Block tables for each candidate. Raises `NoRoomError`."""
        assert sequence.block_tables is not None, "it is admitted"
        count, length = len(self._candidates), self._length
        parents, ends = [sequence.block_tables] * count, [length + 1] * count
        if (forked := scheduler.blocks.fork_all(parents, length, ends)) is None:
            raise NoRoomError
        rows, copies = forked
        runner.copy_blocks(copies)
        return rows

    def _step(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        sequence: RunningSequence,
        rows: list[BlockTables],
    ) -> list[Token | Failed]:
        count, length, request = self.count, self._length, sequence.request
        tokens, at = padded(self._candidates, count), padded(range(len(rows)), count, -1)
        program = runner.programs.get(StepKey("contrastive", count, rows=count))
        lengths = length, len(request.prompt), len(request.encoder)
        tables = runner.block_tables(count, list(enumerate(rows)))
        batch: Any = tokens, at, *(np.full(count, n, np.int32) for n in lengths), tables
        more = self._past, self._probabilities, np.float32(self.alpha)
        cache, self._past, best, candidates, probabilities = program(
            runner.leaves, runner.cache, FlatBatch(*batch), *more
        )
        runner.set_cache(cache)
        chosen = int(best)
        token = self._candidates[chosen]
        # The sequence goes on with the blocks of the chosen candidate.
        assert sequence.block_tables is not None, "it is admitted"
        others = [tables for row, tables in enumerate(rows) if row != chosen]
        for other in (sequence.block_tables, *others):
            scheduler.blocks.free(other)
        sequence.block_tables = rows[chosen]
        self._length = sequence.computed = length + 1
        self._candidates = np.asarray(candidates).tolist()
        self._probabilities = np.asarray(probabilities)
        if np.isnan(self._probabilities).any():
            sequence.ended = True
            return [Failed(request.id, NotFiniteError())]
        if self._length == len(sequence.tokens):
            return []  # it was known already
        sequence.tokens.append(token)
        return [Token(request.id, token)]
