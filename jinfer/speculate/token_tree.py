"""Token trees: drafted tokens that may follow a sequence, with branches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from jinfer.engine.scheduling.sequence import ROOT as ROOT
from jinfer.engine.scheduling.sequence import DraftTree


@dataclass(frozen=True)
class TokenTree(DraftTree):
    """Drafted tokens; the first child of a parent is considered the likeliest.

    Attributes:
        drafted_ranks: rank of each node among the drafted children of its parent, of which some
            may have been removed; empty: none was removed.
    """

    drafted_ranks: tuple[int, ...] = ()

    @classmethod
    def chain(cls, tokens: Sequence[int], source: str) -> TokenTree:
        """A tree without branches."""
        count = len(tokens)
        return cls(tuple(tokens), tuple(range(-1, count - 1)), (source,) * count)

    def __len__(self) -> int:
        return len(self.tokens)

    def ranks(self) -> list[int]:
        """Rank of each node among the drafted children of its parent, from 0 on."""
        if self.drafted_ranks:
            return [*self.drafted_ranks]
        seen: dict[int, int] = {}
        ranks = []
        for parent in self.parents:
            ranks.append(seen.get(parent, 0))
            seen[parent] = ranks[-1] + 1
        return ranks

    def child(self, parent: int, token: int) -> int | None:
        """The child of a node with a given token."""
        for node, (above, child_token) in enumerate(zip(self.parents, self.tokens, strict=True)):
            if above == parent and child_token == token:
                return node
        return None

    def follow(self, tokens: Iterable[int]) -> list[int]:
        """The path of some tokens from the root, as far as the tree has it."""
        nodes: list[int] = []
        for token in tokens:
            child = self.child(nodes[-1] if nodes else ROOT, token)
            if child is None:
                break
            nodes.append(child)
        return nodes

    def subtree(self, nodes: Iterable[int]) -> TokenTree:
        """The tree of some nodes, whose parents must be among them; depth first."""
        children: dict[int, list[int]] = {}
        for node in nodes:
            children.setdefault(self.parents[node], []).append(node)
        order: list[int] = []
        stack = children.get(ROOT, [])[::-1]
        while stack:
            order.append(node := stack.pop())
            stack += children.get(node, [])[::-1]
        index, ranks = {ROOT: ROOT, **{node: i for i, node in enumerate(order)}}, self.ranks()
        return TokenTree(
            tuple(self.tokens[node] for node in order),
            tuple(index[self.parents[node]] for node in order),
            tuple(self.sources[node] for node in order),
            tuple(ranks[node] for node in order),
        )

    def without(self, tokens: Set[int]) -> TokenTree:
        """The tree without nodes of some tokens, and what follows them."""
        if tokens.isdisjoint(self.tokens):
            return self
        kept = {ROOT}
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if token not in tokens and parent in kept:
                kept.add(node)
        return self.subtree(kept - {ROOT})

    def paths(self) -> list[list[int]]:
        """The path from a child of the root to each leaf, the first leaf first."""
        inner = set(self.parents)
        paths = []
        for leaf in range(len(self)):
            if leaf not in inner:
                path = [leaf]
                while self.parents[path[-1]] != ROOT:
                    path.append(self.parents[path[-1]])
                paths.append(path[::-1])
        return paths


def merge_trees(trees: Sequence[TokenTree]) -> TokenTree:
    """The union of some trees; common nodes are where the first tree has them.

    The source of a common node names all its sources: such nodes are accepted more often.
    """
    tokens: list[int] = []
    parents: list[int] = []
    sources: list[str] = []
    known: dict[tuple[int, int], int] = {}
    for tree in trees:
        index = {ROOT: ROOT}
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            key = (index[parent], token)
            if key not in known:
                known[key] = len(tokens)
                tokens.append(token)
                parents.append(key[0])
                sources.append(tree.sources[node])
            elif tree.sources[node] not in sources[known[key]].split("+"):
                sources[known[key]] += f"+{tree.sources[node]}"
            index[node] = known[key]
    return TokenTree(tuple(tokens), tuple(parents), tuple(sources))
