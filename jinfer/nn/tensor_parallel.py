"""Tensor parallelism: sharded embedding and LM head, ALiBi slopes per shard, deferred all-reduce.

Attentions and feed-forwards are summed over devices by their layer; the embedding table and the LM
head are sharded by vocabulary row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jinfer.modelspec import blocks, position_blocks
from jinfer.nn.norm_modules import RMSNorm
from jinfer.nn.projections import Embedding, Head, Linear

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True, kw_only=True)
class ShardedEmbeddingBlock(blocks.EmbeddingSpec):
    """A table sharded by row: `size` rows on each device, in order of devices.

    axis: of the mesh.
    """

    axis: str


@dataclass(frozen=True, kw_only=True)
class ShardedHeadBlock(blocks.HeadSpec):
    """An LM head sharded by output: `outputs` on each device.

    axis: of the mesh.
    whole: total outputs; the last devices are padded beyond them.
    """

    axis: str
    whole: int


@dataclass(frozen=True, kw_only=True)
class ShardedAlibi(position_blocks.AlibiSpec):
    """ALiBi slopes of a shard's heads.

    axis: of the mesh.
    slopes: of each device's heads.
    """

    axis: str
    slopes: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class ColumnLinearBlock(blocks.LinearSpec):
    """A projection of whole vectors to this device's part of its outputs."""


@dataclass(frozen=True, kw_only=True)
class RowLinearBlock(blocks.LinearSpec):
    """A projection of this device's part of the inputs, whose outputs are partial sums."""

    def gives_partial_sums(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class ShardedRMSBlock(blocks.RMSNormSpec):
    """An RMS norm over the channels of all devices, of which each has `size`.

    axis: of the mesh.
    whole: channels of all devices.
    """

    axis: str
    whole: int


class ShardedRMSNorm(RMSNorm):
    """This device's part of an RMSNorm."""

    def __init__(self, block: ShardedRMSBlock, dtype: DTypeLike) -> None:
        super().__init__(block, dtype)
        self.axis, self.whole = block.axis, block.whole

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        """x / sqrt(mean(x^2) + eps) * weight, with the mean over all devices' channels."""
        wide = x.astype(jnp.float32)
        squares = lax.psum(jnp.sum(wide * wide, axis=-1, keepdims=True), self.axis)
        y = wide * lax.rsqrt(squares / self.whole + self.block.eps)
        if self.block.weight:
            factor = self.weight[...] + (1.0 if self.block.plus_one else 0.0)
            y = y * factor.reshape((1,) * (x.ndim - 1) + (-1,))
        return y.astype(x.dtype)


def column_linear(block: ColumnLinearBlock, dtype: DTypeLike) -> Linear:
    """Builds the projection of a block, sharded by its outputs."""
    return Linear(block.inputs, block.outputs, block.bias, dtype, ("part", "hidden"))


def row_linear(block: RowLinearBlock, dtype: DTypeLike) -> Linear:
    """Builds the projection of a block, sharded by its inputs."""
    return Linear(block.inputs, block.outputs, block.bias, dtype, ("hidden", "part"))


class ShardedEmbedding(Embedding):
    """This device's shard of a token embedding."""

    def __init__(self, block: ShardedEmbeddingBlock, dtype: jnp.dtype) -> None:
        super().__init__(block, dtype)
        self.axis, self.size = block.axis, block.size

    def __call__(self, tokens: Int[Array, "batch tokens"]) -> Float[Array, "batch tokens hidden"]:
        """Looks up rows of the whole table."""
        own = tokens - lax.axis_index(self.axis).astype(tokens.dtype) * self.size
        here = (own >= 0) & (own < self.size)
        rows = super().__call__(jnp.where(here, own, 0))
        return lax.psum(jnp.where(here[..., None], rows, jnp.zeros_like(rows)), self.axis)


class ShardedHead(Head):
    """This device's shard of an LM head."""

    def __init__(self, block: ShardedHeadBlock, dtype: jnp.dtype) -> None:
        super().__init__(block, dtype)
        self.axis, self.whole = block.axis, block.whole

    def __call__(
        self, x: Float[Array, "*rows hidden"], embed: Embedding | None = None
    ) -> Float[Array, "*rows vocab"]:
        """Computes all outputs, on every device."""
        own = super().__call__(x, embed)
        whole = lax.all_gather(own, self.axis, axis=own.ndim - 1, tiled=True)
        return whole[..., : self.whole]


class DeferredAllReduce:
    """Deferred all-reduce: a sum over a mesh axis that is computed when it is first read.

    Sums of such terms are added before the exchange: one all-reduce for all of them.
    """

    def __init__(self, part: Array, axis: str, whole: Any = None) -> None:
        """Args:
        part: this device's term.
        whole: a replicated term added to the devices' sum; None: nothing.
        """
        self._part, self._axis, self._whole = part, axis, whole
        self._value: Array | None = None

    def value(self) -> Array:
        """The all-reduced sum, computed once."""
        if self._value is None:
            total = lax.psum(self._part, self._axis)
            self._value = total if self._whole is None else self._whole + total
        return self._value

    def __add__(self, other: Any) -> Any:
        if self._value is not None:
            return self._value + other
        if not isinstance(other, DeferredAllReduce):
            return DeferredAllReduce(self._part, self._axis, _add_optional(self._whole, other))
        if other._value is not None:
            return self + other._value
        return DeferredAllReduce(
            self._part + other._part, self._axis, _add_optional(self._whole, other._whole)
        )

    __radd__ = __add__

    def __mul__(self, other: Any) -> Any:
        if self._value is not None or not isinstance(other, int | float):
            return self.value() * other
        whole = None if self._whole is None else self._whole * other
        return DeferredAllReduce(self._part * other, self._axis, whole)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self * (1 / other) if isinstance(other, int | float) else self.value() / other

    def __rtruediv__(self, other: Any) -> Any:
        return other / self.value()

    def __getitem__(self, part: Any) -> Any:
        return self.value()[part]

    def __pos__(self) -> Any:
        return self

    def __neg__(self) -> Any:
        return self * -1.0

    def __sub__(self, other: Any) -> Any:
        return self + -other

    def __rsub__(self, other: Any) -> Any:
        return -self + other


def _add_optional(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def resolve_all_reduce(x: Any) -> Any:
    """Returns the value of a deferred all-reduce; other values unchanged."""
    return x.value() if isinstance(x, DeferredAllReduce) else x


def local_alibi_slopes(position: ShardedAlibi) -> Float[Array, " heads"]:
    """Returns the slopes of this device's heads."""
    table = jnp.asarray(position.slopes, jnp.float32)
    return table[lax.axis_index(position.axis)]
