"""Completions collected from the chunks of an answer; best-of selection."""

from __future__ import annotations

from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from jinfer.engine.output.data_frames import data_frame
from jinfer.engine.output.generation import Chunk, Completion, Usage, completion
from jinfer.sampling.sampling_params import SamplingParams


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
