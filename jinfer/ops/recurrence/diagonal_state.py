"""Diagonal recurrence h = a h + b: the parallel form in XLA operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array, lax

if TYPE_CHECKING:
    from jaxtyping import Float

DIAGONAL_CHUNK = 32  # tokens of which all states are held at a time


def diagonal_states(
    before: Float[Array, "states ..."],
    log_decay: Float[Array, "size ..."],
    x: Float[Array, "size ..."],
) -> Float[Array, "size ..."]:
    """The states after each token of a chunk, by an associative scan."""

    def combine(one: tuple[Array, Array], two: tuple[Array, Array]) -> tuple[Array, Array]:
        return one[0] * two[0], two[0] * one[1] + two[1]

    decays, sums = lax.associative_scan(combine, (jnp.exp(log_decay), x))
    return decays * before[None] + sums
