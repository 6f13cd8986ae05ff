"""Tree attention, block tables of branches; grammar masks of nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jinfer.engine.scheduling.block_manager import BlockCopy, BlockManager, BlockTables
from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.speculate.token_tree import ROOT, TokenTree
from jinfer.speculate.tree_batch import TreeLayout


def first_path(tree: TokenTree) -> TokenTree:
    """The path of each node's first child, whatever the order of the others."""
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
