"""Vector modules: Concat, Mix, Repeat, Sum, Rescale, and VocabMap, HiddenTap of draft heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jinfer.modelspec import blocks
from jinfer.modelspec.blocks import MixSpec, RepeatSpec, RescaleSpec, SumSpec
from jinfer.modelspec.eagle_head import HiddenTapSpec
from jinfer.nn.forward_context import ForwardBatch
from jinfer.nn.parameter import parameter
from jinfer.ops.attention.kv_cache import LayerCache
from jinfer.ops.reductions import add_in_order, mean_of_row, rounded

if TYPE_CHECKING:
    from jaxtyping import Float


class Mix(nnx.Module):
    """Weighted sums of a vector's parts, in float32."""

    def __init__(self, block: MixSpec, dtype: DTypeLike) -> None:
        self.block = block

    def __call__(
        self, x: Float[Array, "*rows inputs"], weights: Float[Array, "*rows pairs"]
    ) -> Float[Array, "*rows outputs"]:
        """Part o of the result is the sum of weights[o * inputs + i] times part i of x."""
        inputs, outputs = self.block.inputs, self.block.outputs
        factors = weights.astype(jnp.float32).reshape(*x.shape[:-1], outputs, inputs)
        parts = x.astype(jnp.float32).reshape(*x.shape[:-1], inputs, -1)
        terms = [rounded(factors[..., i, None] * parts[..., i, None, :]) for i in range(inputs)]
        return add_in_order(terms).reshape(*x.shape[:-1], -1).astype(x.dtype)


class Repeat(nnx.Module):
    """Repeats a vector."""

    def __init__(self, block: RepeatSpec, dtype: DTypeLike) -> None:
        self.times = block.times

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows wide"]:
        """[x, x, ...]."""
        return jnp.concatenate([x] * self.times, axis=-1)


class Sum(nnx.Module):
    """The sum of a vector's parts, in float32."""

    def __init__(self, block: SumSpec, dtype: DTypeLike) -> None:
        self.parts = block.parts

    def __call__(self, x: Float[Array, "*rows wide"]) -> Float[Array, "*rows width"]:
        """x[0:width] + x[width : 2 * width] + ..."""
        parts = jnp.split(x.astype(jnp.float32), self.parts, axis=-1)
        return add_in_order(parts).astype(x.dtype)


class Rescale(nnx.Module):
    """Gives a vector's parts another vector's root mean square, in float32."""

    def __init__(self, block: RescaleSpec, dtype: DTypeLike) -> None:
        self.block = block

    def __call__(
        self, x: Float[Array, "*rows wide"], like: Float[Array, "*rows width"]
    ) -> Float[Array, "*rows wide"]:
        """x * sqrt(mean(like^2) / max(mean(x^2), eps)), in each part."""
        parts = x.astype(jnp.float32).reshape(*x.shape[:-1], self.block.parts, -1)
        target_square = mean_of_row(jnp.square(like.astype(jnp.float32)))[..., None, :]
        own_square = jnp.maximum(mean_of_row(jnp.square(parts)), self.block.eps)
        return (
            rounded(parts * jnp.sqrt(target_square / own_square)).reshape(x.shape).astype(x.dtype)
        )


class Concat(nnx.Module):
    """Concatenation of two vectors."""

    def __init__(self, block: blocks.ConcatSpec, dtype: DTypeLike) -> None:
        self.block = block

    def __call__(
        self, first: Float[Array, "*rows one"], second: Float[Array, "*rows other"]
    ) -> Float[Array, "*rows both"]:
        """[one, other]."""
        return jnp.concatenate([first, second], axis=-1)


class VocabMap(nnx.Module):
    """Vocabulary map: logits of a draft vocabulary as logits of the full one."""

    def __init__(self, block: blocks.VocabMapSpec, dtype: DTypeLike) -> None:
        self.block = block
        self.offsets = parameter((block.inputs,), ("hidden",), jnp.int32)

    def __call__(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows outputs"]:
        """-inf for tokens outside the draft vocabulary."""
        ids = jnp.arange(self.block.inputs, dtype=jnp.int32) + self.offsets[...]
        whole = jnp.full((*x.shape[:-1], self.block.outputs), -jnp.inf, x.dtype)
        return whole.at[..., ids].set(x, mode="drop")


class HiddenTap(nnx.Module):
    """Writes vectors to a cache, and passes them on unchanged."""

    def __init__(self, block: HiddenTapSpec, dtype: DTypeLike) -> None:
        self.block = block

    def __call__(
        self, x: Float[Array, "batch tokens hidden"], batch: ForwardBatch, cache: LayerCache
    ) -> tuple[Float[Array, "batch tokens hidden"], LayerCache]:
        """Writes the vectors to the cache; returns both."""
        return x, batch.write_vectors(x[0][:, None], cache)
