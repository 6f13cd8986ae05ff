"""Sequences that have to match a grammar: each token is chosen among those that may come next.

Logits are computed before the host has seen the tokens they follow: it takes them into the grammars
and makes the masks meanwhile. Tokens that the grammar forces are not chosen at all: they count as
known, like those of a prompt, and are computed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jax import Array

from jinfer.engine.launched import Launched
from jinfer.engine.requests import Failed, Token
from jinfer.engine.scheduler import Running
from jinfer.records import dataclass, field, replace
from jinfer.sampling.errors import ConstraintError
from jinfer.shapes import UInt

if TYPE_CHECKING:
    from jinfer.engine.engine import Engine
    from jinfer.sampling.structured import Matcher

_EVERYTHING = np.uint32(0xFFFFFFFF)


@dataclass(eq=False)
class Guides:
    """The grammars of an engine's requests.

    Attributes:
        matchers: by request.
        computed: logits that nothing was chosen from yet, and the sequences of their rows.
    """

    matchers: dict[int, Matcher] = field(default_factory=dict)
    computed: tuple[Array, tuple[Running, ...]] | None = None

    def take(self, sequence: Running, tokens: Sequence[Token]) -> list[Token | Failed]:
        """Takes tokens that were chosen into a grammar, and then those that must follow.

        The latter become tokens of the sequence, whose row the device has to be told anew.
        """
        events = [self._taken(sequence, token) for token in tokens]
        return events if sequence.ended else [*events, *self.force(sequence)]

    def force(self, sequence: Running) -> list[Token | Failed]:
        """Appends the tokens that there is no choice of."""
        if sequence.request.sampling.logprobs is not None:
            return []  # they have to be computed, to be known
        events: list[Token | Failed] = []
        for id in self.matchers[sequence.request.id].forced()[: max(0, sequence.left)]:
            sequence.tokens.append(id)
            events.append(self._taken(sequence, Token(sequence.request.id, id)))
        return events

    def choose(self, engine: Engine) -> list[Failed]:
        """Chooses from what was computed while the tokens before came to be known."""
        if self.computed is None:
            return []
        (logits, sequences), self.computed = self.computed, None
        chosen = [(row, s) for row, s in enumerate(sequences) if engine.runs(s) and _goes_on(s)]
        if not chosen:
            return []
        count, failed = logits.shape[0], list[Failed]()
        mask = np.zeros((count, engine.programs.words), np.uint32)
        rows = np.full(count, engine.programs.sizes.slots, np.int32)
        for row, sequence in chosen:
            rows[row] = sequence.slot
            failed += self._mask(sequence, mask[row])
        result = engine.choose(logits, rows, [sequence for _, sequence in chosen], mask)
        engine.note(Launched(result, tuple(chosen), 1))
        return failed

    def _mask(self, sequence: Running, out: UInt[np.ndarray, " words"]) -> list[Failed]:
        """Writes what may follow in a sequence; in one without a grammar anything may."""
        if not sequence.guided:
            out[:] = _EVERYTHING
            return []
        try:
            self.matchers[sequence.request.id].mask(out)
        except ConstraintError as error:
            sequence.ended = True
            return [Failed(sequence.request.id, error)]
        return []

    def _taken(self, sequence: Running, token: Token) -> Token | Failed:
        """A token of the answer; the last one where the grammar allows no other after it."""
        matcher = self.matchers[sequence.request.id]
        try:
            matcher.advance(token.id)
        except ConstraintError as error:
            sequence.ended = True
            return Failed(token.request, error)
        sequence.ended = matcher.finished
        return replace(token, last="stop") if matcher.finished else token


def _goes_on(sequence: Running) -> bool:
    """Whether a sequence's next token comes from logits that were computed before the last one."""
    if sequence.ended:
        return False
    if sequence.in_prompt:  # the last one forced others, which come instead
        sequence.computed += 1
        return False
    return True
