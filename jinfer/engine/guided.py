"""Sequences that have to match a grammar: each token is chosen among those that may come next.

The mask of the next token is made on the host while the device computes the logits it is for.
Tokens that the grammar forces are not chosen at all, and computed together with the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt

from jinfer.engine.engine import Engine
from jinfer.engine.requests import Failed, Token
from jinfer.engine.scheduler import Running
from jinfer.engine.steps import Chosen
from jinfer.sampling.errors import ConstraintError

if TYPE_CHECKING:
    from jinfer.sampling.structured import Matcher

_MOST_FORCED = 8  # tokens computed together with the one after them


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
        events: list[Token | Failed] = []
        for chosen, sequences in self._unread:
            for row, sequence in enumerate(sequences):
                sequence.unread = 0
                if sequence.request.id in self.matchers:
                    (token,) = engine.take(sequence, chosen, row, 1)
                    events.append(self._taken(sequence, token))
        self._unread.clear()
        return events

    def advance(self, engine: Engine, sequences: Sequence[Running]) -> list[Token | Failed]:
        """Launches the choice of the next token of each sequence."""
        events: list[Token | Failed] = []
        for sequence in sequences:
            events += self._force(engine, sequence)
            if sequence.left > 0:
                events += engine.make_room(sequence, 1)
        going = [s for s in sequences if s.held is not None and s.left > 0]
        events += self._launch(engine, [s for s in going if not self._matcher(s).finished])
        return events

    def drop(self, engine: Engine, request: int) -> None:
        """A preempted sequence's matcher stays where it is: its tokens are known."""

    def end(self, request: int) -> None:
        """Forgets a request that has ended."""
        self.matchers.pop(request, None)

    def _matcher(self, sequence: Running) -> Matcher:
        return self.matchers[sequence.request.id]

    def _taken(self, sequence: Running, token: Token) -> Token | Failed:
        """A token of the answer; the last one where the grammar allows no other after it."""
        matcher = self._matcher(sequence)
        try:
            matcher.advance(token.id)
        except ConstraintError as error:
            return Failed(token.request, error)
        return replace(token, last="stop") if matcher.finished else token

    def _force(self, engine: Engine, sequence: Running) -> list[Token | Failed]:
        """Takes the tokens that there is no choice of."""
        if sequence.request.sampling.logprobs is not None:
            return []  # they have to be computed, to be known
        events: list[Token | Failed] = []
        for id in self._matcher(sequence).forced()[: min(_MOST_FORCED, sequence.left)]:
            sequence.tokens.append(id)
            events.append(self._taken(sequence, Token(sequence.request.id, id)))
        if events:
            engine.enter(sequence)
        return events

    def _masks(
        self, sequences: Sequence[Running], out: UInt[np.ndarray, "rows words"]
    ) -> Iterator[Failed]:
        """Writes what may follow in each sequence."""
        for row, sequence in enumerate(sequences):
            try:
                self._matcher(sequence).mask(out[row])
            except ConstraintError as error:
                yield Failed(sequence.request.id, error)

    def _launch(self, engine: Engine, sequences: list[Running]) -> list[Failed]:
        if not sequences:
            return []
        rows: list[tuple[int, int]] = []
        last = []
        for sequence in sequences:
            places = range(sequence.computed, len(sequence.tokens))
            rows += [(sequence.slot, place) for place in places]
            last.append(len(rows) - 1)
        count = engine.chosen_count(len(sequences))
        out = engine.compute(rows, last, count)
        # The device computes while the masks are made.
        mask = np.zeros((count, -(-engine.programs.sizes.vocab // 32)), np.uint32)
        failed = list(self._masks(sequences, mask))
        result = engine.choose(*out, sequences, mask)
        for sequence in sequences:
            sequence.computed, sequence.unread = len(sequence.tokens), 1
        self._unread.append((result, tuple(sequences)))
        return failed
