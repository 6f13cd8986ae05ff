"""Completions: the answer of a request, its usage and log-probabilities, and how they are shown."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

import numpy as np

from jinfer.engine.output.draft_trace import Steps
from jinfer.engine.requests import FinishReason
from jinfer.sampling.request_errors import RequestError
from jinfer.sampling.sampling_params import SamplingParams

_SHORT = reprlib.Repr(maxstring=60, maxlist=8)
_MAX_SHOWN = 20_000  # characters, or tokens, shown of an answer
_HINT = "the likeliest at a token: point at it, or go to it with Tab and arrows"


@dataclass(frozen=True)
class TokenLogprob:
    """A token and how likely the model found it.

    Attributes:
        id, text: the token.
        logprob: its natural log-probability, before temperature and filters.
        top: the likeliest tokens at its place, likeliest first.
    """

    id: int
    text: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


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


class Completions(list[Completion]):
    """A list of completions, with a table and an HTML view for notebooks."""

    def to_pandas(self) -> Any:
        """A row for each answer: text, tokens, how it ended, seconds.

        Raises:
            RequestError: pandas is not installed.
        """
        usage = [answer.usage for answer in self]
        return data_frame(
            {
                "text": [answer.text for answer in self],
                "finish_reason": [answer.finish_reason for answer in self],
                "prompt_tokens": [one.prompt_tokens for one in usage],
                "completion_tokens": [one.completion_tokens for one in usage],
                "prefill_seconds": [one.prefill_seconds for one in usage],
                "decode_seconds": [one.decode_seconds for one in usage],
            }
        )

    def _repr_html_(self) -> str:
        from jinfer.html.completions_html import completions_html

        return completions_html(self)


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


def next_piece(pieces: SimpleQueue[Any]) -> Chunk | Usage:
    """The next chunk of an answer, or its usage at the end. Raises the error that ended it."""
    piece = pieces.get()
    if isinstance(piece, BaseException):
        raise piece
    return piece


def collect(pieces: SimpleQueue[Any]) -> Completion:
    """Waits for all chunks of an answer."""
    chunks: list[Chunk] = []
    while not isinstance(piece := next_piece(pieces), Usage):
        chunks.append(piece)
    return completion(chunks, piece)


def best_of(answers: list[Completion], params: SamplingParams) -> list[Completion]:
    """The `n` answers of highest log-probability per token, if there are more; else all."""
    if len(answers) <= params.n:
        return answers

    def likelihood(answer: Completion) -> float:
        logprobs = [entry.logprob for entry in answer.logprobs or ()]
        return sum(logprobs) / max(1, len(logprobs))

    chosen = sorted(answers, key=likelihood, reverse=True)[: params.n]
    if params.logprobs is None:
        return [replace(answer, logprobs=None) for answer in chosen]
    return chosen


def import_pandas() -> Any:
    """The module. Raises `RequestError` where it is not installed."""
    try:
        import pandas  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise RequestError("to_pandas needs pandas: pip install pandas") from None
    return pandas


def data_frame(columns: Mapping[str, Any]) -> Any:
    """A pandas.DataFrame of columns by name. Raises `RequestError` without pandas."""
    return import_pandas().DataFrame(dict(columns))
