"""Guided decoding (structured output): tokens are sampled among those that a grammar allows.

Logits are computed before the host has seen the tokens that they follow. Meanwhile grammar threads
advance the matchers by those tokens and compute the masks. A step waits a moment for the masks. A
sequence whose mask is late is left out of the plan, and is sampled from its logits in a later step.
If other logits have been computed by then, its last token is recomputed, with the same result.

Tokens that the grammar forces are not sampled: they are appended like prompt tokens and computed
together. A request's forbidden tokens are excluded from both. If they leave nothing of what the
grammar allows, the request fails with an error that says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from jax import Array

from jinfer.engine.requests import EngineError, Failed, Token
from jinfer.engine.runner.device_state import SamplingRow
from jinfer.engine.runner.in_flight import CallInFlight
from jinfer.engine.runner.model_runner import ModelRunner
from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.engine.search.grammar_worker import (
    BUDGET,
    GrammarThreads,
    MaskRequest,
    MaskResult,
    compute_mask,
    done_by,
)
from jinfer.sampling.forbidden_tokens import ForbiddenTokens, token_ids
from jinfer.sampling.param_types import MAX_BAD_LENGTH

if TYPE_CHECKING:
    from jaxtyping import UInt

    from jinfer.sampling.structured import Matcher

_ALONE = 0.01  # polling interval in seconds while all sequences wait for masks
_EVERYTHING = np.uint32(0xFFFFFFFF)


@dataclass(eq=False)
class Guide:
    """The grammar of a request.

    Attributes:
        sequence: the sequence that it guides.
        matcher: the grammar's state; only the worker may use it while `work` runs.
        rules: the request's forbidden tokens, which are not forced either.
        mask: bitmask of the tokens that may come next, once it is known.
        work: the mask request that runs.
        deadline: until when a step waits for it.
        slow: the last mask took longer than `BUDGET`.
    """

    sequence: RunningSequence
    matcher: Matcher
    rules: ForbiddenTokens
    mask: UInt[np.ndarray, " words"] | None = None
    work: Future[MaskResult] | None = None
    deadline: float = 0.0
    slow: bool = False


@dataclass(eq=False)
class Guides:
    """The grammars of an engine's requests.

    Attributes:
        by_request: the guide of each request.
        pending: logits that are not sampled from yet, and the (row, sequence) of those to sample.
        threads: compute the masks.
    """

    by_request: dict[int, Guide] = field(default_factory=dict)
    pending: tuple[Array, tuple[tuple[int, RunningSequence], ...]] | None = None
    threads: GrammarThreads = field(default_factory=GrammarThreads)

    @property
    def must_read(self) -> bool:
        """Whether tokens have to be read now, because pending logits need masks after them."""
        return self.pending is not None and any(not s.waits_for_grammar for _, s in self.pending[1])

    def add(
        self,
        sequence: RunningSequence,
        matcher: Matcher,
        choice: SamplingRow,
        never: Iterable[int],
        words: int,
    ) -> None:
        """Adds a request; its first tokens may be forced.

        Args:
            choice: the request's sampling row.
            never: tokens that are never sampled.
            words: 32-bit words of a mask.
        """
        request = sequence.request
        allowed = choice.mask if choice.masked else None
        rules = ForbiddenTokens.of(request.sampling, choice.sampler, allowed, never)
        self.by_request[request.id] = Guide(sequence, matcher, rules)
        self.advance(sequence, (), words)

    def remove(self, request: int) -> None:
        """Removes a request that has ended."""
        self.by_request.pop(request, None)

    def close(self) -> None:
        """Ends the threads and drops pending logits."""
        self.pending = None
        self.threads.close()

    def advance(self, sequence: RunningSequence, tokens: Sequence[Token], words: int) -> None:
        """Have a grammar advanced by sampled tokens; the sequence waits for its mask."""
        guide, request = self.by_request[sequence.request.id], sequence.request
        at = MaskRequest(
            request.id,
            tuple(sequence.tokens[-MAX_BAD_LENGTH:]),
            len(sequence.tokens) - len(request.prompt),
            sequence.room,
            request.sampling.logprobs is None,  # forced tokens have none
            () if sequence.thought is None else tuple(sequence.thought.due),
        )
        sequence.waits_for_grammar, guide.mask = True, None
        guide.deadline = time.monotonic() + BUDGET
        guide.work = self.threads.submit(
            guide.slow, compute_mask, guide.matcher, guide.rules, at, tokens, words
        )

    def collect(
        self, runner: ModelRunner, running: Sequence[RunningSequence]
    ) -> list[Token | Failed]:
        """Collect the finished masks, and return the new tokens, with forced tokens.

        Forced tokens are appended to the sequence, and its slot is set again.
        """
        waiting = [
            (guide, guide.work) for guide in self.by_request.values() if guide.work is not None
        ]
        settled = [(guide, work) for guide, work in waiting if done_by(work, guide.deadline)]
        if waiting and not settled and all(s.waits_for_grammar for s in running):
            done_by(waiting[0][1], time.monotonic() + _ALONE)
        return [event for guide, work in settled for event in self._collect(runner, guide, work)]

    def _collect(
        self, runner: ModelRunner, guide: Guide, done: Future[MaskResult]
    ) -> list[Token | Failed]:
        sequence = guide.sequence
        try:
            result = done.result()
        except Exception as error:  # other requests go on
            failed = EngineError(f"a grammar failed: {type(error).__name__}: {error}")
            result = MaskResult([Failed(sequence.request.id, failed)], ended=True)
        guide.work, guide.mask, guide.slow = None, result.mask, result.seconds > BUDGET
        sequence.waits_for_grammar, sequence.ended = False, result.ended
        if result.gave_up and sequence.thought is not None:
            sequence.thought.give_up()
        for id in result.forced:
            sequence.append(id)
        if result.forced and sequence.block_tables is not None and not result.ended:
            runner.set_slot(sequence)
        due = sequence.thought is not None and sequence.thought.due
        if (
            due and result.forced and sequence.room and not result.ended
        ):  # they made a thought too long
            self.advance(sequence, (), runner.programs.words)
        return result.events

    def sample_pending(
        self, runner: ModelRunner
    ) -> tuple[list[Token | Failed], CallInFlight | None]:
        """Sample from pending logits whose masks are ready.

        Returns:
            Sequences' ends, where nothing may follow, and the launched call, if there is one.
        """
        if self.pending is None:
            return [], None
        (logits, rows), self.pending = self.pending, None
        rows = tuple((row, s) for row, s in rows if s.block_tables is not None)
        if later := tuple((row, s) for row, s in rows if s.waits_for_grammar):
            self.pending = logits, later
        logits_of = [(row, s) for row, s in rows if not s.waits_for_grammar and _goes_on(s)]
        count, ended = logits.shape[0], list[Token | Failed]()
        mask = np.zeros((count, runner.programs.words), np.uint32)
        slots = np.full(count, runner.programs.sizes.slots, np.int32)
        for row, sequence in logits_of:
            ended += self._mask(sequence, mask[row])
            slots[row] = runner.programs.sizes.slots if sequence.ended else sequence.slot
        chosen = tuple((row, s) for row, s in logits_of if not s.ended)
        if not chosen:
            return ended, None
        output = runner.sample(logits, slots, [s for _, s in chosen], mask)
        return ended, CallInFlight(output, chosen, 1)

    def discard_logits(self, sequence: RunningSequence) -> None:
        """Drops a sequence's pending logits: it is preempted, or recomputed."""
        if self.pending is not None:
            logits, rows = self.pending
            self.pending = logits, tuple((row, s) for row, s in rows if s is not sequence)

    def _mask(
        self, sequence: RunningSequence, out: UInt[np.ndarray, " words"]
    ) -> list[Token | Failed]:
        """Writes a sequence's mask; without a grammar it allows everything.

        Returns:
            How the sequence ends, if nothing may follow.
        """
        if not sequence.guided:
            out[:] = _EVERYTHING
            return []
        guide, id = self.by_request[sequence.request.id], sequence.request.id
        assert guide.mask is not None, "its mask is computed, and tokens may follow"
        out[:] = guide.mask
        drawn = len(sequence.tokens) - len(sequence.request.prompt)
        guide.rules.clear(out, sequence.tokens, drawn)
        if out.any():
            return []
        ids = token_ids(guide.mask)
        names = guide.rules.names(ids, sequence.tokens, drawn)
        sequence.ended = True
        if guide.matcher.finished and names == ["min_tokens"]:
            # A complete answer ends, even if it is shorter than min_tokens.
            sequence.tokens.append(ids[0])
            return [Token(id, ids[0], last="stop")]
        return [Failed(id, guide.matcher.nothing_left(ids, names))]

    def run_briefly[**P, T](
        self, sequence: RunningSequence, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """Runs work on a fork of a sequence's grammar; None if it takes longer than `BUDGET`.

        Exceptions of the work are raised.
        """
        begun = self.threads.submit(
            self.by_request[sequence.request.id].slow, work, *args, **kwargs
        )
        if done_by(begun, time.monotonic() + BUDGET):
            return begun.result()
        begun.cancel()
        return None


def _goes_on(sequence: RunningSequence) -> bool:
    """Whether the pending logits are those of a sequence's next token."""
    if sequence.ended or sequence.remaining <= 0:
        return False
    if sequence.prefilling:  # forced tokens came instead
        sequence.computed += 1
        return False
    return True
