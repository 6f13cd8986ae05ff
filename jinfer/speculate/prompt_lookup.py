"""Prompt lookup (n-gram) drafts: what followed the same few tokens in the prompt or the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.speculate.drafter import Drafter
from jinfer.speculate.token_tree import TokenTree, merge_trees

LONGEST, SHORTEST = 4, 2  # lengths of n-grams


@dataclass
class _Index:
    """Index of the n-grams of one sequence.

    Attributes:
        after: n-gram -> positions after its last two occurrences that continue differently.
        read: number of tokens in the index.
    """

    after: dict[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)
    read: int = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Adds the new tokens."""
        for position in range(self.read, len(tokens)):
            for length in range(SHORTEST, min(LONGEST, position) + 1):
                ngram = tuple(tokens[position - length : position])
                newest, other = self.after.get(ngram, (-1, -1))
                if newest >= 0 and tokens[newest] != tokens[position]:
                    other = newest
                self.after[ngram] = (position, other)
        self.read = len(tokens)

    def find(self, tokens: Sequence[int], max_depth: int) -> list[TokenTree]:
        """Continuations of the longest n-gram that the tokens end with."""
        for length in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            positions = self.after.get(tuple(tokens[len(tokens) - length :]))
            if positions is not None:
                source = f"ngram{length}"
                return [
                    TokenTree.chain(_from(tokens, p, max_depth), source)
                    for p in positions
                    if p >= 0
                ]
        return []


def _from(tokens: Sequence[int], position: int, count: int) -> list[int]:
    """The tokens from a position on; past the end they repeat periodically."""
    continuation = list(tokens[position : position + count])
    period = len(tokens) - position
    while len(continuation) < count:
        continuation.append(continuation[len(continuation) - period])
    return continuation


@dataclass(eq=False)
class PromptLookup(Drafter):
    """Drafts the newest continuation of the last tokens, and perhaps a second one.

    Attributes:
        branches: maximum number of continuations.
    """

    branches: int = 1
    _indices: dict[int, _Index] = field(default_factory=dict)

    def draft(self, requests: Sequence[tuple[RunningSequence, int]]) -> list[TokenTree]:
        trees = []
        for sequence, max_depth in requests:
            index = self._indices.setdefault(sequence.request.id, _Index())
            index.add(sequence.tokens)
            trees.append(merge_trees(index.find(sequence.tokens, max_depth)[: self.branches]))
        return trees

    def forget(self, sequence: RunningSequence) -> None:
        self._indices.pop(sequence.request.id, None)
