"""Linear projections, the token embedding and the vocabulary head (LM head)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jinfer.modelspec import blocks
from jinfer.modelspec.quantization_table import Role
from jinfer.nn.lora_rows import row_adapters, slots_to_build
from jinfer.nn.parameter import parameter
from jinfer.ops.matmul.dense import matmul_per_head
from jinfer.ops.matmul.lora import NORM_TERMS, RowAdapters, Stacks, add_lora, rescale
from jinfer.ops.matmul.matmul import linear, linears, take_rows

if TYPE_CHECKING:
    from jaxtyping import Float, Int


_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class Linear(nnx.Module):
    """A linear projection with weight [outputs, inputs], and the stacks of adapters if any."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool,
        dtype: DTypeLike,
        axes: tuple[str, str] = ("hidden", "hidden"),
        role: Role = "matrix",
        bounded: bool = False,
    ) -> None:
        """Builds the projection.

        Args:
            bounded: whether inputs and outputs are clipped to bounds, which are parameters.
        """
        for bound in _BOUNDS:
            own = parameter((1,), ("scalar",), jnp.float32) if bounded else None
            setattr(self, bound, own)
        self.bounded = bounded
        self.weight = parameter((outputs, inputs), axes, dtype, role=role)
        self.bias = parameter((outputs,), axes[:1], dtype) if bias else None
        slots = slots_to_build() if role == "matrix" else None
        n, rank, kind = (0, 0, "") if slots is None else (slots.count, slots.rank, slots.dtype)
        a, b = ("slots", "rank", axes[1]), ("slots", "rank", axes[0])
        self.lora_a = parameter((n, rank, inputs), a, kind) if slots else None
        self.lora_b = parameter((n, rank, outputs), b, kind) if slots else None
        f = ("slots", "sides", "rank")
        self.lora_factors = parameter((n, 2, rank), f, jnp.float32) if kind == "int8" else None
        norms = slots is not None and slots.magnitudes
        shape, c = (n, NORM_TERMS, outputs), ("slots", "terms", axes[0])
        self.dora_norms = parameter(shape, c, jnp.float32) if norms else None

    @classmethod
    def of(cls, block: blocks.LinearSpec, dtype: DTypeLike) -> Linear:
        """Builds the projection of a block."""
        return cls(block.inputs, block.outputs, block.bias, dtype)

    def __call__(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows outputs"]:
        """Computes x @ weight.T + bias, and the terms of the rows' adapters."""
        return project(x, (self,))[0]

    @property
    def is_plain(self) -> bool:
        """Whether the projection is only a product: no bias, no bounds, no adapters."""
        if self.bias is not None or self.bounded:
            return False
        return self.lora_a is None or row_adapters() is None

    def within_bounds(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows outputs"]:
        """Computes the projection of clipped inputs, and clips the outputs."""
        low, high, least, most = (getattr(self, bound)[0] for bound in _BOUNDS)
        bias = None if self.bias is None else self.bias[...]
        (y,) = linears(jnp.clip(x, low, high).astype(x.dtype), [self.weight[...]], [bias])
        return jnp.clip(y, least, most).astype(x.dtype)

    @property
    def stacks(self) -> Stacks:
        """Returns the stacks of adapters."""
        assert self.lora_a is not None, "it has room"
        assert self.lora_b is not None, "it has room"
        factors = None if self.lora_factors is None else self.lora_factors[...]
        return Stacks(self.lora_a[...], self.lora_b[...], factors)


class LowRankLinear(nnx.Module):
    """Two linear projections in turn, the first to a few dimensions."""

    def __init__(self, inputs: int, rank: int, outputs: int, axis: str, dtype: DTypeLike) -> None:
        """Args:
        axis: of the outputs.
        """
        self.down = Linear(inputs, rank, False, dtype, ("rank", "hidden"))
        self.up = Linear(rank, outputs, False, dtype, (axis, "rank"))


class BlockLinear(nnx.Module):
    """A block-diagonal projection, computed in float32."""

    def __init__(self, block: blocks.BlockLinearSpec, dtype: DTypeLike) -> None:
        shape = block.blocks, block.outputs // block.blocks, block.inputs // block.blocks
        self.weight = parameter(shape, ("blocks", "hidden", "hidden"), jnp.float32)
        self.bias = parameter(shape[:2], ("blocks", "hidden"), jnp.float32) if block.bias else None

    def __call__(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows outputs"]:
        """Multiplies each part of x by its own matrix."""
        weight = self.weight[...]
        parts = x.astype(jnp.float32).reshape(-1, weight.shape[0], weight.shape[2])
        y = matmul_per_head(parts, weight, slice(None))
        if self.bias is not None:
            y = y + self.bias[...][None]
        return y.reshape(*x.shape[:-1], -1).astype(x.dtype)


def project(
    x: Float[Array, "*rows inputs"], projections: Sequence[Linear]
) -> tuple[Float[Array, "*rows outputs"], ...]:
    """Computes several projections of the same vectors, in one operation if possible."""
    if any(each.bounded for each in projections):
        return tuple(each.within_bounds(x) for each in projections)
    biases = [None if each.bias is None else each.bias[...] for each in projections]
    weights = [each.weight[...] for each in projections]
    rows = row_adapters()
    if rows is None or all(each.lora_a is None for each in projections):
        return linears(x, weights, biases)
    # In float32 until all terms are added: rows without an adapter keep their rounding.
    wide = linears(x, weights, biases, jnp.float32)
    has = [each.lora_a is not None and each.lora_b is not None for each in projections]
    stacks = [each.stacks for each, there in zip(projections, has, strict=True) if there]
    products = [y for y, there in zip(wide, has, strict=True) if there]
    adapted = iter(_rescaled(add_lora(products, x, stacks, rows), projections, rows))
    every = zip(wide, has, strict=True)
    return tuple((next(adapted) if there else y).astype(x.dtype) for y, there in every)


def _rescaled(
    ys: Sequence[Array], projections: Sequence[Linear], rows: RowAdapters
) -> Iterator[Array]:
    """Adds adapter terms, and applies DoRA's magnitudes, to the projections with stacks."""
    each = (one for one in projections if one.lora_a is not None)
    for y, one in zip(ys, each, strict=True):
        bias = None if one.bias is None else one.bias[...]
        yield y if one.dora_norms is None else rescale(y, bias, one.dora_norms[...], rows)


class Embedding(nnx.Module):
    """Token embedding: a table with one row per token."""

    def __init__(self, block: blocks.EmbeddingSpec, dtype: DTypeLike) -> None:
        self.dtype = jnp.dtype(dtype)
        shape = (block.size, block.width)
        self.weight = parameter(shape, ("vocab", "hidden"), dtype, role="table")

    def __call__(self, tokens: Int[Array, "batch tokens"]) -> Float[Array, "batch tokens hidden"]:
        """Looks up rows of the table."""
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
        """Computes x @ weight.T + bias; a tied head uses the weight of `embed`."""
        weight = embed.weight if embed is not None else self.weight
        assert weight is not None, "a tied head takes the embedding's weight"
        bias = None if self.bias is None else self.bias[...]
        return linear(x, weight[...], bias, jnp.float32)
