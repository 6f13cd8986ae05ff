"""Tree attention, block tables of branches; grammar masks of nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jinfer.engine.engine_core import EngineCore
from jinfer.engine.scheduling.block_manager import BlockCopy, BlockTables
from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.speculate.token_tree import TokenTree
from jinfer.speculate.tree_batch import TreeLayout


def first_path(tree: TokenTree) -> TokenTree:
    """The first path of a tree."""
    return tree.subtree(tree.paths()[0]) if len(tree) else tree


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
    engine: EngineCore, sequence: RunningSequence, tree: TokenTree, copies: list[BlockCopy]
) -> tuple[TokenTree, list[tuple[list[int], BlockTables]]]:
    """Allocates blocks for a tree's branches; without enough blocks, only the first path is left.

    Args:
        copies: the blocks to copy are added.

    Returns:
        The tree, and (path, block tables) of each path but the first.
    """
    assert sequence.block_tables is not None, "it is planned"
    blocks, known = engine.scheduler.blocks, len(sequence.tokens)
    branches: list[tuple[list[int], BlockTables]] = []
    made: list[BlockCopy] = []
    for path in tree.paths()[1:]:
        forked = blocks.fork(sequence.block_tables, known - 1)
        if forked is None or not blocks.reserve(forked[0], known + len(path)):
            for tables in [branch for _, branch in branches] + ([forked[0]] if forked else []):
                blocks.free(tables)
            return first_path(tree), []
        branches.append((path, forked[0]))
        made += forked[1]
    copies += made
    return tree, branches
