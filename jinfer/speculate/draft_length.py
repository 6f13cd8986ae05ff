"""How much to draft: what drafts are worth by how often they were right, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jinfer.speculate.token_tree import ROOT, Tree

_MEMORY = 32  # tries that a mean looks back on
_DEEPEST, _RANKS = 8, 4  # beyond, levels and siblings share their means
_FIRST, _OTHER = 0.6, 0.15  # chance of a first child and of others, before anything is known
_TRUST = 2.0  # how many tries that first guess is worth
_EACH = 0.06  # of the time of one token, that another one takes, before anything is measured
_WORTH = 1.02  # times plain decoding, from which on drafts are worth it


@dataclass
class Mean:
    """A mean of what came lately.

    Attributes:
        value: as it is.
        count: of what it is the mean of, at most `_MEMORY`.
        total, sum: of all values there were.
    """

    value: float
    count: float = 0.0
    total: int = 0
    sum: float = 0.0

    def add(self, new: float) -> None:
        """Takes another value in."""
        self.count = min(self.count + 1.0, _MEMORY)
        self.value += (new - self.value) / self.count
        self.total, self.sum = self.total + 1, self.sum + new


@dataclass
class Control:
    """Chooses nodes by how likely they are, and how many of them by what batches cost.

    Attributes:
        nodes: tokens of a tree, the root included, that are verified whatever they cost; None: as
            it pays.
        chances: by (source, depth, rank): how often a node was right whose parent was.
        costs: seconds of a call by the size of its batch.
        plain: seconds of a step without drafts, by the number of sequences.
    """

    nodes: int | None = None
    chances: dict[tuple[str, int, int], Mean] = field(default_factory=dict)
    costs: dict[int, Mean] = field(default_factory=dict)
    plain: dict[int, Mean] = field(default_factory=dict)

    def chance(self, source: str, depth: int, rank: int) -> float:
        """How likely a node is right if its parent is."""
        known = self.chances.get((source, min(depth, _DEEPEST), min(rank, _RANKS)))
        guess = _OTHER if rank else _FIRST
        if 1 < depth <= _DEEPEST and not rank:
            # Where nobody has been yet it is as it is before, or nobody would ever go there.
            guess = self.chance(source, depth - 1, 0)
        if known is None:
            return guess
        return (known.value * known.count + guess * _TRUST) / (known.count + _TRUST)

    def values(self, tree: Tree) -> list[float]:
        """How likely each node is to be reached; a parent's is never below its children's."""
        values: list[float] = []
        each = zip(tree.parents, tree.sources, tree.depths(), tree.ranks(), strict=True)
        for parent, source, depth, rank in each:
            above = 1.0 if parent == ROOT else values[parent]
            values.append(above * self.chance(source, depth, rank))
        return values

    def learn(self, tree: Tree, accepted: Sequence[int]) -> None:
        """Takes in which nodes of a tree were right: a path from a child of the root."""
        reached = {ROOT, *accepted}
        for node, (depth, rank) in enumerate(zip(tree.depths(), tree.ranks(), strict=True)):
            if tree.parents[node] in reached:
                key = (tree.sources[node], min(depth, _DEEPEST), min(rank, _RANKS))
                self.chances.setdefault(key, Mean(0.0)).add(float(node in reached))

    def cost(self, size: int, sequences: int) -> float:
        """Seconds of a call that verifies a batch of some size, as far as is known."""
        if (known := self.costs.get(size)) is not None:
            return known.value
        return self.step(sequences) * (1.0 + _EACH * max(0, size - sequences))

    def knows(self, sequences: int) -> bool:
        """Whether what a plain step takes was measured more than once."""
        return sequences in self.plain and self.plain[sequences].total > 1

    def step(self, sequences: int) -> float:
        """Seconds of a step without drafts."""
        if (known := self.plain.get(sequences)) is not None:
            return known.value
        return min((mean.value for mean in self.costs.values()), default=1.0)

    def choose(
        self, trees: Sequence[Tree], sequences: int, sizes: Sequence[int], probing: bool = False
    ) -> list[Tree]:
        """What of some trees is to be verified in one call; nothing where plain steps are faster.

        Args:
            trees: one for each sequence that may have one.
            sequences: all that get tokens in this call, the others one each.
            sizes: of batches that can be had now, rising; the last is above `sequences`.
            probing: a small batch is verified whatever it seems to be worth.
        """
        if self.nodes is not None:
            most = min(self.nodes - 1, max(0, (sizes[-1] - sequences) // max(1, len(trees))))
            return [tree.only(self._best([tree], most)[0]) for tree in trees]
        size = self.best_size(trees, sequences, sizes)
        if size is None and probing:
            size = next(size for size in sizes if size > sequences)
        if size is None:
            return [Tree() for _ in trees]
        chosen = self._best(trees, size - sequences)
        return [tree.only(nodes) for tree, nodes in zip(trees, chosen, strict=True)]

    def best_size(self, trees: Sequence[Tree], sequences: int, sizes: Sequence[int]) -> int | None:
        """The size of the batch that gives most tokens a second; None: a plain step does."""
        values = sorted((v for tree in trees for v in self.values(tree)), reverse=True)
        best, found = _WORTH * sequences / self.step(sequences), None
        for size in sizes:
            gained = sequences + sum(values[: max(0, size - sequences)])
            if size > sequences and gained / self.cost(size, sequences) > best:
                best, found = gained / self.cost(size, sequences), size
            if size - sequences >= len(values):
                break
        return found

    def levels(
        self,
        source: str,
        seconds: float,
        drafted: int,
        sequences: int,
        sizes: Sequence[int],
        probing: bool,
    ) -> int:
        """How far ahead a draft model is to look; 0 where it is not worth its time.

        Args:
            source: what its nodes are said to be from.
            seconds: that it takes for each level.
            drafted: sequences that it drafts for, of all.
        """
        if self.nodes is not None:
            return min(self.nodes - 1, _DEEPEST)
        best, found = _WORTH * sequences / self.step(sequences), 3 if probing else 0
        gained, value = float(sequences), 1.0
        for level in range(1, _DEEPEST + 1):
            size = next((n for n in sizes if n >= sequences + level * drafted), None)
            if size is None:
                break
            value *= self.chance(source, level, 0)
            gained += drafted * value
            rate = gained / (self.cost(size, sequences) + level * seconds)
            if rate > best:
                best, found = rate, level
        return found

    def _best(self, trees: Sequence[Tree], most: int) -> list[list[int]]:
        """The likeliest nodes of all trees together, of each tree the likeliest first."""
        ranked = sorted(
            (-value, node, index)
            for index, tree in enumerate(trees)
            for node, value in enumerate(self.values(tree))
        )
        chosen: list[list[int]] = [[] for _ in trees]
        for _, node, index in ranked[:most]:
            chosen[index].append(node)
        return chosen

    def tried(self) -> Mapping[tuple[str, int, int], tuple[int, int]]:
        """How often nodes were right whose parents were, and of how many, by (source, depth, rank).

        The last depth and the last rank stand for all beyond.
        """
        return {key: (round(m.sum), m.total) for key, m in sorted(self.chances.items())}
