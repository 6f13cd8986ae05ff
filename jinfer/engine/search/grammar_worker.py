"""Grammar worker: threads that advance matchers by new tokens and compute the next masks.

Most masks are computed in less time than a step, but some take as long as many steps, so that the
engine's thread does not compute them: see `jinfer.engine.search.guided_decoding`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jinfer.engine.requests import Failed, Token
from jinfer.engine.thread_pools import submit
from jinfer.sampling.forbidden_tokens import ForbiddenTokens
from jinfer.sampling.request_errors import ConstraintError

if TYPE_CHECKING:
    from jaxtyping import UInt

    from jinfer.sampling.structured import Matcher

BUDGET = 0.005  # seconds that a step waits for a mask

_QUICK = 2  # threads; more would take cores from the forward pass


@dataclass(frozen=True)
class MaskRequest:
    """A request to compute the mask of an answer's next token.

    Attributes:
        request: id of the request.
        recent: last tokens, prompt included; as many as bad words may have.
        drawn: number of new tokens.
        left: number of tokens that may follow.
        forces: whether tokens without an alternative are appended without sampling.
        due: tokens that end a thought which is at its budget.
    """

    request: int
    recent: tuple[int, ...]
    drawn: int
    left: int
    forces: bool
    due: tuple[int, ...] = ()


@dataclass
class MaskResult:
    """The mask of an answer's next token, and the tokens that came before it.

    Attributes:
        events: the new tokens, then the forced ones, perhaps a failure.
        forced: ids of the forced tokens.
        mask: bitmask of the tokens that may come next; None if none does.
        ended: the answer is complete, or has failed.
        gave_up: the grammar does not allow the tokens that end the thought.
        seconds: CPU time that it took.
    """

    events: list[Token | Failed] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)
    mask: UInt[np.ndarray, " words"] | None = None
    ended: bool = False
    gave_up: bool = False
    seconds: float = 0.0


def compute_mask(
    matcher: Matcher, rules: ForbiddenTokens, at: MaskRequest, new: Sequence[Token], words: int
) -> MaskResult:
    """Advance a grammar by sampled tokens, then by forced tokens, up to the next choice.

    Args:
        rules: the request's forbidden tokens; they hold for forced tokens too.
        at: state of the answer.
        new: sampled tokens that the grammar has not consumed yet.
        words: 32-bit words of a mask.
    """
    begun, result = time.thread_time(), MaskResult()
    for token in new:
        if not result.ended:
            _take(matcher, result, token)
    recent = list(at.recent)
    due = () if result.ended else at.due
    if due and not _allows(matcher, due):
        result.gave_up, due = True, ()
    if due and not at.forces:
        result.mask = np.zeros(words, np.uint32)
        result.mask[due[0] // 32] = 1 << due[0] % 32
        return result
    for id in due[: max(0, at.left)]:
        if result.ended:
            break
        recent.append(id)
        result.forced.append(id)
        _take(matcher, result, Token(at.request, id))
    left = max(0, at.left - len(due))
    for id in matcher.forced()[:left] if at.forces and not result.ended else ():
        if result.ended or rules.forbids(id, recent, at.drawn + len(result.forced)):
            break  # the mask shows whether any other token may come
        recent.append(id)
        result.forced.append(id)
        _take(matcher, result, Token(at.request, id))
    if not result.ended and at.left > len(result.forced):
        mask = np.zeros(words, np.uint32)
        try:
            matcher.mask(mask)
            result.mask = mask
        except ConstraintError as error:
            result.ended = True
            result.events.append(Failed(at.request, error))
    result.seconds = time.thread_time() - begun
    return result


def _allows(matcher: Matcher, tokens: Sequence[int]) -> bool:
    state = matcher.fork()
    try:
        for id in tokens:
            state.advance(id)
    except ConstraintError:
        return False
    return True


def _take(matcher: Matcher, result: MaskResult, token: Token) -> None:
    """Advances by a token; it is the last one if the grammar allows no other after it."""
    try:
        matcher.advance(token.id)
    except ConstraintError as error:
        result.ended = True
        result.events.append(Failed(token.request, error))
        return
    result.ended = matcher.finished
    result.events.append(replace(token, last="stop") if result.ended else token)


@dataclass(eq=False)
class GrammarThreads:
    """Thread pools for grammars. Slow grammars have their own, so that others need not wait."""

    _pools: dict[bool, ThreadPoolExecutor] = field(default_factory=dict)

    def submit[**P, T](
        self, slow: bool, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Submits work to the pool.

        Args:
            slow: whether it is likely to take longer than `BUDGET`.
        """
        if slow not in self._pools:
            name = "grammar-slow" if slow else "grammar"
            self._pools[slow] = ThreadPoolExecutor(1 if slow else _QUICK, thread_name_prefix=name)
        return submit(self._pools[slow], work, *args, **kwargs)

    def close(self) -> None:
        """Ends the threads; pending work is cancelled."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        self._pools.clear()


def done_by(work: Future[Any], until: float) -> bool:
    """Whether work is done by a time of `time.monotonic`; waits until then."""
    try:
        work.exception(max(0.0, until - time.monotonic()))
    except TimeoutError:
        return False
    return True
