"""Image blocks: class token, learned positions on a grid of patches, merging of neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from jinfer.modelspec.block import ArrayKind, Block
from jinfer.modelspec.bounded_types import Size, dim


class _ImageBlock(Block):
    """A block of image encoders only."""

    def misplaced(self, stack: str, part: str) -> str:
        return "" if stack == "vision" else "a block of images, which only [vision] can"


@dataclass(frozen=True, kw_only=True)
class ClassTokenSpec(_ImageBlock):
    """A learned vector as an additional token in front of the patches: `cls(x)` (ViT's class)."""

    kind: Literal["class_token"]
    width: int = dim("hidden")


@dataclass(frozen=True, kw_only=True)
class DropTokensSpec(_ImageBlock):
    """The vectors without the first `count` tokens, such as the class token."""

    kind: Literal["drop_tokens"]
    count: Size = 1


@dataclass(frozen=True, kw_only=True)
class LearnedVectorSpec(_ImageBlock):
    """A learned vector that depends on no input, such as that of a line break: `newline(x)`."""

    kind: Literal["learned_vector"]
    width: int = dim("hidden")


@dataclass(frozen=True, kw_only=True)
class GridPositionsSpec(_ImageBlock):
    """A learned table of `side` x `side` positions, resized to each image's grid: `table(grid)`.

    resize: "nearest": each patch takes the row of the table at its relative place (NaViT's
        buckets); "linear", "cubic": interpolation as of images, cubic with a = -0.75 (-0.5 with
        antialias).
    corners: whether the corners of the table are those of the grid (align_corners); else its edges.
    antialias: whether the kernel widens when the grid has fewer patches than the table.
    class_row: where the table has a row for the class token, which comes first in the result.
    """

    kind: Literal["grid_positions"]
    side: Size
    width: int = dim("hidden")
    resize: Literal["nearest", "linear", "cubic"] = "nearest"
    corners: bool = False
    antialias: bool = False
    class_row: Literal["none", "first", "last"] = "none"
    takes: ClassVar[tuple[ArrayKind, ...]] = ("grid",)

    def check(self) -> tuple[str, str] | None:
        if self.resize == "nearest" and (self.corners or self.antialias):
            return "resize", '"nearest" excludes corners and antialias'
        if self.corners and self.antialias:
            return "corners", "excludes antialias"
        return None

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return self.side**2 + (self.class_row != "none")


@dataclass(frozen=True, kw_only=True)
class MergeSpec(_ImageBlock):
    """Concatenation of `size` x `size` neighbouring patches to one vector: `merge(x, grid)`.

    The sides of grids are multiples of `size`.

    channels: "last": each neighbour's vector after another, row by row (pixel shuffle, patch
        merging); "first": for each channel its values of all neighbours (unfold, convolutions).
    """

    kind: Literal["merge"]
    size: Size
    channels: Literal["last", "first"] = "last"
    takes: ClassVar[tuple[ArrayKind, ...]] = ("vectors", "grid")
