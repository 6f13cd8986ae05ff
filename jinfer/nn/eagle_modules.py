"""EAGLE draft head blocks: joins hidden states, and maps draft logits to the full vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jinfer.modelspec import blocks
from jinfer.modelspec.eagle_head import HiddenTapSpec
from jinfer.nn.forward_context import ForwardBatch
from jinfer.nn.parameter import parameter
from jinfer.ops.attention.kv_cache import LayerCache

if TYPE_CHECKING:
    from jaxtyping import Float


class Concat(nnx.Module):
    """Concatenation of two vectors."""

    def __init__(self, block: blocks.ConcatSpec, dtype: DTypeLike) -> None:
        self.block = block

    def __call__(
        self, one: Float[Array, "*rows one"], other: Float[Array, "*rows other"]
    ) -> Float[Array, "*rows both"]:
        """[one, other]."""
        return jnp.concatenate([one, other], axis=-1)


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
        """The vectors, and the cache with them."""
        return x, batch.write_vectors(x[0][:, None], cache)
