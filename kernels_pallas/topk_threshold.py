"""Top-k and top-p threshold kernel: radix select over a row's weights, without sorting.

The bits of the threshold are found four at a time, from the highest. The programs of a kernel each
take a piece of a row and sum the weights not below 15 candidates; the next kernel adds up the
pieces in order and continues from the chosen candidate. A vocabulary takes nine short kernels;
XLA's bisection takes four for each of 32 bits.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from kernels_pallas.triton_ops import first_program_id, plt

if TYPE_CHECKING:
    from jaxtyping import Float, UInt

_BITS = 4  # of a digit
_DIGITS = 1 << _BITS
_PIECES = 32  # of a row
_OF_A_WARP = 1024  # numbers


def mass_threshold(
    order: UInt[Array, "rows numbers"],
    weights: Float[Array, "rows numbers"],
    mass: Float[Array, " rows"],
    *,
    interpret: bool = False,
) -> UInt[Array, " rows"]:
    """Returns the largest threshold such that values from it on weigh at least `mass`; else 0.

    Args:
        order: uint32 keys that are compared.
        weights: float32, not negative.
    """
    rows, numbers = order.shape
    tile = max(_OF_A_WARP, 1 << (-(-numbers // _PIECES) - 1).bit_length())
    known = jnp.zeros((rows,), jnp.uint32)
    sums = jnp.zeros((rows, _PIECES, _DIGITS), jnp.float32)
    for place in range(32 - _BITS, -_BITS - 1, -_BITS):
        known, sums = pl.pallas_call(
            functools.partial(_kernel, place=place, tile=tile, asm=not interpret),
            out_shape=[
                jax.ShapeDtypeStruct(known.shape, known.dtype),
                jax.ShapeDtypeStruct(sums.shape, sums.dtype),
            ],
            grid=(rows, 1 if place < 0 else _PIECES),
            compiler_params=plt.CompilerParams(num_warps=tile // _OF_A_WARP, num_stages=1),
            interpret=interpret,
            name="find_digit",
        )(order, weights, mass, known, sums)
    return known


def _kernel(
    order_ref: Any,
    weights_ref: Any,
    mass_ref: Any,
    known_ref: Any,
    before_ref: Any,
    out_ref: Any,
    sums_ref: Any,
    *,
    place: int,
    tile: int,
    asm: bool,
) -> None:
    row, piece = first_program_id(asm=asm), pl.program_id(1)
    known = known_ref[row]
    if place < 32 - _BITS:
        # Higher candidates weigh no more, so the candidates that hold come first.
        held = jnp.sum(before_ref[row, :, :], axis=0) >= mass_ref[row]
        held &= lax.iota(jnp.int32, _DIGITS) > 0
        digit: Array = jnp.sum(held.astype(jnp.int32)).astype(jnp.uint32)
        known |= jnp.left_shift(digit, np.uint32(place + _BITS))

    @pl.when(piece == 0)
    def note() -> None:
        out_ref[row] = known

    if place < 0:
        return
    at = piece * tile + lax.iota(jnp.int32, tile)
    inside = at < order_ref.shape[1]
    order = plt.load(order_ref.at[row, at], mask=inside, other=np.uint32(0))
    weights = plt.load(weights_ref.at[row, at], mask=inside, other=np.float32(0))
    for number in range(1, _DIGITS):
        candidate = known | np.uint32(number << place)
        there = jnp.where(order >= candidate, weights, np.float32(0))
        sums_ref[row, piece, number] = jnp.sum(there)
