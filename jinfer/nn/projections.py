"""Linear projections, the token embedding and the vocabulary head (LM head)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jinfer.modelspec import blocks
from jinfer.modelspec.quantization_table import Role
from jinfer.nn.parameter import parameter
from jinfer.ops.matmul.dense import matmul_per_head
from jinfer.ops.matmul.matmul import linear, linears, take_rows

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Linear(nnx.Module):
    """A linear projection with weight [outputs, inputs]."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool,
        dtype: DTypeLike,
        axes: tuple[str, str] = ("hidden", "hidden"),
        role: Role = "matrix",
    ) -> None:
        self.weight = parameter((outputs, inputs), axes, dtype, role=role)
        self.bias = parameter((outputs,), axes[:1], dtype) if bias else None

    @classmethod
    def of(cls, block: blocks.LinearSpec, dtype: DTypeLike) -> Linear:
        """The projection of a block."""
        return cls(block.inputs, block.outputs, block.bias, dtype)

    def __call__(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows outputs"]:
        """x @ weight.T + bias."""
        return linear(x, self.weight[...], None if self.bias is None else self.bias[...])


class BlockLinear(nnx.Module):
    """A block-diagonal projection, computed in float32."""

    def __init__(self, block: blocks.BlockLinearSpec, dtype: DTypeLike) -> None:
        shape = block.blocks, block.outputs // block.blocks, block.inputs // block.blocks
        self.weight = parameter(shape, ("blocks", "hidden", "hidden"), jnp.float32)
        self.bias = parameter(shape[:2], ("blocks", "hidden"), jnp.float32) if block.bias else None

    def __call__(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows outputs"]:
        """Each part of x with its own matrix."""
        weight = self.weight[...]
        parts = x.astype(jnp.float32).reshape(-1, weight.shape[0], weight.shape[2])
        y = matmul_per_head(parts, weight, slice(None))
        if self.bias is not None:
            y = y + self.bias[...][None]
        return y.reshape(*x.shape[:-1], -1).astype(x.dtype)


def project(
    x: Float[Array, "*rows inputs"], projections: Sequence[Linear]
) -> tuple[Float[Array, "*rows outputs"], ...]:
    """Several projections of the same vectors, which may be one operation."""
    biases = [None if each.bias is None else each.bias[...] for each in projections]
    return linears(x, [each.weight[...] for each in projections], biases)


class Embedding(nnx.Module):
    """Token embedding: a table with one row per token."""

    def __init__(self, block: blocks.EmbeddingSpec, dtype: DTypeLike) -> None:
        self.dtype = jnp.dtype(dtype)
        shape = (block.size, block.width)
        self.weight = parameter(shape, ("vocab", "hidden"), dtype, role="table")

    def __call__(self, tokens: Int[Array, "batch tokens"]) -> Float[Array, "batch tokens hidden"]:
        """Rows of the table."""
        return take_rows(self.weight[...], tokens, self.dtype)


class Head(nnx.Module):
    """LM head: the projection onto the vocabulary; logits are float32."""

    def __init__(self, block: blocks.HeadSpec, dtype: DTypeLike) -> None:
        shape, axes = (block.outputs, block.inputs), ("vocab", "hidden")
        self.tied = block.tied
        weight = partial(parameter, shape, axes, dtype, normalize=block.normalize, role="head")
        self.weight = None if block.tied else weight()
        self.bias = parameter(shape[:1], axes[:1], dtype) if block.bias else None

    def __call__(
        self, x: Float[Array, "*rows hidden"], embed: Embedding | None = None
    ) -> Float[Array, "*rows vocab"]:
        """x @ weight.T + bias; a tied head uses the weight of `embed`."""
        weight = embed.weight if embed is not None else self.weight
        assert weight is not None, "a tied head takes the embedding's weight"
        bias = None if self.bias is None else self.bias[...]
        return linear(x, weight[...], bias, jnp.float32)
