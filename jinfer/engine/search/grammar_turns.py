"""A grammar's turn: takes the last tokens in, and says which may follow. Not the engine's work.

Most turns take a tenth of a millisecond, some a tenth of a second, so a thread of their own makes
them: see `jinfer.engine.search.guided_decoding`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jinfer.engine.requests import Failed, Token
from jinfer.sampling.forbidden_tokens import Forbidden
from jinfer.sampling.request_errors import ConstraintError

if TYPE_CHECKING:
    from jaxtyping import UInt

    from jinfer.sampling.structured import Matcher

BUDGET = 0.005  # seconds that others wait for a turn

_QUICK = 2  # threads; more would take processors from what computes logits


@dataclass(frozen=True)
class Position:
    """Where an answer stands when its grammar's turn comes.

    Attributes:
        request: its id.
        recent: its last tokens, or the prompt's; as many as bad words may have.
        drawn: its tokens, new ones included.
        left: tokens that may follow.
        forces: whether those that there is no choice of are not chosen.
    """

    request: int
    recent: tuple[int, ...]
    drawn: int
    left: int
    forces: bool


@dataclass
class Turn:
    """What a grammar makes of new tokens.

    Attributes:
        events: the tokens, then those that are forced, perhaps an error.
        forced: ids of those.
        mask: what may come next; None where nothing does.
        ended: the answer is complete, or has failed.
        seconds: of the processor that it took.
    """

    events: list[Token | Failed] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)
    mask: UInt[np.ndarray, " words"] | None = None
    ended: bool = False
    seconds: float = 0.0


def take_turn(
    matcher: Matcher, rules: Forbidden, at: Position, new: Sequence[Token], words: int
) -> Turn:
    """Takes tokens that were chosen into a grammar, then those that must follow, up to a choice.

    Args:
        rules: of the request; they hold for forced tokens too.
        at: where the answer stands.
        new: its last tokens, which the grammar does not know yet.
        words: of a mask.
    """
    begun, turn = time.thread_time(), Turn()
    for token in new:
        if not turn.ended:
            _take(matcher, turn, token)
    recent = list(at.recent)
    for id in matcher.forced()[: max(0, at.left)] if at.forces and not turn.ended else ():
        if turn.ended or rules.forbids(id, recent, at.drawn + len(turn.forced)):
            break  # a mask will show whether anything else may come
        recent.append(id)
        turn.forced.append(id)
        _take(matcher, turn, Token(at.request, id))
    if not turn.ended and at.left > len(turn.forced):
        mask = np.zeros(words, np.uint32)
        try:
            matcher.mask(mask)
            turn.mask = mask
        except ConstraintError as error:
            turn.ended = True
            turn.events.append(Failed(at.request, error))
    turn.seconds = time.thread_time() - begun
    return turn


def _take(matcher: Matcher, turn: Turn, token: Token) -> None:
    """A token of the answer; the last one where the grammar allows no other after it."""
    try:
        matcher.advance(token.id)
    except ConstraintError as error:
        turn.ended = True
        turn.events.append(Failed(token.request, error))
        return
    turn.ended = matcher.finished
    turn.events.append(replace(token, last="stop") if turn.ended else token)


@dataclass(eq=False)
class Beside:
    """Threads beside the engine's. Who was slow the last time does not keep the others waiting."""

    _pools: dict[bool, ThreadPoolExecutor] = field(default_factory=dict)

    def begin[**P, T](
        self, slow: bool, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Begins some work.

        Args:
            slow: whether it is likely to take longer than `BUDGET`.
        """
        if slow not in self._pools:
            name = "grammar-slow" if slow else "grammar"
            self._pools[slow] = ThreadPoolExecutor(1 if slow else _QUICK, thread_name_prefix=name)
        return self._pools[slow].submit(work, *args, **kwargs)

    def close(self) -> None:
        """Ends the threads; what has not begun is not done."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        self._pools.clear()


def ready(work: Future[Any], until: float) -> bool:
    """Whether work is done by a time of `time.monotonic`; waits for it."""
    try:
        work.exception(max(0.0, until - time.monotonic()))
    except TimeoutError:
        return False
    return True
