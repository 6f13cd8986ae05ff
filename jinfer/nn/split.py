"""Blocks of which every device of a mesh axis has a part.

What an attention or a feed-forward gives is added up by its layer; a table of the vocabulary and
the projection onto it have rows of it on each device.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from jinfer.nn.linear import Embedding, Head
from jinfer.spec import blocks


@dataclass(frozen=True, kw_only=True)
class SplitEmbedding(blocks.Embedding):
    """Some rows of a table: `size` on each device, one device's after the other's.

    axis: of the mesh.
    """

    axis: str


@dataclass(frozen=True, kw_only=True)
class SplitHead(blocks.Head):
    """Some outputs of a projection onto the vocabulary: `outputs` on each device.

    axis: of the mesh.
    whole: outputs that there are; what the last devices have beyond them is padding.
    """

    axis: str
    whole: int


@dataclass(frozen=True, kw_only=True)
class SplitAlibi(blocks.Alibi):
    """The slopes of some heads.

    axis: of the mesh.
    slopes: of each device's heads.
    """

    axis: str
    slopes: tuple[tuple[float, ...], ...]


class EmbeddingPart(Embedding):
    """A table of which the other rows are on other devices."""

    def __init__(self, block: SplitEmbedding, dtype: jnp.dtype) -> None:
        super().__init__(block, dtype)
        self.axis, self.size = block.axis, block.size

    def __call__(self, tokens: Int[Array, "batch tokens"]) -> Float[Array, "batch tokens hidden"]:
        """Rows of the whole table."""
        own = tokens - lax.axis_index(self.axis).astype(tokens.dtype) * self.size
        here = (own >= 0) & (own < self.size)
        rows = super().__call__(jnp.where(here, own, 0))
        return lax.psum(jnp.where(here[..., None], rows, jnp.zeros_like(rows)), self.axis)


class HeadPart(Head):
    """A projection of which the other outputs are on other devices."""

    def __init__(self, block: SplitHead, dtype: jnp.dtype) -> None:
        super().__init__(block, dtype)
        self.axis, self.whole = block.axis, block.whole

    def __call__(
        self, x: Float[Array, "*rows hidden"], embed: Embedding | None = None
    ) -> Float[Array, "*rows vocab"]:
        """All outputs, on every device."""
        own = super().__call__(x, embed)
        whole = lax.all_gather(own, self.axis, axis=own.ndim - 1, tiled=True)
        return whole[..., : self.whole]


def own_slopes(position: SplitAlibi) -> Float[Array, " heads"]:
    """The slopes of this device's heads."""
    table = jnp.asarray(position.slopes, jnp.float32)
    return table[lax.axis_index(position.axis)]
