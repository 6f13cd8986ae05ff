"""A drafter that knows the answers and errs as often as asked, to measure and to test by."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jinfer.engine.scheduling.scheduler import Running
from jinfer.speculate.drafter import Drafter
from jinfer.speculate.token_tree import Tree


@dataclass(eq=False)
class Replay(Drafter):
    """Drafts the tokens of answers that are known, each with a chance of being another one.

    Attributes:
        answers: prompt -> answer.
        accuracy: the chance of each token to be right, whatever those before are.
        vocab: tokens there are.
        seed: of chance; a token's depends on its place and on this alone.
    """

    answers: Mapping[tuple[int, ...], Sequence[int]]
    accuracy: float
    vocab: int
    seed: int = 0

    def draft(self, asked: Sequence[tuple[Running, int]]) -> list[Tree]:
        """As `Drafter.draft`."""
        return [Tree.chain(self._chain(sequence, most), "replay") for sequence, most in asked]

    def _chain(self, sequence: Running, most: int) -> list[int]:
        prompt = sequence.request.prompt
        begin = len(sequence.tokens) - len(prompt)
        known = self.answers.get(prompt, ())[begin : begin + most]
        return [
            token if self.right(prompt, begin + i) else (token + 1) % self.vocab
            for i, token in enumerate(known)
        ]

    def right(self, prompt: Sequence[int], place: int) -> bool:
        """Whether a token of an answer is drafted as it is."""
        words = f"{self.seed} {place} {len(prompt)} {sum(prompt)}".encode()
        hashed = int.from_bytes(hashlib.blake2b(words, digest_size=7).digest(), "big")
        return hashed < self.accuracy * 2**56
