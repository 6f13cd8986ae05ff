"""Beam search: the running and finished hypotheses of a search, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Hypothesis:
    """A finished sequence.

    Attributes:
        tokens: tokens after the prompt.
        score: sum of the log-probabilities, over length ** length_penalty.
    """

    tokens: tuple[int, ...]
    score: float


@dataclass
class Beams:
    """The running sequences of one search, likeliest first, and those that have ended.

    Attributes:
        count: beams, running and finished each.
        length_penalty: above 1 favours longer sequences.
        end_ids: tokens that end a sequence.
        early_stopping: when a search ends that has found `count` sequences. True: at once. False:
            when the likeliest running sequence would not be better if it ended now. "never": when
            no continuation can be better.
        limit: maximum tokens of a sequence.
        sequences, scores: the running sequences.
        ended: the best `count` ended sequences, best first.
    """

    count: int
    length_penalty: float
    end_ids: frozenset[int]
    early_stopping: bool | Literal["never"] = False
    limit: int = 1
    sequences: list[tuple[int, ...]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    ended: list[Hypothesis] = field(default_factory=list)

    def __post_init__(self) -> None:
        # All beams begin as the same sequence: only one may be continued.
        self.sequences = [()] * self.count
        self.scores = [0.0] + [-np.inf] * (self.count - 1)

    def advance(
        self, beams: Sequence[int], tokens: Sequence[int], scores: Sequence[float]
    ) -> list[int]:
        """Continues the search by candidates, likeliest first.

        Args:
            beams, tokens, scores: each candidate's sequence, token and sum of log-probabilities; at
                least twice as many as beams, so that enough are left if some end.

        Returns:
            For each running sequence, the index of the sequence that it continues.
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
        """Whether the search has ended."""
        if len(self.ended) < self.count:
            return False
        if self.early_stopping is True:
            return True
        length = len(self.sequences[0])
        # Scores are negative: a larger divisor improves them.
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.limit
        return self.ended[-1].score >= self.scores[0] / length**self.length_penalty

    def ranked(self) -> list[Hypothesis]:
        """Returns the best `count` sequences, finished or not, best first."""
        for sequence, score in zip(self.sequences, self.scores, strict=True):
            self._end(sequence, score)
        return self.ended
