"""Speculative decoding: the token tree that one call verified."""

from __future__ import annotations

from dataclasses import dataclass

ROOT = -1  # parent of the tokens after the last known one


@dataclass(frozen=True)
class DraftedStep:
    """A token tree that one call verified.

    Attributes:
        tokens: token of each node, parents before their children.
        parents: index of each node's parent; `ROOT`: the last known token.
        sources: draft source of each node.
        accepted: the accepted nodes, from a child of the root on.
        chosen: all tokens that the call gave; the last may not have been drafted.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    sources: tuple[str, ...]
    accepted: tuple[int, ...]
    chosen: tuple[int, ...]

    def depths(self) -> list[int]:
        """Depth of each node; 1: a child of the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths
