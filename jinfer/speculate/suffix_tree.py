"""Suffix tree drafts: continuations by frequency in this answer and in earlier ones."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.speculate.drafter import Drafter
from jinfer.speculate.token_tree import ROOT, TokenTree

_LONGEST, _SHORTEST = 8, 2  # lengths of matched suffixes
_DEPTH = 16  # depth of the tree, in tokens
_MOST_NODES = 100_000  # some 30 MB; a fuller tree is emptied
_DRAFTED = 32  # nodes of a draft, at most
_LIKELY = 0.05  # minimum probability of a drafted node


class _Node:
    """Count of a run of tokens, and the nodes of its continuations."""

    __slots__ = ("after", "count")

    def __init__(self) -> None:
        self.count = 0
        self.after: dict[int, _Node] = {}


@dataclass
class _Reading:
    """How much of a sequence is in the tree, and the nodes of its suffixes, longest first."""

    read: int
    open: list[_Node] = field(default_factory=list)


@dataclass(eq=False)
class SuffixDrafter(Drafter):
    """Drafts what followed the last tokens in any answer of this model so far."""

    _root: _Node = field(default_factory=_Node)
    _nodes: int = 0
    _readings: dict[int, _Reading] = field(default_factory=dict)

    def draft(self, requests: Sequence[tuple[RunningSequence, int]]) -> list[TokenTree]:
        for sequence, _ in requests:
            self._add(sequence)
        return [self._tree(sequence.tokens, max_depth) for sequence, max_depth in requests]

    def forget(self, sequence: RunningSequence) -> None:
        """As `Drafter.forget`; the answer's tokens stay in the tree."""
        if sequence.request.id in self._readings:
            self._add(sequence)
            del self._readings[sequence.request.id]

    def _add(self, sequence: RunningSequence) -> None:
        """Adds new tokens of an answer, and the last tokens of its prompt."""
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
        child = node.after.get(token)
        if child is None:
            child = node.after[token] = _Node()
            self._nodes += 1
        child.count += 1
        return child

    def _tree(self, tokens: Sequence[int], max_depth: int) -> TokenTree:
        """The likeliest continuations of the longest known suffix."""
        for length in range(min(_LONGEST, len(tokens)), _SHORTEST - 1, -1):
            node = self._find(tokens[len(tokens) - length :])
            if node is not None and node.after:
                return _likeliest(node, max_depth)
        return TokenTree()

    def _find(self, tokens: Iterable[int]) -> _Node | None:
        node: _Node | None = self._root
        for token in tokens:
            if node is None:
                break
            node = node.after.get(token)
        return node


def _likeliest(top: _Node, max_depth: int) -> TokenTree:
    """The likeliest nodes below one, best first; probabilities are relative frequencies."""
    tokens: list[int] = []
    parents: list[int] = []
    heap: list[tuple[float, int, int, int, _Node]] = []
    order = 0

    def offer(node: _Node, parent: int, value: float, depth: int) -> None:
        nonlocal order
        total = sum(child.count for child in node.after.values())
        for token, child in node.after.items():
            order += 1
            likely = value * child.count / total
            if likely >= _LIKELY and depth < max_depth:
                entry = (-likely, depth + 1, order, token, child)
                heapq.heappush(heap, entry)
                above[order] = parent

    above: dict[int, int] = {}
    offer(top, ROOT, 1.0, 0)
    while heap and len(tokens) < _DRAFTED:
        value, depth, which, token, node = heapq.heappop(heap)
        tokens.append(token)
        parents.append(above[which])
        offer(node, len(tokens) - 1, -value, depth)
    return TokenTree(tuple(tokens), tuple(parents), ("suffix",) * len(tokens))
