"""Draft length and back-off: how much to draft and when, from acceptance rates and times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jinfer.speculate.token_tree import ROOT, TokenTree

_MEMORY = 32  # window of a running mean
_DEEPEST, _RANKS = 8, 4  # deeper levels, and later siblings, share their means
_FIRST, _OTHER = 0.6, 0.15  # prior acceptance rate of a first child, and of others
_TRUST = 2.0  # weight of the prior, in observations
_EACH = 0.06  # assumed time of another token in a batch, relative to a step
_WORTH = 1.02  # speed-up over plain decoding from which on drafts are used


@dataclass
class RunningMean:
    """A running mean of recent values.

    Attributes:
        value: the mean.
        count: number of values in it, at most `_MEMORY`.
        total, sum: number and sum of all values so far.
    """

    value: float
    count: float = 0.0
    total: int = 0
    sum: float = 0.0

    def add(self, new: float) -> None:
        """Adds a value."""
        self.count = min(self.count + 1.0, _MEMORY)
        self.value += (new - self.value) / self.count
        self.total, self.sum = self.total + 1, self.sum + new


@dataclass
class DraftLength:
    """Selects the likeliest nodes of draft trees; how many depends on the cost of batches.

    Attributes:
        nodes: fixed number of verified tokens of a tree, root included; None: as it pays.
        acceptance: acceptance rate of nodes whose parent was accepted, by (source, depth, rank).
        costs: seconds of a verifying call, by the size of its batch.
        plain: seconds of a step without drafts, by the number of sequences.
    """

    nodes: int | None = None
    acceptance: dict[tuple[str, int, int], RunningMean] = field(default_factory=dict)
    costs: dict[int, RunningMean] = field(default_factory=dict)
    plain: dict[int, RunningMean] = field(default_factory=dict)

    def acceptance_rate(self, source: str, depth: int, rank: int) -> float:
        """Estimated acceptance rate of a node whose parent is accepted."""
        known = self.acceptance.get((source, min(depth, _DEEPEST), min(rank, _RANKS)))
        guess = _OTHER if rank else _FIRST
        if 1 < depth <= _DEEPEST and not rank:
            # The prior is the rate of the level above, or deep levels would never be tried.
            guess = self.acceptance_rate(source, depth - 1, 0)
        if known is None:
            return guess
        return (known.value * known.count + guess * _TRUST) / (known.count + _TRUST)

    def values(self, tree: TokenTree) -> list[float]:
        """Probability that each node is accepted; a parent's is never below its children's."""
        values: list[float] = []
        nodes = zip(tree.parents, tree.sources, tree.depths(), tree.ranks(), strict=True)
        for parent, source, depth, rank in nodes:
            above = 1.0 if parent == ROOT else values[parent]
            values.append(above * self.acceptance_rate(source, depth, rank))
        return values

    def record(self, tree: TokenTree, accepted: Sequence[int]) -> None:
        """Updates acceptance rates by the accepted nodes of a tree, a path from the root."""
        reached = {ROOT, *accepted}
        for node, (depth, rank) in enumerate(zip(tree.depths(), tree.ranks(), strict=True)):
            if tree.parents[node] in reached:
                key = (tree.sources[node], min(depth, _DEEPEST), min(rank, _RANKS))
                self.acceptance.setdefault(key, RunningMean(0.0)).add(float(node in reached))

    def cost(self, size: int, sequences: int) -> float:
        """Estimated seconds of a call that verifies a batch of some size."""
        if (known := self.costs.get(size)) is not None:
            return known.value
        return self.step(sequences) * (1.0 + _EACH * max(0, size - sequences))

    def knows(self, sequences: int) -> bool:
        """Whether plain steps of so many sequences were timed more than once."""
        return sequences in self.plain and self.plain[sequences].total > 1

    def step(self, sequences: int) -> float:
        """Estimated seconds of a step without drafts."""
        if (known := self.plain.get(sequences)) is not None:
            return known.value
        return min((mean.value for mean in self.costs.values()), default=1.0)

    def select(
        self,
        trees: Sequence[TokenTree],
        sequences: int,
        sizes: Sequence[int],
        probing: bool = False,
    ) -> list[TokenTree]:
        """The nodes to verify in one call; none if plain steps are faster.

        Args:
            trees: drafts of the sequences that may have one.
            sequences: number of all sequences in the call; those without a draft get one token.
            sizes: available batch sizes, ascending; the last is above `sequences`.
            probing: verify at least a small batch, even if its estimated value is low.
        """
        if self.nodes is not None:
            limit = min(self.nodes - 1, max(0, (sizes[-1] - sequences) // max(1, len(trees))))
            return [tree.subtree(self._best([tree], limit)[0]) for tree in trees]
        size = self.best_size(trees, sequences, sizes)
        if size is None and probing:
            size = next(size for size in sizes if size > sequences)
        if size is None:
            return [TokenTree() for _ in trees]
        chosen = self._best(trees, size - sequences)
        return [tree.subtree(nodes) for tree, nodes in zip(trees, chosen, strict=True)]

    def best_size(
        self, trees: Sequence[TokenTree], sequences: int, sizes: Sequence[int]
    ) -> int | None:
        """The batch size with most expected tokens a second; None: a plain step is faster."""
        values = sorted((v for tree in trees for v in self.values(tree)), reverse=True)
        best, chosen = _WORTH * sequences / self.step(sequences), None
        for size in sizes:
            gained = sequences + sum(values[: max(0, size - sequences)])
            if size > sequences and gained / self.cost(size, sequences) > best:
                best, chosen = gained / self.cost(size, sequences), size
            if size - sequences >= len(values):
                break
        return chosen

    def draft_depth(
        self,
        source: str,
        seconds: float,
        drafted: int,
        sequences: int,
        sizes: Sequence[int],
        probing: bool,
    ) -> int:
        """How many levels a draft model drafts; 0 if it is not worth its time.

        Args:
            source: draft source of its nodes.
            seconds: time of a level.
            drafted: number of sequences that it drafts for.
            sequences, sizes: as of `select`.
            probing: draft some levels, even if their estimated value is low.
        """
        if self.nodes is not None:
            return min(self.nodes - 1, _DEEPEST)
        best, depth = _WORTH * sequences / self.step(sequences), 3 if probing else 0
        gained, value = float(sequences), 1.0
        for level in range(1, _DEEPEST + 1):
            size = next((n for n in sizes if n >= sequences + level * drafted), None)
            if size is None:
                break
            value *= self.acceptance_rate(source, level, 0)
            gained += drafted * value
            rate = gained / (self.cost(size, sequences) + level * seconds)
            if rate > best:
                best, depth = rate, level
        return depth

    def _best(self, trees: Sequence[TokenTree], limit: int) -> list[list[int]]:
        """The likeliest nodes over all trees, by tree, likeliest first."""
        ranked = sorted(
            (-value, node, index)
            for index, tree in enumerate(trees)
            for node, value in enumerate(self.values(tree))
        )
        chosen: list[list[int]] = [[] for _ in trees]
        for _, node, index in ranked[:limit]:
            chosen[index].append(node)
        return chosen

    def tried(self) -> Mapping[tuple[str, int, int], tuple[int, int]]:
        """(accepted, total) nodes whose parents were accepted, by (source, depth, rank).

        The last depth and the last rank include all beyond.
        """
        return {key: (round(m.sum), m.total) for key, m in sorted(self.acceptance.items())}


_FIRST_REST, _LONGER, _LONGEST_REST = 1, 4, 256  # calls; each rest is `_LONGER` times the last
_MISSES, _AFTER_MISSES = 3, 8  # calls without a proposal, and the rest in calls after them
_RAREST = 8  # calls between two observations during a rest, at most


@dataclass
class Backoff:
    """Decides whether the next call drafts.

    Attributes:
        probing: the next draft is verified even if its estimated value is low: after a rest the
            estimate is old.
    """

    probing: bool = False
    _rest: int = 0
    _next: int = _FIRST_REST
    _missed: int = 0
    _gap: int = 1
    _unwatched: int = 0

    @property
    def resting(self) -> bool:
        """Whether calls do not draft, and so need not wait for each other's tokens."""
        return self._rest > 0

    def rest(self) -> bool:
        """Whether the next call rests; counts it."""
        if not self._rest:
            return False
        self._rest -= 1
        self.probing = self._rest == 0
        return True

    def steps(self, limit: int) -> int:
        """Steps of a call without drafts: few if the last calls had drafts."""
        return limit if self._rest else min(limit, 1 << self._missed)

    def watches(self, *, new: bool) -> bool:
        """During a rest: whether to observe now which drafts would have been accepted.

        Args:
            new: the sequence is new; the rest is due to others.
        """
        self._unwatched += 1
        return new or self._unwatched >= self._gap

    def watched(self, *, right: bool) -> None:
        """Records an observation; the next is soon if a draft was right, else later."""
        self._unwatched, self._gap = 0, 1 if right else min(2 * self._gap, _RAREST)

    def missed(self, *, rests: bool) -> None:
        """Records that no source had a proposal; after some misses there may be a rest."""
        self._missed += 1
        if self._missed > _MISSES:
            self._missed = _MISSES
            if rests:
                self._begin(max(self._next, _AFTER_MISSES))
        self.probing = False

    def useless(self) -> None:
        """Records proposals that did not pay; a rest begins."""
        self._begin(self._next)
        self.probing = False

    def drafted(self) -> None:
        """Records a draft that is verified; unless probing, it was worth it."""
        self._next = self._next if self.probing else _FIRST_REST
        self._rest = self._missed = 0
        self.probing = False

    def _begin(self, calls: int) -> None:
        self._rest, self._next = calls, min(_LONGER * calls, _LONGEST_REST)
