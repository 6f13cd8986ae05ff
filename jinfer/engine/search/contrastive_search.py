"""Contrastive search: every candidate is computed before one of them is chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jinfer.engine.engine_core import EngineCore
from jinfer.engine.requests import Failed, NotFiniteError, Token
from jinfer.engine.runner.flat_batch import FlatBatch
from jinfer.engine.runner.forward_passes import NoRoomError, forward, run_to_end
from jinfer.engine.runner.model_runner import padded
from jinfer.engine.runner.step_key import StepKey
from jinfer.engine.scheduling.block_manager import BlockTables
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

    def release_blocks(self, engine: EngineCore) -> None:
        """As `SearchDriver.release_blocks`: the hidden states are recomputed."""
        self._past = None

    def advance(self, engine: EngineCore, sequence: RunningSequence) -> list[Token | Failed]:
        """One step of the search."""
        events: list[Token | Failed] = []
        if sequence.remaining <= 0:
            return events
        while self._past is None:
            try:
                self._begin(engine, sequence)
            except NoRoomError:
                events += engine.preempt_for(sequence)
                if sequence.block_tables is None:
                    return events
        while (rows := self._rows(engine, sequence)) is None:
            events += engine.preempt_for(sequence)
            if sequence.block_tables is None:
                return events
        return [*events, *self._step(engine, sequence, rows)]

    def _begin(self, engine: EngineCore, sequence: RunningSequence) -> None:
        """Computes past hidden states; the last token is the only candidate of the first step."""
        *before, last = sequence.tokens
        width = engine.programs.sizes.context
        past = np.zeros((width, engine.programs.hidden), np.float32)
        if before:
            passes = forward(engine, before, "hidden", sequence.request.encoder)
            past[: len(before)] = run_to_end(engine, passes)
        self._past, self._length = past, len(before)
        self._candidates = [last]
        self._probabilities = np.eye(1, self.count, dtype=np.float32)[0]

    def _rows(self, engine: EngineCore, sequence: RunningSequence) -> list[BlockTables] | None:
        """Block tables for each candidate; None if there are too few blocks."""
        assert sequence.block_tables is not None, "it is admitted"
        count, length = len(self._candidates), self._length
        parents, ends = [sequence.block_tables] * count, [length + 1] * count
        if (forked := engine.scheduler.blocks.fork_all(parents, length, ends)) is None:
            return None
        rows, copies = forked
        engine.copy_blocks(copies)
        return rows

    def _step(
        self, engine: EngineCore, sequence: RunningSequence, rows: list[BlockTables]
    ) -> list[Token | Failed]:
        count, length, request = self.count, self._length, sequence.request
        tokens, at = padded(self._candidates, count), padded(range(len(rows)), count, -1)
        program = engine.programs.get(StepKey("contrastive", count, rows=count))
        lengths = length, len(request.prompt), len(request.encoder)
        tables = engine.block_tables(count, list(enumerate(rows)))
        batch: Any = tokens, at, *(np.full(count, n, np.int32) for n in lengths), tables
        more = self._past, self._probabilities, np.float32(self.alpha)
        cache, self._past, best, candidates, probabilities = program(
            engine.leaves, engine.cache, FlatBatch(*batch), *more
        )
        engine.set_cache(cache)
        chosen = int(best)
        token = self._candidates[chosen]
        # The sequence goes on with the blocks of the chosen candidate.
        assert sequence.block_tables is not None, "it is admitted"
        others = [tables for row, tables in enumerate(rows) if row != chosen]
        for other in (sequence.block_tables, *others):
            engine.scheduler.blocks.free(other)
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
