"""Answers put together from their pieces."""

from __future__ import annotations

from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from jinfer.engine.output.generation import Chunk, Completion, Usage, completion
from jinfer.sampling.sampling_params import SamplingParams


class Completions(list[Completion]):
    """Answers, as a notebook shows them."""

    def _repr_html_(self) -> str:
        from jinfer.engine.output.completions_html import completions_html

        return completions_html(self)


def taken(pieces: SimpleQueue[Any]) -> Chunk | Usage:
    """The next piece of an answer. Raises what ended it."""
    piece = pieces.get()
    if isinstance(piece, BaseException):
        raise piece
    return piece


def whole(pieces: SimpleQueue[Any]) -> Completion:
    """All pieces of an answer in one."""
    chunks: list[Chunk] = []
    while not isinstance(piece := taken(pieces), Usage):
        chunks.append(piece)
    return completion(chunks, piece)


def best(answers: list[Completion], params: SamplingParams) -> list[Completion]:
    """The `n` likeliest answers by log-probability per token, of more than that; else all."""
    if len(answers) <= params.n:
        return answers

    def likelihood(answer: Completion) -> float:
        logprobs = [entry.logprob for entry in answer.logprobs or ()]
        return sum(logprobs) / max(1, len(logprobs))

    chosen = sorted(answers, key=likelihood, reverse=True)[: params.n]
    if params.logprobs is None:
        return [replace(answer, logprobs=None) for answer in chosen]
    return chosen
