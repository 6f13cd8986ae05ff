"""Matchers: an answer's state in its constraint, and the masks of its next token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher

from jinfer.sampling.request_errors import ConstraintError
from jinfer.sampling.structured.grammar_source import Kind
from jinfer.sampling.structured.llguidance_errors import one_line, too_much_forced
from jinfer.sampling.structured.token_trie import Vocabulary

if TYPE_CHECKING:
    from jaxtyping import UInt

# Maximum bytes that a grammar may force at once; each mask among them tokenizes them again.
MAX_FORCED = 1 << 14


class Matcher:
    """The tokens of an answer so far, and the allowed next tokens.

    A matcher is not thread-safe; different matchers may be used in parallel. `mask` releases the
    GIL, so a worker thread can compute masks while another waits for the device. Matchers of the
    same constraint share an automaton and wait for each other for the time of a mask; only
    `finished` and `fork` never wait.
    """

    def __init__(
        self,
        kind: Kind,
        vocabulary: Vocabulary,
        state: LLMatcher,
        renew: Callable[[], LLMatcher],
        turns: RLock,
    ) -> None:
        """Begins an answer; see `Constraint.start`.

        Args:
            state: llguidance's matcher, at the start.
            renew: makes another matcher with an unshared automaton.
            turns: the lock of the matchers that share an automaton. llguidance's own lock holds the
                GIL while it waits.
        """
        self._kind = kind
        self._vocabulary = vocabulary
        self._state = state
        self._renew = renew
        self._turns = turns
        self._next: UInt[np.ndarray, " words"] | ConstraintError | None = None  # as computed
        self._tokens: list[int] = []
        self._after_end = 0  # accepted ends of sequence
        self._only_end = False  # as a mask has shown
        self._text = ~_bits(vocabulary.eos_ids, -(-vocabulary.size // 32))

    @property
    def tokens(self) -> tuple[int, ...]:
        """The answer so far."""
        return tuple(self._tokens)

    @property
    def finished(self) -> bool:
        """Whether the answer is complete: only an end of sequence may follow.

        True also for a vocabulary without an end of sequence.
        """
        stopped = bool(self._state.is_stopped()) and not self._state.is_error()
        return stopped or self._only_end

    @property
    def may_end(self) -> bool:
        """Whether an end of sequence is allowed; the answer may be able to continue."""
        if self.finished:
            return True
        with self._turns:
            return bool(self._state.is_accepting())

    def mask(self, out: UInt[np.ndarray, " words"]) -> None:
        """Writes the mask of allowed next tokens: bit i % 32 of word i // 32 for token i.

        An end of sequence is allowed exactly where the constraint may end. If the constraint forces
        tokens, only they are allowed (see `forced`).

        Args:
            out: contiguous, with a bit for each token at least; bits beyond are cleared.

        Raises:
            ConstraintError: no token is allowed: the vocabulary cannot write the required text, or
                the constraint is too complex here. The answer ends with this error.
            ValueError: `out` is of the wrong type or too short.
        """
        size = self._vocabulary.size
        words = -(-size // 32)
        if out.dtype != np.uint32 or out.ndim != 1 or not out.flags.c_contiguous:
            raise ValueError("a mask must be a contiguous row of uint32")
        if len(out) < words:
            raise ValueError(f"a mask of {len(out)} words is too short: {size} tokens need {words}")
        found = self._compute()
        out[:words] = found[:words]
        out[words:] = 0
        if size % 32:
            out[words - 1] &= np.uint32((1 << size % 32) - 1)
        if not (out[:words] & self._text).any():
            if not self.may_end:
                raise self._dead_end("")
            self._only_end = True

    def _compute(self) -> UInt[np.ndarray, " words"]:
        """Returns llguidance's mask; its end of sequence may be outside the vocabulary."""
        if self._next is None:
            with self._turns:
                try:
                    self._next = self._computed()
                except ConstraintError as error:
                    self._next = error
        if isinstance(self._next, ConstraintError):
            raise self._next.with_traceback(None)
        return self._next

    def _computed(self) -> UInt[np.ndarray, " words"]:
        data = self._state.compute_bitmask()
        if self._state.is_error():
            # The automaton that matchers of a constraint share may be full, or broken by another
            # matcher.
            message = self._state.get_error()
            self._rebuild(self._renew())
            data = self._state.compute_bitmask()
            if self._state.is_error():
                raise self._dead_end(message)
        mask = np.frombuffer(data, np.uint32)
        if _single(mask) and len(self._state.compute_ff_bytes()) > MAX_FORCED:
            raise self._dead_end(too_much_forced(MAX_FORCED))
        return mask

    def nothing_left(self, ids: Sequence[int], rules: Sequence[str]) -> ConstraintError:
        """Returns the error of an answer for which the request's rules leave no token.

        Args:
            ids: tokens that the constraint allows next.
            rules: the parameters that forbid them.
        """
        text = self._vocabulary.tokenizer.decode(ids[:1], skip_special=False)
        return ConstraintError(
            f"{self._kind}: after {len(self._tokens)} tokens nothing is left: "
            f"{' and '.join(rules) or 'the model'} forbid what has to come next, {text!r}"
            + (" and others" if len(ids) > 1 else "")
        )

    def _dead_end(self, message: str) -> ConstraintError:
        if "NoExtension" in message or not message:
            written = self._vocabulary.tokenizer.decode(self._tokens[-8:])
            why = f"no token of the vocabulary can go on after {written!r}"
        else:
            why = one_line(self._kind, message)
        return ConstraintError(f"{self._kind}: after {len(self._tokens)} tokens: {why}")

    def advance(self, token: int) -> None:
        """Appends a token to the answer.

        Raises:
            ConstraintError: the token is not allowed here; the answer stays as it was.
        """
        self._next = None
        if self.finished and token in self._vocabulary.eos_ids:
            self._after_end += 1
            self._tokens.append(token)
            return
        if not 0 <= token < self._vocabulary.size or not self._consumes(token):
            raise ConstraintError(f"{self._kind}: token {token} is not allowed here")
        self._tokens.append(token)
        self._only_end = False

    def _consumes(self, token: int) -> bool:
        with self._turns:
            consumed = self._state.try_consume_tokens([token])
            if self._state.is_error():
                self._rebuild(self._renew())
                consumed = self._state.try_consume_tokens([token])
            return bool(consumed == 1)

    def forced(self) -> list[int]:
        """Returns the tokens that the constraint forces next; empty if several are allowed.

        `mask` would allow only each of them in turn. They become part of the answer by `advance`.
        """
        if self._state.is_stopped():
            return []
        # The mask shows whether several are allowed, and is computed without the GIL.
        try:
            mask = self._compute()
        except ConstraintError:
            return []  # `mask` will report the error
        if not _single(mask):
            return []
        with self._turns:
            return [int(token) for token in self._state.compute_ff_tokens()]

    def fork(self) -> Matcher:
        """Copies the matcher."""
        other = copy(self)
        other._state = self._state.deep_copy()
        other._tokens = list(self._tokens)
        return other

    def rollback(self, n: int) -> None:
        """Removes the last n tokens of the answer.

        Raises:
            ValueError: the answer is not that long.
        """
        if not 0 <= n <= len(self._tokens):
            raise ValueError(f"{n} of {len(self._tokens)} tokens cannot be taken back")
        self._next = None
        left = len(self._tokens) - n
        beyond = min(n, self._after_end)
        self._after_end -= beyond
        del self._tokens[left:]
        self._only_end = self._only_end and n <= beyond
        with self._turns:
            if n > beyond and not self._state.rollback(n - beyond):
                # Grammars with limits on tokens cannot go back.
                self._rebuild(self._renew())

    def _rebuild(self, fresh: Any) -> None:
        """Replays the answer in a matcher at the start."""
        self._state = fresh
        inside = self._tokens[: len(self._tokens) - self._after_end]
        for token in inside:
            fresh.consume_token(token)


def _single(mask: UInt[np.ndarray, " words"]) -> bool:
    """Whether a mask allows one token, and no other."""
    words = mask[mask.nonzero()]
    return len(words) == 1 and int(words[0]).bit_count() == 1


def _bits(ids: tuple[int, ...], words: int) -> UInt[np.ndarray, " words"]:
    mask = np.zeros(words, np.uint32)
    for id in ids:
        mask[id // 32] |= np.uint32(1 << id % 32)
    return mask
