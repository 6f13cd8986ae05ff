"""Beam search on an engine: the running sequences share the blocks of what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jinfer.engine.engine_core import EngineCore
from jinfer.engine.requests import Failed, Token
from jinfer.engine.runner.compiled_programs import Shape
from jinfer.engine.scheduling.block_manager import Copy, Held
from jinfer.engine.scheduling.scheduler import Running
from jinfer.sampling.beam_hypotheses import Beams


@dataclass(eq=False)
class BeamSearch:
    """Drives one search; its tokens come all at once, at its end.

    Attributes:
        start: gives the search at its beginning.
        rank: which of the sequences that it finds is the answer; 0: the best.
    """

    start: Callable[[], Beams]
    rank: int = 0
    _beams: Beams | None = None
    _held: list[Held] = field(default_factory=list)
    _parents: list[int] = field(default_factory=list)

    def settle(self, engine: EngineCore) -> list[Token | Failed]:
        """There is nothing to read: each step waits for its result."""
        return []

    def drop(self, engine: EngineCore, request: int) -> None:
        """Gives its blocks back; after a preemption the search begins again, and ends the same."""
        for held in self._held:
            engine.scheduler.blocks.free(held)
        self._held, self._beams = [], None

    def end(self, request: int) -> None:
        """There is nothing else to forget."""

    def advance(self, engine: EngineCore, sequences: Sequence[Running]) -> list[Token | Failed]:
        """One step of the search."""
        events: list[Token | Failed] = []
        for sequence in sequences:  # one at most
            if self._beams is None:
                self._beams = self.start()
                self._parents = [0] * self._beams.count
            parents = self._held or _own(sequence)
            length = len(sequence.request.prompt) + len(self._beams.sequences[0]) - 1
            while not self._fork(engine, parents, length):
                events += engine.free_blocks(sequence)
                if sequence.held is None:
                    return events
            events += self._step(engine, sequence, self._beams, length)
        return events

    def _fork(self, engine: EngineCore, parents: Sequence[Held], length: int) -> bool:
        """Gives each running sequence blocks of its own, with room for one more token."""
        blocks = engine.scheduler.blocks
        held: list[Held] = []
        copies: list[Copy] = []
        for parent in self._parents:
            forked = blocks.fork(parents[parent], length)
            if forked is not None:
                held.append(forked[0])
                copies += forked[1]
                blocks.slide(forked[0], length)
            if forked is None or not blocks.reserve(forked[0], length + 1):
                for one in held:
                    blocks.free(one)
                return False
        for old in self._held:
            blocks.free(old)
        engine.copy(copies)
        self._held = held
        return True

    def _step(
        self, engine: EngineCore, sequence: Running, beams: Beams, length: int
    ) -> list[Token | Failed]:
        request, count = sequence.request, beams.count
        last = [(*request.prompt, *tokens)[-1] for tokens in beams.sequences]
        program = engine.programs.get(Shape("beam", count, rows=count))
        cache, rows, tokens, scores = program(
            engine.leaves,
            engine.cache,
            np.array(last, np.int32),
            np.arange(count, dtype=np.int32),
            np.full(count, length, np.int32),
            np.full(count, len(request.prompt), np.int32),
            engine.tables_of(count, list(enumerate(self._held))),
            np.full(count, len(request.encoder), np.int32),
            np.array(beams.scores, np.float32),
        )
        engine.keep_cache(cache)
        self._parents = beams.advance(
            *(np.asarray(part).tolist() for part in (rows, tokens, scores))
        )
        if not beams.done and length + 2 < request.limit:
            return []
        best = beams.ranked()[self.rank].tokens
        return [
            Token(request.id, id, last="length" if index + 1 == len(best) else None)
            for index, id in enumerate(best)
        ]


def _own(sequence: Running) -> list[Held]:
    """The blocks of the prompt, from which all begin."""
    assert sequence.held is not None, "it is admitted"
    return [sequence.held]
