"""Tree attention: token trees of several sequences as one flat batch, their blocks and masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from jinfer.engine.runner.flat_batch import padded
from jinfer.engine.runner.model_runner import ModelRunner
from jinfer.engine.runner.verify import Nodes
from jinfer.engine.scheduling.block_manager import BlockCopy, BlockManager, BlockTables
from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.nn.forward_context import TreeCopies
from jinfer.sampling.request_errors import ConstraintError
from jinfer.speculate.token_tree import ROOT, TokenTree

if TYPE_CHECKING:
    from jaxtyping import UInt

    from jinfer.sampling.structured import Matcher

SIZES = (4, 8, 16, 32, 64)  # of verifying batches, in tokens
PLACES_PER_TOKEN = 4  # average number of branches that a token of a batch may be in


@dataclass(frozen=True)
class RootedTree:
    """A token tree with its root, the sequence's last token.

    Attributes:
        tree: the nodes, depth first.
        token, position: the last token and its position.
        slot: the sequence's slot.
    """

    tree: TokenTree
    token: int
    position: int
    slot: int

    @property
    def places(self) -> int:
        """Number of places in the attention's batch: each path's nodes and its root."""
        return sum(1 + len(path) for path in self.tree.paths() or [[]])


@dataclass
class TreeLayout:
    """A flat batch under construction; see `Nodes` and `TreeCopies`.

    Attributes:
        tokens, parents, rows, positions: of each node.
        owners: the slot of each row of the block tables.
        roots: index of each sequence's root.
        sources, place_rows, place_positions: node, row and position of each place in the
            attention's batch.
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

    def add(self, rooted: RootedTree) -> list[int]:
        """Adds a sequence's tree; returns the row of the block tables of each of its paths."""
        tree, root = rooted.tree, len(self.tokens)
        paths = tree.paths() or [[]]
        rows = [len(self.owners) + i for i in range(len(paths))]
        self.roots.append(root)
        self.owners += [rooted.slot] * len(paths)
        first = {
            node: row for row, path in reversed([*zip(rows, paths, strict=True)]) for node in path
        }
        self.tokens += [rooted.token, *tree.tokens]
        self.parents += [-1, *(root if p == ROOT else root + 1 + p for p in tree.parents)]
        self.rows += [rows[0], *(first[node] for node in range(len(tree)))]
        self.positions += [rooted.position, *(rooted.position + d for d in tree.depths())]
        for row, path in zip(rows, paths, strict=True):
            for depth, node in enumerate([root, *(root + 1 + node for node in path)]):
                self.places.setdefault(node, len(self.sources))
                self.sources.append(node)
                self.place_rows.append(row)
                self.place_positions.append(rooted.position + depth)
        return rows

    @property
    def branched(self) -> bool:
        """Whether a node is in several branches."""
        return len(self.sources) > len(self.tokens)

    def nodes(self, size: int, roots: int) -> Nodes:
        """The padded batch.

        Args:
            size: number of tokens; with branches, it has `PLACES_PER_TOKEN` times as many places.
            roots: number of sequences.
        """
        copies = None
        if self.branched:
            places_in_all = PLACES_PER_TOKEN * size
            copies = TreeCopies(
                padded(self.sources, places_in_all, 0),
                padded(self.place_rows, places_in_all, -1),
                padded(self.place_positions, places_in_all, 0),
                padded(
                    [self.places[node] for node in range(len(self.tokens))], size, places_in_all - 1
                ),
            )
        return Nodes(
            padded(self.tokens, size, 0),
            padded(self.rows, size, -1),
            padded(self.positions, size, 0),
            padded(self.parents, size, -1),
            padded(self.owners, size, -1),
            padded(self.roots, roots, -1),
            copies,
        )


def batch_sizes(runner: ModelRunner) -> list[int]:
    """Sizes of verifying batches: up to four tokens for each slot, or 32 in all."""
    return [n for n in SIZES if n <= max(32, 4 * runner.programs.sizes.slots)]


def fitting_size(
    decoding: Sequence[RunningSequence], trees: dict[int, TokenTree], sizes: Sequence[int]
) -> int:
    """The smallest batch size that some trees fit into."""
    count = len(decoding) + sum(map(len, trees.values()))
    return next(size for size in sizes if size >= count)


EVERYTHING = np.uint32(0xFFFFFFFF)


def allowed_chain(
    state: Matcher, mask: UInt[np.ndarray, " words"], tree: TokenTree, *, forcing: bool
) -> tuple[TokenTree, list[UInt[np.ndarray, " words"]]]:
    """The allowed nodes of a chain, and the masks of the root and of these nodes.

    The chain is cut before a token that completes the grammar, or after which others are forced:
    the host has to act between that token and the next.

    Args:
        state: a fork of the answer's matcher, which is advanced along the chain.
        mask: mask of the root.
        forcing: whether forced tokens are appended without sampling.
    """
    masks, nodes = [mask], list[int]()
    last = ROOT
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if parent != last or not masks[-1][token // 32] >> np.uint32(token % 32) & 1:
            break
        state.advance(token)
        if _ended(state) or (forcing and state.forced()):
            break
        after = np.zeros_like(mask)
        try:
            state.mask(after)
        except ConstraintError:
            break
        if _ended(state):
            break
        masks.append(after)
        nodes.append(node)
        last = node
    return tree.subtree(nodes), masks


def _ended(state: Matcher) -> bool:
    """Whether only the end may follow; a mask may tell later."""
    return state.finished


def first_path(tree: TokenTree) -> TokenTree:
    """The path of each node's first child; the order of the other children does not matter."""
    path = [ROOT]
    for node, parent in enumerate(tree.parents):  # a parent comes before its children
        if parent == path[-1]:
            path.append(node)
    return tree.subtree(path[1:])


def layout_masks(
    masks: dict[int, list[np.ndarray]],
    decoding: Sequence[RunningSequence],
    layout: TreeLayout,
    size: int,
    words: int,
) -> np.ndarray:
    """Masks after each node of a batch; chains may be shorter than their lists of masks."""
    out = np.zeros((size, words), np.uint32)
    ends = [*layout.roots[1:], len(layout.tokens)]
    for sequence, begin, end in zip(decoding, layout.roots, ends, strict=True):
        out[begin:end] = masks[sequence.slot][: end - begin]
    return out


def allocate_branches(
    blocks: BlockManager, sequence: RunningSequence, tree: TokenTree, copies: list[BlockCopy]
) -> tuple[TokenTree, list[tuple[list[int], BlockTables]]]:
    """Allocates blocks for a tree's branches; without enough blocks, only the first path is left.

    Args:
        copies: the blocks to copy are added.

    Returns:
        The tree, and (path, block tables) of each path but the first.
    """
    assert sequence.block_tables is not None, "it is planned"
    paths, known = tree.paths()[1:], len(sequence.tokens)
    parents, ends = [sequence.block_tables] * len(paths), [known + len(path) for path in paths]
    forked = blocks.fork_all(parents, known - 1, ends)
    if forked is None:
        return first_path(tree), []
    branches, made = forked
    copies += made
    return tree, [*zip(paths, branches, strict=True)]
