"""Detokenization, stop strings and finish reasons: a request's tokens become chunks of text."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from jinfer.engine.output.completion import Chunk, TokenLogprob, Usage
from jinfer.engine.output.draft_trace import Steps
from jinfer.engine.requests import FinishReason, Request, Token
from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.tokenizer import Tokenizer


@dataclass
class Generation:
    """A running request.

    Attributes:
        request: the engine's request.
        chunks: chunks that `take` has not returned yet.
        finish_reason: None while it runs.
        begun, first, last: times of submission, of the first and of the last token.
        waited: seconds of compilation before the first token.
        count: number of new tokens.
    """

    request: Request
    tokenizer: Tokenizer | None
    chunks: list[Chunk] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    begun: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    last: float = 0.0
    waited: float = 0.0
    count: int = 0

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self._stops = StopStrings(tuple(sampling.stop), sampling.include_stop)
        self._detokenizer = (
            self.tokenizer.detokenizer(
                self.request.prompt, skip_special=sampling.skip_special, shown=self.request.shown
            )
            if self.tokenizer
            else None
        )

    @property
    def ended(self) -> bool:
        """Whether it has its last token."""
        return self.finish_reason is not None

    def push(self, token: Token) -> bool:
        """Adds a new token; True if it is the last one."""
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.count += 1
        sampling = self.request.sampling
        ends = sampling.stop_token_ids
        if not sampling.ignore_eos:
            ends = (*ends, *self.request.end_ids)
        text = ""
        ended = token.id in ends
        if self._detokenizer is not None and (sampling.include_stop or not ended):
            text = self._detokenizer.push(token.id)
            text = self._stops.push(text, self.count <= sampling.min_tokens)
        if ended:
            self.finish_reason = "stop"
        if self._stops.found:
            self.finish_reason = "stop"
        elif self.finish_reason is None and token.last is not None:
            self.finish_reason = token.last
        elif self.finish_reason is None and (
            len(self.request.prompt) + self.count >= self.request.limit
        ):
            self.finish_reason = "length"
        if self.finish_reason is not None:
            text += self._rest()
        logprobs = (self._logprob(token),) if token.logprob is not None else ()
        chunk = Chunk(
            text, (token.id,), logprobs, self.finish_reason, token.origin, self._stops.found
        )
        self.chunks.append(chunk)
        return self.ended

    def _rest(self) -> str:
        if self._detokenizer is None or self._stops.found:
            return ""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()

    def _logprob(self, token: Token) -> TokenLogprob:
        top = tuple(TokenLogprob(id, self._text(id), logprob) for id, logprob in token.top)
        return TokenLogprob(token.id, self._text(token.id), token.logprob or 0.0, top)

    def _text(self, id: int) -> str:
        return self.tokenizer.decode([id], skip_special=False) if self.tokenizer else ""

    def take(self) -> list[Chunk]:
        """The chunks since the last call."""
        chunks, self.chunks = self.chunks, []
        return chunks

    def usage(self, sequence: RunningSequence | None) -> Usage:
        """Tokens and seconds so far.

        Args:
            sequence: in the engine; None: it never came there.
        """
        sequence = sequence or RunningSequence(self.request, 0, [])
        admitted, trees, captured = sequence.admitted, tuple(sequence.trees), sequence.captured
        computed = len(self.request.prompt) + max(0, self.count - 1)
        return Usage(
            len(self.request.prompt),
            self.count,
            max(0.0, self.first - self.begun - self.waited),
            max(0.0, self.last - self.first),
            sequence.cached or 0,
            max(0.0, admitted - self.begun) if admitted else 0.0,
            sequence.drafted,
            sequence.accepted,
            Steps(trees, self._text) if trees else None,
            captured.until(computed) if captured is not None else {},
        )


@dataclass
class StopStrings:
    """Passes a text on up to the first stop string in it.

    The first is the one that is complete first, and the longest of those that are complete at the
    same character, so that the result does not depend on how the text is split into pieces. What
    may be the beginning of a stop string is held back until it is known not to be one.

    Attributes:
        stops: the stop strings.
        included: whether the answer includes the stop string that ends it.
        found: the one that was found; "": none yet.
    """

    stops: tuple[str, ...]
    included: bool = False
    found: str = ""
    _held: str = ""

    def push(self, text: str, early: bool = False) -> str:
        """New text of the answer, after another piece.

        Args:
            text: the piece.
            early: a stop string that this piece completes does not end the answer.
        """
        if self.found or not self.stops:
            return "" if self.found else text
        old, text = len(self._held), self._held + text
        matches = ((text.find(stop, max(0, old - len(stop) + 1)), stop) for stop in self.stops)
        ends = [(at + len(stop), at) for at, stop in matches if at >= 0]
        if ends and not early:
            end, at = min(ends)
            self.found, self._held = text[at:end], ""
            return text[: end if self.included else at]
        keep = max(_overlap(text, stop) for stop in self.stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
