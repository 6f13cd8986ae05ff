"""A tree of what answers had so far, this one and past ones: likely continuations by count."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jinfer.engine.scheduling.scheduler import Running
from jinfer.speculate.drafter import Drafter
from jinfer.speculate.token_tree import ROOT, Tree

_LONGEST, _SHORTEST = 8, 2  # tokens that have to be the same
_DEPTH = 16  # tokens of the longest run that is kept
_MOST_NODES = 100_000  # some 30 MB; with more of them it begins anew
_DRAFTED = 32  # nodes of a draft
_LIKELY = 0.05  # what is drafted at least


class _Node:
    """How often a run of tokens came, and what came after it."""

    __slots__ = ("after", "count")

    def __init__(self) -> None:
        self.count = 0
        self.after: dict[int, _Node] = {}


@dataclass
class _Reading:
    """A sequence while it is taken in: the runs that its end is in, longest first."""

    read: int
    open: list[_Node] = field(default_factory=list)


@dataclass(eq=False)
class Suffix(Drafter):
    """Drafts what followed the last tokens before, in any answer of this model."""

    _root: _Node = field(default_factory=_Node)
    _nodes: int = 0
    _readings: dict[int, _Reading] = field(default_factory=dict)

    def draft(self, asked: Sequence[tuple[Running, int]]) -> list[Tree]:
        """As `Drafter.draft`."""
        for sequence, _ in asked:
            self._take(sequence)
        return [self._tree(sequence.tokens, most) for sequence, most in asked]

    def end(self, sequence: Running) -> None:
        """As `Drafter.end`: what its answer had stays."""
        if sequence.request.id in self._readings:
            self._take(sequence)
            del self._readings[sequence.request.id]

    def _take(self, sequence: Running) -> None:
        """Takes the tokens in that are new; of a prompt the last ones, which an answer follows."""
        tokens = sequence.tokens
        begin = max(0, len(sequence.request.prompt) - _LONGEST)
        reading = self._readings.setdefault(sequence.request.id, _Reading(begin))
        for token in tokens[reading.read :]:
            if self._nodes > _MOST_NODES:
                self._root, self._nodes = _Node(), 0
                for other in self._readings.values():
                    other.open = []
            reading.open = [self._after(node, token) for node in (*reading.open, self._root)]
            reading.open = reading.open[-(_DEPTH - 1) :]
        reading.read = len(tokens)

    def _after(self, node: _Node, token: int) -> _Node:
        found = node.after.get(token)
        if found is None:
            found = node.after[token] = _Node()
            self._nodes += 1
        found.count += 1
        return found

    def _tree(self, tokens: Sequence[int], most: int) -> Tree:
        """The likeliest nodes below the longest run that is known."""
        for length in range(min(_LONGEST, len(tokens)), _SHORTEST - 1, -1):
            node = self._find(tokens[len(tokens) - length :])
            if node is not None and node.after:
                return _likeliest(node, most)
        return Tree()

    def _find(self, tokens: Iterable[int]) -> _Node | None:
        node: _Node | None = self._root
        for token in tokens:
            if node is None:
                break
            node = node.after.get(token)
        return node


def _likeliest(top: _Node, most: int) -> Tree:
    """Best first, where a child is as likely as it was frequent after its parent."""
    tokens: list[int] = []
    parents: list[int] = []
    heap: list[tuple[float, int, int, int, _Node]] = []
    order = 0

    def offer(node: _Node, place: int, value: float, depth: int) -> None:
        nonlocal order
        total = sum(child.count for child in node.after.values())
        for token, child in node.after.items():
            order += 1
            likely = value * child.count / total
            if likely >= _LIKELY and depth < most:
                entry = (-likely, depth + 1, order, token, child)
                heapq.heappush(heap, entry)
                above[order] = place

    above: dict[int, int] = {}
    offer(top, ROOT, 1.0, 0)
    while heap and len(tokens) < _DRAFTED:
        value, depth, which, token, node = heapq.heappop(heap)
        tokens.append(token)
        parents.append(above[which])
        offer(node, len(tokens) - 1, -value, depth)
    return Tree(tuple(tokens), tuple(parents), ("suffix",) * len(tokens))
