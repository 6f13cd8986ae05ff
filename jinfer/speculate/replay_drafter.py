"""Replay drafter: drafts known answers with a given accuracy, for measurements and tests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.speculate.drafter import Drafter
from jinfer.speculate.token_tree import TokenTree


@dataclass(eq=False)
class ReplayDrafter(Drafter):
    """Drafts known answers; each token is replaced by a wrong one with some probability.

    Attributes:
        answers: prompt -> answer.
        accuracy: probability that a token is right, independent of the others.
        vocab: size of the vocabulary.
        seed: random seed; the outcome for a token depends on its position and on this alone.
    """

    answers: Mapping[tuple[int, ...], Sequence[int]]
    accuracy: float
    vocab: int
    seed: int = 0

    def draft(self, requests: Sequence[tuple[RunningSequence, int]]) -> list[TokenTree]:
        return [
            TokenTree.chain(self._chain(sequence, max_depth), "replay")
            for sequence, max_depth in requests
        ]

    def _chain(self, sequence: RunningSequence, max_depth: int) -> list[int]:
        prompt = sequence.request.prompt
        begin = len(sequence.tokens) - len(prompt)
        known = self.answers.get(prompt, ())[begin : begin + max_depth]
        return [
            token if self.right(prompt, begin + i) else (token + 1) % self.vocab
            for i, token in enumerate(known)
        ]

    def right(self, prompt: Sequence[int], position: int) -> bool:
        """Whether a token of an answer is drafted unchanged."""
        words = f"{self.seed} {position} {len(prompt)} {sum(prompt)}".encode()
        hashed = int.from_bytes(hashlib.blake2b(words, digest_size=7).digest(), "big")
        return hashed < self.accuracy * 2**56
