"""Sequences that have to match a grammar: each token is chosen among those that may come next.

Logits are computed before the host has seen the tokens they follow: it takes them into the grammars
and makes the masks meanwhile. Tokens that the grammar forces are not chosen at all: they count as
known, like those of a prompt, and are computed together. A request's rules hold for both: where
they leave nothing of what the grammar allows, the request ends with an error that says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jax import Array

from jinfer.engine.launched import Launched
from jinfer.engine.requests import Failed, Token
from jinfer.engine.scheduler import Running
from jinfer.engine.state import Choice
from jinfer.records import dataclass, field, replace
from jinfer.sampling.errors import ConstraintError
from jinfer.sampling.forbidden import Forbidden, token_ids
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
        forbidden: the rules of each, which hold for forced tokens too.
        computed: logits that nothing was chosen from yet, and the sequences of their rows.
    """

    matchers: dict[int, Matcher] = field(default_factory=dict)
    forbidden: dict[int, Forbidden] = field(default_factory=dict)
    computed: tuple[Array, tuple[Running, ...]] | None = None

    def begin(
        self, sequence: Running, matcher: Matcher, choice: Choice, never: Iterable[int]
    ) -> list[Token | Failed]:
        """Takes a request in; its first tokens may be forced.

        Args:
            never: tokens that the model never gives.
        """
        request = sequence.request
        allowed = choice.mask if choice.masked else None
        rules = Forbidden.of(request.sampling, choice.sampler, allowed, never)
        self.matchers[request.id], self.forbidden[request.id] = matcher, rules
        return self.force(sequence)

    def end(self, request: int) -> None:
        """A request has ended."""
        self.matchers.pop(request, None)
        self.forbidden.pop(request, None)

    def take(self, sequence: Running, tokens: Sequence[Token]) -> list[Token | Failed]:
        """Takes tokens that were chosen into a grammar, and then those that must follow.

        The latter become tokens of the sequence, whose row the device has to be told anew.
        """
        events = [self._taken(sequence, token) for token in tokens]
        return events if sequence.ended else [*events, *self.force(sequence)]

    def force(self, sequence: Running) -> list[Token | Failed]:
        """Appends the tokens that there is no choice of, up to one that the request forbids."""
        if sequence.request.sampling.logprobs is not None:
            return []  # they have to be computed, to be known
        events: list[Token | Failed] = []
        rules = self.forbidden[sequence.request.id]
        for id in self.matchers[sequence.request.id].forced()[: max(0, sequence.left)]:
            if rules.forbids(id, sequence.tokens, _drawn(sequence)):
                break  # a mask will show whether anything else may come
            sequence.tokens.append(id)
            events.append(self._taken(sequence, Token(sequence.request.id, id)))
        return events

    def choose(self, engine: Engine) -> list[Token | Failed]:
        """Chooses from what was computed while the tokens before came to be known."""
        if self.computed is None:
            return []
        (logits, sequences), self.computed = self.computed, None
        chosen = [(row, s) for row, s in enumerate(sequences) if engine.runs(s) and _goes_on(s)]
        if not chosen:
            return []
        count, ended = logits.shape[0], list[Token | Failed]()
        mask = np.zeros((count, engine.programs.words), np.uint32)
        rows = np.full(count, engine.programs.sizes.slots, np.int32)
        for row, sequence in chosen:
            rows[row] = sequence.slot
            ended += self._mask(sequence, mask[row])
        result = engine.choose(logits, rows, [sequence for _, sequence in chosen], mask)
        engine.note(Launched(result, tuple(chosen), 1))
        return ended

    def _mask(self, sequence: Running, out: UInt[np.ndarray, " words"]) -> list[Token | Failed]:
        """Writes what may follow in a sequence; in one without a grammar anything may.

        Returns:
            How it ends, where nothing may.
        """
        if not sequence.guided:
            out[:] = _EVERYTHING
            return []
        matcher = self.matchers[sequence.request.id]
        rules = self.forbidden[sequence.request.id]
        try:
            matcher.mask(out)
            grammar = out.copy()
            rules.clear(out, sequence.tokens, _drawn(sequence))
            if out.any():
                return []
            ids = token_ids(grammar)
            names = rules.names(ids, sequence.tokens, _drawn(sequence))
            if matcher.finished and names == ["min_tokens"]:
                # A whole answer ends, however short it is.
                sequence.tokens.append(ids[0])
                return [self._taken(sequence, Token(sequence.request.id, ids[0]))]
            raise matcher.nothing_left(ids, names)
        except ConstraintError as error:
            sequence.ended = True
            return [Failed(sequence.request.id, error)]

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


def _drawn(sequence: Running) -> int:
    """Tokens of its answer."""
    return len(sequence.tokens) - len(sequence.request.prompt)


def _goes_on(sequence: Running) -> bool:
    """Whether a sequence's next token comes from logits that were computed before the last one."""
    if sequence.ended:
        return False
    if sequence.in_prompt:  # the last one forced others, which come instead
        sequence.computed += 1
        return False
    return True
