"""Trees of some sequences laid out as one flat batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jinfer.engine.runner.verify import Nodes
from jinfer.nn.forward_context import Copies
from jinfer.speculate.token_tree import ROOT, Tree

PLACES = 4  # for each token of a batch: the branches that it may stand in, on the average


@dataclass(frozen=True)
class Planted:
    """A tree after a sequence's last token.

    Attributes:
        tree: its nodes, depth first.
        token, position: the last token, and where it stands.
        slot: of the sequence.
    """

    tree: Tree
    token: int
    position: int
    slot: int

    @property
    def places(self) -> int:
        """Places of its nodes in attention's batch, the root's included."""
        return sum(1 + len(path) for path in self.tree.paths() or [[]])


@dataclass
class Layout:
    """A flat batch while it is filled.

    Attributes:
        tokens, parents, rows, positions: of each node.
        owners: the slot of each row of the tables.
        roots: of each sequence.
        sources, place_rows, place_positions: of each place in attention's batch.
        places: one place of each node.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    roots: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    place_rows: list[int] = field(default_factory=list)
    place_positions: list[int] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)

    def add(self, planted: Planted) -> list[int]:
        """Takes a sequence in; the row of the tables of each of its tree's paths."""
        tree, root = planted.tree, len(self.tokens)
        paths = tree.paths() or [[]]
        rows = [len(self.owners) + i for i in range(len(paths))]
        self.roots.append(root)
        self.owners += [planted.slot] * len(paths)
        first = {
            node: row for row, path in reversed([*zip(rows, paths, strict=True)]) for node in path
        }
        self.tokens += [planted.token, *tree.tokens]
        self.parents += [-1, *(root if p == ROOT else root + 1 + p for p in tree.parents)]
        self.rows += [rows[0], *(first[node] for node in range(len(tree)))]
        self.positions += [planted.position, *(planted.position + d for d in tree.depths())]
        for row, path in zip(rows, paths, strict=True):
            for depth, node in enumerate([root, *(root + 1 + node for node in path)]):
                self.places.setdefault(node, len(self.sources))
                self.sources.append(node)
                self.place_rows.append(row)
                self.place_positions.append(planted.position + depth)
        return rows

    @property
    def branched(self) -> bool:
        """Whether there is a node in more than one place."""
        return len(self.sources) > len(self.tokens)

    def nodes(self, size: int, roots: int) -> Nodes:
        """The batch, padded.

        Args:
            size: its tokens; `PLACES` times as many are its places, where it is branched.
            roots: how many sequences there are room for.
        """
        copies = None
        if self.branched:
            most = PLACES * size
            copies = Copies(
                _padded(self.sources, most, 0),
                _padded(self.place_rows, most, -1),
                _padded(self.place_positions, most, 0),
                _padded([self.places[node] for node in range(len(self.tokens))], size, most - 1),
            )
        return Nodes(
            _padded(self.tokens, size, 0),
            _padded(self.rows, size, -1),
            _padded(self.positions, size, 0),
            _padded(self.parents, size, -1),
            _padded(self.owners, size, -1),
            _padded(self.roots, roots, -1),
            copies,
        )


def _padded(values: Sequence[int], size: int, filling: int) -> Any:
    out = np.full(size, filling, np.int32)
    out[: len(values)] = values
    return out
