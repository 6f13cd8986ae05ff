"""Batch-invariant sums: a row's sum does not depend on how many other rows there are."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jinfer.ops.matmul.matmul import linear

if TYPE_CHECKING:
    from jaxtyping import Float


def add_in_order(terms: Iterable[Array]) -> Array:
    """The sum of arrays, added one after the other."""
    return reduce(add, terms)


def mean_of_row(x: Float[Array, "*rows size"]) -> Float[Array, "*rows 1"]:
    """The mean of each row, float32; as a product with ones, whose order of sums is fixed."""
    ones = jnp.ones((1, x.shape[-1]), jnp.float32)
    return linear(x.astype(jnp.float32), ones, None) / x.shape[-1]


def rounded(product: Array) -> Array:
    """The product, rounded before it is added to another one.

    A compiler may contract a product and a sum into a fused multiply-add, depending on the loop it
    generates, so a token's bits would depend on the batch size. The select, which never selects
    anything, prevents that.
    """
    return jnp.where(jnp.isnan(product), jnp.nan, product)
