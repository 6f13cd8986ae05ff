"""Beam search: the sequences that are likeliest as a whole, several kept at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jinfer.engine.engine import Engine, padded
from jinfer.engine.programs import Shape
from jinfer.engine.requests import Request
from jinfer.engine.steps import empty_row, empty_state
from jinfer.ops import cache as kv_cache


@dataclass(frozen=True)
class Hypothesis:
    """A finished sequence.

    Attributes:
        tokens: what follows the prompt.
        score: sum of the log-probabilities, over length ** length_penalty.
    """

    tokens: tuple[int, ...]
    score: float


@dataclass
class Beams:
    """The running sequences of one search, likeliest first, and those that have ended.

    Attributes:
        count: how many are kept.
        length_penalty: above 1 favours longer sequences.
        end_ids: tokens that end a sequence.
        sequences, scores: of the running ones.
        ended: the best `count` of those that have ended, best first.
    """

    count: int
    length_penalty: float
    end_ids: frozenset[int]
    sequences: list[tuple[int, ...]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    ended: list[Hypothesis] = field(default_factory=list)

    def __post_init__(self) -> None:
        # All begin as the same sequence: only one of them may be continued.
        self.sequences = [()] * self.count
        self.scores = [0.0] + [-np.inf] * (self.count - 1)

    def advance(
        self, beams: Sequence[int], tokens: Sequence[int], scores: Sequence[float]
    ) -> list[int]:
        """Continues the search by candidates, likeliest first.

        Args:
            beams, tokens, scores: which sequence, by which token, with which sum; at least
                twice as many as are kept, so that enough are left if some end here.

        Returns:
            For each running sequence, which one it continues.
        """
        parents: list[int] = []
        sequences: list[tuple[int, ...]] = []
        sums: list[float] = []
        for rank, (beam, token, score) in enumerate(zip(beams, tokens, scores, strict=True)):
            sequence = (*self.sequences[beam], token)
            if token in self.end_ids:
                if rank < self.count:
                    self._end(sequence, score)
                continue
            parents.append(beam)
            sequences.append(sequence)
            sums.append(score)
            if len(parents) == self.count:
                break
        self.sequences, self.scores = sequences, sums
        return parents

    def _end(self, sequence: tuple[int, ...], score: float) -> None:
        hypothesis = Hypothesis(sequence, score / len(sequence) ** self.length_penalty)
        self.ended = sorted([*self.ended, hypothesis], key=lambda h: -h.score)[: self.count]

    @property
    def done(self) -> bool:
        """Whether no running sequence can still become better than all that have ended."""
        if len(self.ended) < self.count:
            return False
        length = len(self.sequences[0])
        return self.ended[-1].score >= self.scores[0] / length**self.length_penalty

    def best(self) -> Hypothesis:
        """The best sequence, ended or not."""
        for sequence, score in zip(self.sequences, self.scores, strict=True):
            self._end(sequence, score)
        return self.ended[0]


def beam_search(engine: Engine, request: Request) -> Hypothesis:
    """The likeliest continuation that a search with `sampling.beams` beams finds.

    The sequences are rows of a cache of their own; a step first brings the rows into the order
    of the sequences they belong to, then computes all of them.
    """
    sampling, prompt = request.sampling, request.prompt
    count = sampling.beams
    length, encoded = engine.padded_length(request.limit), engine.padded_encoder(request.encoder)
    programs, leaves = engine.programs, engine.leaves
    cache = kv_cache.empty(programs.model.caches, count, length, encoded, programs.kv_cache)
    if encoded:
        fill = programs.get(Shape("fill", count, length, encoded, encoded))
        texts, lengths = padded([request.encoder], encoded)
        cache = fill(leaves, cache, texts, lengths, np.int32(0))
    vocab = programs.model.vocab
    state = empty_state(count, length, vocab)
    state = state._replace(encoded=state.encoded.at[0].set(len(request.encoder)))
    # The last token of the prompt is the first step's: it takes part in the search.
    for start, tokens, size in engine.chunks(0, len(prompt) - 1, length):
        prefill = programs.get(Shape("prefill", count, length, encoded, size))
        chunk, _ = padded([prompt[start : start + tokens]], size)
        at = (np.int32(start), np.int32(tokens), np.int32(len(prompt)), np.int32(0))
        cache, state, _ = prefill(leaves, cache, state, chunk[0], *at, empty_row(vocab))
    step = programs.get(Shape("beam", count, length, encoded))
    ends = frozenset() if sampling.ignore_eos else frozenset(request.end_ids)
    beams = Beams(count, sampling.length_penalty, ends | set(sampling.stop_token_ids))
    parents, last = [0] * count, [prompt[-1]] * count
    seen = np.full(count, len(request.encoder), np.int32)
    for position in range(len(prompt) - 1, request.limit - 1):
        cache, rows, tokens_, scores = step(
            leaves,
            cache,
            np.array(parents, np.int32),
            np.array(last, np.int32),
            np.int32(position),
            seen,
            np.array(beams.scores, np.float32),
        )
        found = (np.asarray(part).tolist() for part in (rows, tokens_, scores))
        parents = beams.advance(*found)
        if beams.done:
            break
        last = [sequence[-1] for sequence in beams.sequences]
    return beams.best()
