"""Drafts of answers that have to match a grammar: what it allows, and the masks after tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jinfer.sampling.request_errors import ConstraintError
from jinfer.speculate.token_tree import ROOT, Tree

if TYPE_CHECKING:
    from jaxtyping import UInt

    from jinfer.sampling.structured import Matcher

EVERYTHING = np.uint32(0xFFFFFFFF)


def allowed(
    state: Matcher, mask: UInt[np.ndarray, " words"], tree: Tree, *, forcing: bool
) -> tuple[Tree, list[UInt[np.ndarray, " words"]]]:
    """The nodes of a chain after which the grammar leaves a choice; masks of the root and of these.

    A token that the grammar ends with, or after which it forces others, is not drafted: whoever
    reads it has something to do before the next one.

    Args:
        state: a fork of the answer's own, which goes along the chain.
        mask: of the root.
        forcing: whether forced tokens are not chosen.
    """
    masks, kept = [mask], list[int]()
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
        kept.append(node)
        last = node
    return tree.only(kept), masks


def _ended(state: Matcher) -> bool:
    """Whether only an end may come, as far as is known: a mask may show it."""
    return state.finished
