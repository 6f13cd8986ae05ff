"""Argmax of rows: greedy sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jinfer.cpu import rowwise as cpu
from jinfer.ops.backend import has_cpu_calls

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_LANES = 64  # values reduced side by side (SIMD)


def argmax(x: Float[Array, "rows size"]) -> Int[Array, " rows"]:
    """The first index of each row's maximum; the last index if the row contains NaN."""
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
