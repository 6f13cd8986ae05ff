"""Detokenization and finish reasons: a request's tokens become chunks, then a completion."""

from __future__ import annotations

import reprlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jinfer.engine.output.data_frames import data_frame
from jinfer.engine.output.draft_trace import Steps
from jinfer.engine.output.stop_strings import StopStrings
from jinfer.engine.output.token_logprob import TokenLogprob
from jinfer.engine.requests import FinishReason, Request, Token
from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.tokenizer import Tokenizer

_SHORT = reprlib.Repr(maxstring=60, maxlist=8)


@dataclass(frozen=True)
class Usage:
    """Tokens and seconds of a request.

    Attributes:
        prompt_tokens, completion_tokens: number of tokens.
        cached_tokens: tokens of the prompt that were in the prefix cache.
        prefill_seconds: from submission to the first token, without compilation.
        decode_seconds: from the first token to the last.
        queue_seconds: from submission to a slot; a part of `prefill_seconds`.
        drafted_tokens, accepted_tokens: tokens drafted for it, and the accepted ones.
        speculation: the draft trees, call by call; None if nothing was drafted.
        captured: the activations that it asked for, by name: [tokens, ...], float32, of the prompt
            and of the answer but for its last token, which was not computed.
    """

    prompt_tokens: int
    completion_tokens: int
    prefill_seconds: float
    decode_seconds: float
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    speculation: Steps | None = field(default=None, repr=False, compare=False)
    captured: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    @property
    def prefill_rate(self) -> float:
        """Computed tokens of the prompt per second."""
        return (
            (self.prompt_tokens - self.cached_tokens) / self.prefill_seconds
            if self.prefill_seconds
            else 0.0
        )

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first one."""
        return (
            max(0, self.completion_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0
        )


@dataclass(frozen=True)
class Chunk:
    """A piece of an answer.

    Attributes:
        text: new text; may be empty.
        token_ids: new tokens.
        logprobs: of the new tokens, if requested.
        finish_reason: on the last chunk: "stop" (end of sequence, stop string or id) or "length".
        origin: draft source of its tokens; "": not drafted.
        stop_string: on the last chunk: the stop string that ended the answer; "": none did.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    origin: str = ""
    stop_string: str = ""


@dataclass(frozen=True)
class Completion:
    """A whole answer.

    Attributes:
        text: without end of sequence, special tokens and stop string; "" without a tokenizer.
        token_ids: all new tokens, the end of sequence included.
        logprobs: one per token if requested, else None.
        finish_reason: "stop" or "length".
        usage: tokens and seconds.
        stop_string: the stop string that ended it; "": none did.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    finish_reason: FinishReason
    usage: Usage
    stop_string: str = ""

    @property
    def speculation(self) -> Steps | None:
        """The draft trees, call by call; None if nothing was drafted."""
        return self.usage.speculation

    @property
    def captured(self) -> Mapping[str, np.ndarray]:
        """The activations that were asked for, by name: [tokens, ...], float32.

        Those of the prompt, then those of the answer but for its last token, which was not
        computed.
        """
        return self.usage.captured

    def to_pandas(self) -> Any:
        """A row for each token: its id, and with `logprobs` its text and log-probability.

        Raises:
            RequestError: pandas is not installed.
        """
        columns: dict[str, list[Any]] = {"id": self.token_ids}
        if self.logprobs is not None:
            columns["token"] = [one.text for one in self.logprobs]
            columns["logprob"] = [one.logprob for one in self.logprobs]
            likeliest = [one.top[0].text if one.top else None for one in self.logprobs]
            columns["likeliest"] = likeliest
        return data_frame(columns)

    def _repr_html_(self) -> str:
        """HTML for notebooks; tokens are shaded if there are log-probabilities."""
        from jinfer.html.completions_html import completions_html

        return completions_html([self])

    def __repr__(self) -> str:
        # Without a tokenizer there is no text, but there are ids.
        text = _SHORT.repr(self.text if self.text or not self.token_ids else self.token_ids)
        return f"Completion({text}, {len(self.token_ids)} tokens, {self.finish_reason!r})"


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


def completion(chunks: Sequence[Chunk], usage: Usage) -> Completion:
    """The completion of a request that has ended."""
    assert chunks[-1].finish_reason is not None, "the request has not ended"
    logprobs = [entry for chunk in chunks for entry in chunk.logprobs]
    return Completion(
        text="".join(chunk.text for chunk in chunks),
        token_ids=[id for chunk in chunks for id in chunk.token_ids],
        logprobs=logprobs or None,
        finish_reason=chunks[-1].finish_reason,
        usage=usage,
        stop_string=chunks[-1].stop_string,
    )
