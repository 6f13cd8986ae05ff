"""Trees on their way into a call: blocks for their branches, masks for their nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jinfer.engine.engine_core import EngineCore
from jinfer.engine.scheduling.block_manager import Copy, Held
from jinfer.engine.scheduling.scheduler import Running
from jinfer.speculate.token_tree import Tree
from jinfer.speculate.tree_batch import Layout


def first_path(tree: Tree) -> Tree:
    """A tree without its branches."""
    return tree.only(tree.paths()[0]) if len(tree) else tree


def laid_out(
    masks: dict[int, list[np.ndarray]],
    decoding: Sequence[Running],
    layout: Layout,
    size: int,
    words: int,
) -> np.ndarray:
    """Masks after each node of a batch; a chain may have been cut since they were made."""
    out = np.zeros((size, words), np.uint32)
    ends = [*layout.roots[1:], len(layout.tokens)]
    for sequence, begin, end in zip(decoding, layout.roots, ends, strict=True):
        out[begin:end] = masks[sequence.slot][: end - begin]
    return out


def grown(
    engine: EngineCore, sequence: Running, tree: Tree, copies: list[Copy]
) -> tuple[Tree, list[tuple[list[int], Held]]]:
    """A tree with blocks for each of its branches; without those that there are no blocks for."""
    assert sequence.held is not None, "it is planned"
    blocks, known = engine.scheduler.blocks, len(sequence.tokens)
    branches: list[tuple[list[int], Held]] = []
    made: list[Copy] = []
    for path in tree.paths()[1:]:
        forked = blocks.fork(sequence.held, known - 1)
        if forked is None or not blocks.reserve(forked[0], known + len(path)):
            for held in [own for _, own in branches] + ([forked[0]] if forked else []):
                blocks.free(held)
            return first_path(tree), []
        branches.append((path, forked[0]))
        made += forked[1]
    copies += made
    return tree, branches
