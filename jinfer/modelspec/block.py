"""Block: what every building block of a specification says of itself."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

# Kinds of arrays: hidden states; tokens, positions and token types; an encoder's output; the grids
# of patches of images.
ArrayKind = Literal["vectors", "indices", "encoded", "grid"]


class CachedKV(NamedTuple):
    """What a block caches per token: keys and values, their widths, in which group.

    Attributes:
        value_width: 0: the values are a part of the keys.
        window: sliding window; None: all tokens.
        encoded: whether the tokens are an encoder's.
        index_width: width of an indexer's keys; 0: none.
        score_mod: whether scores are more than scaled products: soft cap, biases, chunks.
    """

    heads: int
    key_width: int
    value_width: int
    window: int | None = None
    encoded: bool = False
    index_width: int = 0
    score_mod: bool = False


class CachedState(NamedTuple):
    """What a recurrent block keeps of each sequence.

    Attributes:
        arrays: (name, shape) of each array.
    """

    arrays: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class Block:
    """A building block: a kind, and fields that are the keys of its table.

    Attributes:
        takes: the kinds of its arguments in a formula.
        passes: how many of the first ones it passes on, each normed, with factors or the like: the
            residual stream goes through it.
    """

    kind: str
    takes: ClassVar[tuple[ArrayKind, ...]] = ("vectors",)
    passes: ClassVar[int] = 0

    def arguments(self) -> tuple[ArrayKind, ...]:
        """The kinds of its arguments, where its fields decide."""
        return self.takes

    def cached(self) -> CachedKV | CachedState | None:
        """What it caches; None: nothing."""
        return None

    def misplaced(self, stack: str, part: str) -> str:
        """Why this formula of the stack cannot call it; "" if it can."""
        return ""

    def undividable(self) -> str:
        """Why tensor parallelism (`jinfer.parallel.sharding_rules`) cannot divide it; "": can."""
        return ""

    def axes(self) -> dict[str, str]:
        """Logical axes that tensor parallelism divides, and the field with the size of each.

        The parameters of the block's module name the same axes.
        """
        named = [field for field in dataclasses.fields(self) if field.metadata.get("axis")]
        return {f.metadata["axis"]: f.name for f in named if getattr(self, f.name) is not None}

    def gives_partial_sums(self) -> bool:
        """Whether the outputs of its shards are partial sums, to be added by an all-reduce."""
        return not self.axes().keys().isdisjoint(("heads", "mlp"))
