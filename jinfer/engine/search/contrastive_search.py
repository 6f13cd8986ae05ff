"""Contrastive search on an engine: every candidate is computed before one of them is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jinfer.engine.engine_core import EngineCore
from jinfer.engine.requests import Failed, Token
from jinfer.engine.runner.compiled_programs import Shape
from jinfer.engine.runner.forward_passes import NoRoomError, at_once, forward
from jinfer.engine.scheduling.block_manager import Copy, Held
from jinfer.engine.scheduling.scheduler import Running


@dataclass(eq=False)
class Contrastive:
    """Drives one sequence (arXiv 2202.06417).

    The candidates are rows of a flat batch that share all blocks but the last; the row of the one
    that is chosen goes on, and its logits give the next candidates.

    Attributes:
        count: of candidates.
        alpha: weight of the likeness to what was said before.
    """

    count: int
    alpha: float
    _length: int = 0  # tokens in the cache: all before the candidates
    _past: Any = None  # hidden states of all tokens but the candidates
    _candidates: list[int] = field(default_factory=list)
    _probabilities: np.ndarray | None = None

    def settle(self, engine: EngineCore) -> list[Token | Failed]:
        """There is nothing to read: each step waits for its result."""
        return []

    def drop(self, engine: EngineCore, request: int) -> None:
        """Forgets where it was: its hidden states are computed again."""
        self._past = None

    def end(self, request: int) -> None:
        """There is nothing else to forget."""

    def advance(self, engine: EngineCore, sequences: Sequence[Running]) -> list[Token | Failed]:
        """One step of the search."""
        events: list[Token | Failed] = []
        for sequence in sequences:  # one at most
            if sequence.left <= 0:
                continue
            while self._past is None:
                try:
                    self._begin(engine, sequence)
                except NoRoomError:
                    events += engine.free_blocks(sequence)
                    if sequence.held is None:
                        return events
            while (rows := self._rows(engine, sequence)) is None:
                events += engine.free_blocks(sequence)
                if sequence.held is None:
                    return events
            events += self._step(engine, sequence, rows)
        return events

    def _begin(self, engine: EngineCore, sequence: Running) -> None:
        """The last token that is known is the only candidate of the first step."""
        *before, last = sequence.tokens
        width = engine.programs.sizes.context
        past = np.zeros((width, engine.programs.hidden), np.float32)
        if before:
            passes = forward(engine, before, "hidden", sequence.request.encoder)
            past[: len(before)] = at_once(engine, passes)
        self._past, self._length = past, len(before)
        self._candidates = [last]
        self._probabilities = np.eye(1, self.count, dtype=np.float32)[0]

    def _rows(self, engine: EngineCore, sequence: Running) -> list[Held] | None:
        """Blocks for each candidate; None where there are too few."""
        blocks, length, parent = engine.scheduler.blocks, self._length, sequence.held
        assert parent is not None, "it is admitted"
        rows: list[Held] = []
        copies: list[Copy] = []
        for _ in self._candidates:
            forked = blocks.fork(parent, length)
            if forked is not None:
                rows.append(forked[0])
                copies += forked[1]
                blocks.slide(forked[0], length)
            if forked is None or not blocks.reserve(forked[0], length + 1):
                for one in rows:
                    blocks.free(one)
                return None
        engine.copy(copies)
        return rows

    def _step(
        self, engine: EngineCore, sequence: Running, rows: list[Held]
    ) -> list[Token | Failed]:
        count, length, request = self.count, self._length, sequence.request
        tokens, at = np.zeros(count, np.int32), np.full(count, -1, np.int32)
        tokens[: len(rows)] = self._candidates
        at[: len(rows)] = np.arange(len(rows))
        program = engine.programs.get(Shape("contrast", count, rows=count))
        cache, self._past, best, candidates, probabilities = program(
            engine.leaves,
            engine.cache,
            tokens,
            at,
            np.full(count, length, np.int32),
            np.full(count, len(request.prompt), np.int32),
            engine.tables_of(count, list(enumerate(rows))),
            np.full(count, len(request.encoder), np.int32),
            self._past,
            self._probabilities,
            np.float32(self.alpha),
        )
        engine.keep_cache(cache)
        chosen = int(best)
        token = self._candidates[chosen]
        # The sequence goes on with the blocks of the one that was chosen.
        assert sequence.held is not None, "it is admitted"
        for held in (sequence.held, *(h for row, h in enumerate(rows) if row != chosen)):
            engine.scheduler.blocks.free(held)
        sequence.held = rows[chosen]
        self._length = sequence.computed = length + 1
        self._candidates = np.asarray(candidates).tolist()
        self._probabilities = np.asarray(probabilities)
        if self._length == len(sequence.tokens):
            return []  # the last token that was known already
        sequence.tokens.append(token)
        return [Token(request.id, token)]
