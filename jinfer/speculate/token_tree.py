"""Trees of tokens that may follow a sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ROOT = -1  # the parent of what follows the sequence's last token


@dataclass(frozen=True)
class Tree:
    """Tokens that may follow a sequence, parents before their children.

    Among children of one parent the first is thought the likeliest.

    Attributes:
        tokens: of each node.
        parents: by their place; `ROOT`: the sequence's last token.
        sources: who drafted each node.
        drafted: the place among its parent's children that each node was drafted at, where some of
            them were left out since; none: as they stand.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    drafted: tuple[int, ...] = ()

    @classmethod
    def chain(cls, tokens: Sequence[int], source: str) -> Tree:
        """One token after the other."""
        count = len(tokens)
        return cls(tuple(tokens), tuple(range(-1, count - 1)), (source,) * count)

    def __len__(self) -> int:
        return len(self.tokens)

    def depths(self) -> list[int]:
        """How many tokens after the sequence's last one each node stands, from 1 on."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    def ranks(self) -> list[int]:
        """How many children of the same parent were drafted before each node."""
        if self.drafted:
            return [*self.drafted]
        seen: dict[int, int] = {}
        ranks = []
        for parent in self.parents:
            ranks.append(seen.get(parent, 0))
            seen[parent] = ranks[-1] + 1
        return ranks

    def child(self, parent: int, token: int) -> int | None:
        """The child of a node that holds a token."""
        for node, (above, own) in enumerate(zip(self.parents, self.tokens, strict=True)):
            if above == parent and own == token:
                return node
        return None

    def walk(self, tokens: Iterable[int]) -> list[int]:
        """The nodes that a text goes through, as far as it stays in the tree."""
        nodes: list[int] = []
        for token in tokens:
            found = self.child(nodes[-1] if nodes else ROOT, token)
            if found is None:
                break
            nodes.append(found)
        return nodes

    def only(self, nodes: Iterable[int]) -> Tree:
        """Some nodes, whose parents have to be among them; depth first, children as given."""
        children: dict[int, list[int]] = {}
        for node in nodes:
            children.setdefault(self.parents[node], []).append(node)
        order: list[int] = []
        stack = children.get(ROOT, [])[::-1]
        while stack:
            order.append(node := stack.pop())
            stack += children.get(node, [])[::-1]
        place, ranks = {ROOT: ROOT, **{node: i for i, node in enumerate(order)}}, self.ranks()
        return Tree(
            tuple(self.tokens[node] for node in order),
            tuple(place[self.parents[node]] for node in order),
            tuple(self.sources[node] for node in order),
            tuple(ranks[node] for node in order),
        )

    def paths(self) -> list[list[int]]:
        """From a child of the root to each leaf, the first leaf first."""
        inner = set(self.parents)
        paths = []
        for leaf in range(len(self)):
            if leaf not in inner:
                path = [leaf]
                while self.parents[path[-1]] != ROOT:
                    path.append(self.parents[path[-1]])
                paths.append(path[::-1])
        return paths


def merged(trees: Sequence[Tree]) -> Tree:
    """All nodes of some trees; what several have stands once, where the first has it.

    Its source names all of them: what several propose is right more often.
    """
    tokens: list[int] = []
    parents: list[int] = []
    sources: list[str] = []
    known: dict[tuple[int, int], int] = {}
    for tree in trees:
        place = {ROOT: ROOT}
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            key = (place[parent], token)
            if key not in known:
                known[key] = len(tokens)
                tokens.append(token)
                parents.append(key[0])
                sources.append(tree.sources[node])
            elif tree.sources[node] not in sources[known[key]].split("+"):
                sources[known[key]] += f"+{tree.sources[node]}"
            place[node] = known[key]
    return Tree(tuple(tokens), tuple(parents), tuple(sources))
