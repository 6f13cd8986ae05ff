"""Speculative decoding: the token tree that one call verified."""

from __future__ import annotations

from dataclasses import dataclass

ROOT = -1  # the parent of what follows the last token that was known


@dataclass(frozen=True)
class DraftedStep:
    """A tree that one call verified.

    Attributes:
        tokens: of its nodes, parents before their children.
        parents: by their place; `ROOT`: the last token that was known.
        sources: who drafted each node.
        accepted: the nodes that were right, from a child of the root on.
        chosen: all tokens that the call gave; the last may not have been drafted.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    sources: tuple[str, ...]
    accepted: tuple[int, ...]
    chosen: tuple[int, ...]

    def depths(self) -> list[int]:
        """How many tokens after the root each node stands, from 1 on."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths
