"""Reductions of rows: batch-invariant sums, argmax, Gaussian top-k, top-k and top-p thresholds."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jinfer.cpu import rowwise as cpu
from jinfer.ops.backend import has_cpu_calls, has_triton_kernels, interpreted
from jinfer.ops.matmul.matmul import linear

if TYPE_CHECKING:
    from jaxtyping import Float, Int, UInt


def add_in_order(terms: Iterable[Array]) -> Array:
    """Sums arrays one after the other."""
    return reduce(add, terms)


def mean_of_row(x: Float[Array, "*rows size"]) -> Float[Array, "*rows 1"]:
    """Computes each row's mean, float32, as a product with ones, whose order of sums is fixed."""
    ones = jnp.ones((1, x.shape[-1]), jnp.float32)
    return linear(x.astype(jnp.float32), ones, None) / x.shape[-1]


def rounded(product: Array) -> Array:
    """Rounds a product before it is added to another.

    A compiler may contract a product and a sum into a fused multiply-add, depending on the loop it
    generates, so a token's bits would depend on the batch size. The select, which never selects
    anything, prevents that.
    """
    return jnp.where(jnp.isnan(product), jnp.nan, product)


_LANES = 64  # values reduced in parallel (SIMD)


def argmax(x: Float[Array, "rows size"]) -> Int[Array, " rows"]:
    """Returns the first index of each row's maximum; the last index if the row contains NaN."""
    if has_cpu_calls():
        return cpu.argmax(x.astype(jnp.float32))
    # XLA:CPU computes jnp.argmax element by element; two reductions over rows of lanes are
    # vectorized.
    size = x.shape[-1]
    whole = size + -size % _LANES
    filled = jnp.pad(x, ((0, 0), (0, whole - size)), constant_values=-jnp.inf)
    lanes = filled.reshape(x.shape[0], whole // _LANES, _LANES)
    greatest = jnp.max(jnp.max(lanes, axis=1), axis=-1)
    index = jnp.arange(whole, dtype=jnp.int32).reshape(1, -1, _LANES)
    found = jnp.where(lanes == greatest[:, None, None], index, jnp.int32(size - 1))
    # XLA:CPU's maximum of a long row is not always NaN if the row contains one.
    missing = jnp.any(jnp.any(lanes != lanes, axis=1), axis=-1)
    return jnp.where(missing, jnp.int32(size - 1), jnp.min(jnp.min(found, axis=1), axis=-1))


def gaussian_sparsity(
    x: Float[Array, "*rows width"], threshold: float
) -> Float[Array, "*rows width"]:
    """Computes max(0, x - mean - deviation * threshold) of each row, in float32 (Gemma 3n)."""
    wide = x.astype(jnp.float32)
    mean = mean_of_row(wide)
    deviation = jnp.sqrt(mean_of_row(jnp.square(wide - mean)))
    least = mean + rounded(deviation * threshold)
    return jax.nn.relu(wide - least).astype(x.dtype)


def has_mass_threshold() -> bool:
    """Whether code traced here can use `mass_threshold`: a GPU with the Triton-style back end."""
    return has_triton_kernels("sampling")


def mass_threshold(
    order: UInt[Array, "rows numbers"],
    weights: Float[Array, "rows numbers"],
    mass: Float[Array, " rows"],
) -> UInt[Array, " rows"]:
    """Returns the largest threshold such that values from it on weigh at least `mass`; else 0."""
    # Imported lazily: Pallas is slow to import and only a GPU needs it.
    from kernels_pallas import topk_threshold

    return topk_threshold.mass_threshold(order, weights, mass, interpret=interpreted())
