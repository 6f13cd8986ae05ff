"""Speculative decoding: trees of drafted tokens, and the one that a call verified."""

from __future__ import annotations

from dataclasses import dataclass

ROOT = -1  # parent of the first level: the sequence's last token


@dataclass(frozen=True)
class DraftTree:
    """Tokens that may follow a sequence, parents before their children.

    Attributes:
        tokens: token of each node.
        parents: index of each node's parent; `ROOT`: the sequence's last token.
        sources: draft source of each node.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()

    def depths(self) -> list[int]:
        """Depth of each node; 1: a child of the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths


@dataclass(frozen=True)
class DraftedStep(DraftTree):
    """A token tree that one call verified.

    Attributes:
        accepted: the accepted nodes, from a child of the root on.
        chosen: all tokens that the call gave; the last may not have been drafted.
    """

    accepted: tuple[int, ...] = ()
    chosen: tuple[int, ...] = ()
