"""Prompt lookup: what followed the same few tokens before, in the prompt or in the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jinfer.engine.scheduling.scheduler import Running
from jinfer.speculate.drafter import Drafter
from jinfer.speculate.token_tree import Tree, merged

LONGEST, SHORTEST = 4, 2  # tokens that have to be the same


@dataclass
class _Index:
    """Where runs of tokens of one sequence stand that have a token after them.

    Attributes:
        after: each run -> the places after its last two occurrences that go on differently.
        read: tokens that are in it.
    """

    after: dict[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)
    read: int = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Takes the tokens in that are new."""
        for place in range(self.read, len(tokens)):
            for length in range(SHORTEST, min(LONGEST, place) + 1):
                run = tuple(tokens[place - length : place])
                newest, other = self.after.get(run, (-1, -1))
                if newest >= 0 and tokens[newest] != tokens[place]:
                    other = newest
                self.after[run] = (place, other)
        self.read = len(tokens)

    def find(self, tokens: Sequence[int], most: int) -> list[Tree]:
        """What followed the longest run that the tokens end with."""
        for length in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            places = self.after.get(tuple(tokens[len(tokens) - length :]))
            if places is not None:
                source = f"ngram{length}"
                return [Tree.chain(_from(tokens, p, most), source) for p in places if p >= 0]
        return []


def _from(tokens: Sequence[int], place: int, count: int) -> list[int]:
    """The tokens from a place on; what reaches the end goes on with what it has given."""
    given = list(tokens[place : place + count])
    period = len(tokens) - place
    while len(given) < count:
        given.append(given[len(given) - period])
    return given


@dataclass(eq=False)
class Lookup(Drafter):
    """Drafts the newest continuation of the last tokens, and beside it another one.

    Attributes:
        branches: continuations of each sequence, at most.
    """

    branches: int = 1
    _indices: dict[int, _Index] = field(default_factory=dict)

    def draft(self, asked: Sequence[tuple[Running, int]]) -> list[Tree]:
        """As `Drafter.draft`."""
        trees = []
        for sequence, most in asked:
            index = self._indices.setdefault(sequence.request.id, _Index())
            index.add(sequence.tokens)
            trees.append(merged(index.find(sequence.tokens, most)[: self.branches]))
        return trees

    def end(self, sequence: Running) -> None:
        """As `Drafter.end`."""
        self._indices.pop(sequence.request.id, None)
