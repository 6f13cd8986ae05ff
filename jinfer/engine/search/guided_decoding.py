"""Sequences that have to match a grammar: each token is chosen among those that may come next.

Logits are computed before the host has seen the tokens they follow: threads beside the engine's
take those into the grammars and make the masks meanwhile. A step waits a moment for them; who is
not ready then waits alone: it is not planned, and chosen from its logits in a later step. If others
have been computed by then, its last token is computed again, which gives the same logits.

Tokens that the grammar forces are not chosen at all: they count as known, like those of a prompt,
and are computed together. A request's rules hold for both: where they leave nothing of what the
grammar allows, the request ends with an error that says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from jax import Array

from jinfer.engine.engine_core import EngineCore
from jinfer.engine.requests import EngineError, Failed, Token
from jinfer.engine.runner.device_state import Choice
from jinfer.engine.runner.in_flight import Launched
from jinfer.engine.scheduling.scheduler import Running
from jinfer.engine.search.grammar_turns import BUDGET, Beside, Position, Turn, ready, take_turn
from jinfer.sampling.forbidden_tokens import Forbidden, token_ids
from jinfer.sampling.param_ranges import MAX_BAD_LENGTH

if TYPE_CHECKING:
    from jaxtyping import UInt

    from jinfer.sampling.structured import Matcher

_ALONE = 0.01  # seconds between two looks for what came, where there is nothing else to do
_EVERYTHING = np.uint32(0xFFFFFFFF)


@dataclass(eq=False)
class Guide:
    """The grammar of a request.

    Attributes:
        sequence: its answer.
        matcher: where that stands; while there is a turn, its thread's alone.
        rules: of the request, which hold for forced tokens too.
        mask: what may come next, as far as the grammar has it.
        turn: on its way.
        due: until when others wait for it.
        slow: the last one took long.
    """

    sequence: Running
    matcher: Matcher
    rules: Forbidden
    mask: UInt[np.ndarray, " words"] | None = None
    turn: Future[Turn] | None = None
    due: float = 0.0
    slow: bool = False


@dataclass(eq=False)
class Guides:
    """The grammars of an engine's requests.

    Attributes:
        of: by request.
        computed: logits that nothing was chosen from yet, and (row, sequence) of those that are to
            be.
        beside: threads that make masks.
    """

    of: dict[int, Guide] = field(default_factory=dict)
    computed: tuple[Array, tuple[tuple[int, Running], ...]] | None = None
    beside: Beside = field(default_factory=Beside)

    @property
    def due(self) -> bool:
        """Whether tokens have to be read, for masks of what was computed a moment ago."""
        return self.computed is not None and any(not s.waits for _, s in self.computed[1])

    def begin(
        self,
        sequence: Running,
        matcher: Matcher,
        choice: Choice,
        never: Iterable[int],
        words: int,
    ) -> None:
        """Takes a request in; its first tokens may be forced.

        Args:
            never: tokens that the model never gives.
            words: of a mask.
        """
        request = sequence.request
        allowed = choice.mask if choice.masked else None
        rules = Forbidden.of(request.sampling, choice.sampler, allowed, never)
        self.of[request.id] = Guide(sequence, matcher, rules)
        self.take(sequence, (), words)

    def end(self, request: int) -> None:
        """A request has ended."""
        self.of.pop(request, None)

    def close(self) -> None:
        """Ends the threads."""
        self.computed = None
        self.beside.close()

    def take(self, sequence: Running, tokens: Sequence[Token], words: int) -> None:
        """Has a grammar take tokens in that were chosen; the sequence waits until it has."""
        guide, request = self.of[sequence.request.id], sequence.request
        at = Position(
            request.id,
            tuple(sequence.tokens[-MAX_BAD_LENGTH:]),
            len(sequence.tokens) - len(request.prompt),
            sequence.left,
            request.sampling.logprobs is None,  # forced ones have to be computed, to be known
        )
        sequence.waits, guide.mask = True, None
        guide.due = time.monotonic() + BUDGET
        guide.turn = self.beside.begin(
            guide.slow, take_turn, guide.matcher, guide.rules, at, tokens, words
        )

    def settle(self, engine: EngineCore) -> list[Token | Failed]:
        """The tokens of grammars whose turns are done, also those that must follow.

        The latter become tokens of the sequence, whose row the device has to be told anew.
        """
        waiting = [(guide, guide.turn) for guide in self.of.values() if guide.turn is not None]
        settled = [(guide, turn) for guide, turn in waiting if ready(turn, guide.due)]
        if waiting and not settled and all(s.waits for s in engine.scheduler.running):
            ready(waiting[0][1], time.monotonic() + _ALONE)
        return [event for guide, turn in settled for event in self._settled(engine, guide, turn)]

    def _settled(
        self, engine: EngineCore, guide: Guide, done: Future[Turn]
    ) -> list[Token | Failed]:
        sequence = guide.sequence
        try:
            turn = done.result()
        except Exception as error:  # whatever it is, others go on
            failed = EngineError(f"a grammar failed: {type(error).__name__}: {error}")
            turn = Turn([Failed(sequence.request.id, failed)], ended=True)
        guide.turn, guide.mask, guide.slow = None, turn.mask, turn.seconds > BUDGET
        sequence.waits, sequence.ended = False, turn.ended
        sequence.tokens += turn.forced
        if turn.forced and sequence.held is not None and not turn.ended:
            engine.enter(sequence)
        return turn.events

    def choose(self, engine: EngineCore) -> list[Token | Failed]:
        """Chooses from what was computed while the tokens before came to be known."""
        if self.computed is None:
            return []
        (logits, rows), self.computed = self.computed, None
        rows = tuple((row, s) for row, s in rows if engine.runs(s))
        if later := tuple((row, s) for row, s in rows if s.waits):
            self.computed = logits, later
        logits_of = [(row, s) for row, s in rows if not s.waits and _goes_on(s)]
        count, ended = logits.shape[0], list[Token | Failed]()
        mask = np.zeros((count, engine.programs.words), np.uint32)
        slots = np.full(count, engine.programs.sizes.slots, np.int32)
        for row, sequence in logits_of:
            ended += self._mask(sequence, mask[row])
            slots[row] = engine.programs.sizes.slots if sequence.ended else sequence.slot
        if chosen := tuple((row, s) for row, s in logits_of if not s.ended):
            result = engine.choose(logits, slots, [s for _, s in chosen], mask)
            engine.note(Launched(result, chosen, 1))
        return ended

    def drop(self, sequence: Running) -> None:
        """Nothing is chosen from a sequence's logits: it is preempted, or computed again."""
        if self.computed is not None:
            logits, rows = self.computed
            self.computed = logits, tuple((row, s) for row, s in rows if s is not sequence)

    def _mask(self, sequence: Running, out: UInt[np.ndarray, " words"]) -> list[Token | Failed]:
        """Writes what may follow in a sequence; in one without a grammar anything may.

        Returns:
            How it ends, where nothing may.
        """
        if not sequence.guided:
            out[:] = _EVERYTHING
            return []
        guide, id = self.of[sequence.request.id], sequence.request.id
        assert guide.mask is not None, "its turn is done, and tokens may follow"
        out[:] = guide.mask
        drawn = len(sequence.tokens) - len(sequence.request.prompt)
        guide.rules.clear(out, sequence.tokens, drawn)
        if out.any():
            return []
        ids = token_ids(guide.mask)
        names = guide.rules.names(ids, sequence.tokens, drawn)
        sequence.ended = True
        if guide.matcher.finished and names == ["min_tokens"]:
            # A whole answer ends, however short it is.
            sequence.tokens.append(ids[0])
            return [Token(id, ids[0], last="stop")]
        return [Failed(id, guide.matcher.nothing_left(ids, names))]

    def promptly[**P, T](
        self, sequence: Running, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """The result of work on a fork of a sequence's grammar, if it is there soon.

        What it raises is raised.
        """
        begun = self.beside.begin(self.of[sequence.request.id].slow, work, *args, **kwargs)
        if ready(begun, time.monotonic() + BUDGET):
            return begun.result()
        begun.cancel()
        return None


def _goes_on(sequence: Running) -> bool:
    """Whether a sequence's next token comes from logits that were computed before the last one."""
    if sequence.ended or sequence.left <= 0:
        return False
    if sequence.in_prompt:  # the last one forced others, which come instead
        sequence.computed += 1
        return False
    return True
