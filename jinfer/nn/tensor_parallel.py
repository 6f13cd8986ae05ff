"""Blocks of which every device of a mesh axis has a part.

What an attention or a feed-forward gives is added up by its layer; a table of the vocabulary and
the projection onto it have rows of it on each device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array, lax

from jinfer.modelspec import blocks
from jinfer.nn.projections import Embedding, Head

if TYPE_CHECKING:
    from jaxtyping import Float, Int


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


class Sum:
    """A sum over the devices of an axis that is not computed before somebody looks at it.

    Of terms that are added to each other the devices add up the sum: one exchange for all of them.
    """

    def __init__(self, part: Array, axis: str, whole: Any = None) -> None:
        """Args:
        part: this device's part.
        whole: what is added to the devices' sum; None: nothing.
        """
        self._part, self._axis, self._whole = part, axis, whole
        self._value: Array | None = None

    def value(self) -> Array:
        """The sum, computed once."""
        if self._value is None:
            total = lax.psum(self._part, self._axis)
            self._value = total if self._whole is None else self._whole + total
        return self._value

    def __add__(self, other: Any) -> Any:
        if self._value is not None:
            return self._value + other
        if not isinstance(other, Sum):
            return Sum(self._part, self._axis, _plus(self._whole, other))
        if other._value is not None:
            return self + other._value
        return Sum(self._part + other._part, self._axis, _plus(self._whole, other._whole))

    __radd__ = __add__

    def __mul__(self, other: Any) -> Any:
        if self._value is not None or not isinstance(other, int | float):
            return self.value() * other
        whole = None if self._whole is None else self._whole * other
        return Sum(self._part * other, self._axis, whole)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self * (1 / other) if isinstance(other, int | float) else self.value() / other

    def __rtruediv__(self, other: Any) -> Any:
        return other / self.value()

    def __pos__(self) -> Any:
        return self

    def __neg__(self) -> Any:
        return self * -1.0

    def __sub__(self, other: Any) -> Any:
        return self + -other

    def __rsub__(self, other: Any) -> Any:
        return -self + other


def _plus(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def valued(x: Any) -> Any:
    """What is a sum, computed; all else as it is."""
    return x.value() if isinstance(x, Sum) else x


def own_slopes(position: SplitAlibi) -> Float[Array, " heads"]:
    """The slopes of this device's heads."""
    table = jnp.asarray(position.slopes, jnp.float32)
    return table[lax.axis_index(position.axis)]
