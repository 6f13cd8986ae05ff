"""Speculative decoding with grammars: which drafted tokens are allowed, and masks after them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jinfer.sampling.request_errors import ConstraintError
from jinfer.speculate.token_tree import ROOT, TokenTree

if TYPE_CHECKING:
    from jaxtyping import UInt

    from jinfer.sampling.structured import Matcher

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
