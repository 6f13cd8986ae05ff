"""Sequences that have to match a grammar: each token is chosen among those that may come next.

The mask of the next token is made on the host while the device computes the logits it is for.
Tokens that the grammar forces are not chosen at all, and computed together with the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from jaxtyping import UInt

from jinfer.engine.engine import Engine
from jinfer.engine.programs import Shape
from jinfer.engine.requests import Failed, Token
from jinfer.engine.scheduler import Running
from jinfer.engine.steps import Chosen

_MOST_FORCED = 8  # tokens computed together with the one after them


class Matcher(Protocol):
    """Where an answer is in its grammar."""

    @property
    def finished(self) -> bool:
        """Whether nothing may follow."""
        ...

    def mask(self, out: UInt[np.ndarray, " words"]) -> None:
        """Writes which tokens may follow: bit i % 32 of word i // 32 is for token i."""
        ...

    def advance(self, token: int) -> None:
        """Takes a token in."""
        ...

    def forced(self) -> list[int]:
        """The tokens that must follow, as far as there is no choice."""
        ...


@dataclass(eq=False)
class Guided:
    """Drives the sequences of an engine that have a grammar.

    Attributes:
        matchers: by request.
    """

    matchers: dict[int, Matcher] = field(default_factory=dict)
    _unread: list[tuple[Chosen, tuple[Running, ...]]] = field(default_factory=list)

    def settle(self, engine: Engine) -> list[Token | Failed]:
        """Reads the tokens that were chosen, and takes them into their grammars."""
        tokens: list[Token | Failed] = []
        for chosen, sequences in self._unread:
            for row, sequence in enumerate(sequences):
                sequence.unread = 0
                if sequence.request.id in self.matchers:
                    tokens += engine.take(sequence, chosen, row, 1)
                    self.matchers[sequence.request.id].advance(sequence.tokens[-1])
        self._unread.clear()
        return tokens

    def advance(self, engine: Engine, sequences: Sequence[Running]) -> list[Token | Failed]:
        """Launches the choice of the next token of each sequence."""
        tokens: list[Token | Failed] = []
        going = [s for s in sequences if s.left > 0 and not self._matcher(s).finished]
        for sequence in going:
            tokens += self._force(engine, sequence)
            tokens += engine.make_room(sequence, 1)
        going = [s for s in going if s.held is not None and s.left > 0]
        if going:
            self._launch(engine, going)
        return tokens

    def drop(self, engine: Engine, request: int) -> None:
        """A preempted sequence's matcher stays where it is: its tokens are known."""
        self._unread = [entry for entry in self._unread if entry[1]]

    def _matcher(self, sequence: Running) -> Matcher:
        return self.matchers[sequence.request.id]

    def _force(self, engine: Engine, sequence: Running) -> list[Token | Failed]:
        """Takes the tokens that there is no choice of."""
        if sequence.request.sampling.logprobs is not None:
            return []  # they have to be computed, to be known
        matcher, tokens = self._matcher(sequence), list[Token | Failed]()
        for token in matcher.forced()[: min(_MOST_FORCED, sequence.left - 1)]:
            matcher.advance(token)
            sequence.tokens.append(token)
            tokens.append(Token(sequence.request.id, token))
        if tokens:
            engine.enter(sequence)
        return tokens

    def _launch(self, engine: Engine, sequences: list[Running]) -> None:
        rows: list[tuple[int, int]] = []
        last = []
        for sequence in sequences:
            places = range(sequence.computed, len(sequence.tokens))
            rows += [(sequence.slot, place) for place in places]
            last.append(len(rows) - 1)
        chosen = engine.row_count(len(sequences))
        size = engine.size_of(len(rows))
        at, picked = np.full((2, size), -1, np.int32), np.full(chosen, -1, np.int32)
        at[:, : len(rows)] = np.array(rows, np.int32).T
        picked[: len(last)] = last
        logits = engine.logits(Shape("logits", size, chosen), at, picked)
        words = -(-engine.programs.sizes.vocab // 32)
        mask, slots = np.full((chosen, words), 2**32 - 1, np.uint32), np.full(chosen, -1, np.int32)
        for row, sequence in enumerate(sequences):
            slots[row] = sequence.slot
            self._matcher(sequence).mask(mask[row])
        result = engine.choose(Shape("choose", chosen, chosen), logits, slots, mask)
        for sequence in sequences:
            sequence.computed, sequence.unread = len(sequence.tokens), 1
        self._unread.append((result, tuple(sequences)))
