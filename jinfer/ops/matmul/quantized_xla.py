"""Quantized matmul in XLA operations: fallbacks for any machine.

On a GPU without kernels a matrix is dequantized as a whole, and also where derivatives are needed;
the rest is written for XLA:CPU.

All forms keep the order of the packed words. A *lane* is one of the R * G adjacent words of a tile
and superblock; codes, block numbers and activations are brought to [tiles, superblocks, halves, 4
strips, lanes], so that every loop XLA:CPU generates runs over lanes and is vectorized. Other
orders, sums over the last axis, or one chain over all 32 codes of a word's column cost ten times as
much to run or to compile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array, lax

from jinfer.quant import QuantizedTensor
from jinfer.quant.bit_packing import PIECES
from jinfer.quant.quantized_tensor import SUPER

if TYPE_CHECKING:
    from jaxtyping import Float

_FEW_ROWS = 8  # above, dequantizing once is cheaper than for every row
_DECODED_BYTES = 1 << 20  # of float32 weights at a time, to stay in the L2 cache


def quantized_matmul_xla(
    x: Float[Array, "rows inputs"], weight: QuantizedTensor
) -> Float[Array, "rows outputs"]:
    """Computes x @ weight.T in plain XLA, for machines without custom calls or kernels.

    Activations stay in float32 for any `weight.activations`.
    """
    if weight.format.width == "16":  # fp16 numbers, which have no code pieces
        whole = weight.dequantize(jnp.float32)
        return jnp.matmul(x.astype(jnp.float32), whole.T, precision="highest")
    x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, weight.padded_inputs - weight.inputs)))
    if x.shape[0] == 1:
        return _one_row(x[0], weight)[None]
    if x.shape[0] <= _FEW_ROWS:
        # The barrier keeps operations that depend only on the weights inside the loop.
        return lax.map(lambda row: _one_row(*lax.optimization_barrier((row, weight))), x)
    return _many_rows(x, weight)


def dequantized_matmul(
    x: Float[Array, "rows inputs"], weight: QuantizedTensor
) -> Float[Array, "rows outputs"]:
    """Computes the same on a GPU: dequantizes the matrix to fp16 in memory, times x in fp16.

    Element-wise operations and one tensor-core matmul with float32 accumulation, without loops.
    """
    from kernels_pallas.matmul.round_fp16 import rounded_matmul

    return rounded_matmul(x, weight.dequantize(jnp.float16))


@jax.checkpoint
def differentiable_matmul(
    x: Float[Array, "rows inputs"], weight: QuantizedTensor
) -> Float[Array, "rows outputs"]:
    """Computes the same in float32 for any platform, differentiably.

    The gradient of x needs the matrix again: dequantizing it a second time avoids holding all
    layers in float32.
    """
    contracted = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, weight.dequantize(), contracted, precision=lax.Precision.HIGHEST)


def _one_row(x: Float[Array, " padded"], weight: QuantizedTensor) -> Float[Array, " outputs"]:
    """GEMV: element-wise operations, then sums; `dot` would dequantize the weights to memory."""
    tiles, superblocks, _, rows, columns = weight.words.shape
    p, parts, lanes = weight.format.per_code, _parts(weight), rows * columns
    x = jnp.transpose(x.reshape(superblocks, p, columns, 8, 4), (3, 0, 1, 4, 2))
    total = jnp.sum(x.reshape(parts, 8 // parts, *x.shape[1:]), axis=(1, 4))

    def per_lane(a: Array) -> Array:  # flat, so that XLA really changes the order in memory
        return jnp.broadcast_to(a[..., None, :], (*a.shape[:-1], rows, columns)).reshape(-1)

    x, total = lax.optimization_barrier((per_lane(x), per_lane(total)))
    x = x.reshape(8, 1, superblocks, p, 4, lanes)
    total = total.reshape(parts, 1, superblocks, p, lanes)
    sums: list[Array] = []
    for step in range(8):
        term = _values(weight, step) * x[step]
        if step % (8 // parts):
            sums[-1] = sums[-1] + term
        else:
            sums.append(term)
    # Each barrier ends a loop: fused, the operations after it would run for every strip, and those
    # before it for every term of a sum.
    sums = lax.optimization_barrier(sums)
    scale, base = _block_numbers(weight)
    y = jnp.zeros((), jnp.float32)
    for part, lanes_of in enumerate(sums):
        strips = (lanes_of[..., 0, :] + lanes_of[..., 1, :]) + (
            lanes_of[..., 2, :] + lanes_of[..., 3, :]
        )
        y = y + scale[part] * strips
        if base is not None:
            y = y + base[part] * total[part]
    y = jnp.sum(lax.optimization_barrier(y).reshape(tiles, superblocks * p, lanes), axis=1)
    y = jnp.sum(lax.optimization_barrier(y).reshape(tiles * rows, columns), axis=1)
    return y[: weight.outputs]


def _many_rows(
    x: Float[Array, "rows padded"], weight: QuantizedTensor
) -> Float[Array, "rows outputs"]:
    """GEMM: dequantizes some tiles at a time."""
    tiles, superblocks, _, rows, columns = weight.words.shape
    shape = (x.shape[0], superblocks, weight.format.per_code, columns, 8, 4)
    x = jnp.transpose(x.reshape(shape), (0, 4, 1, 2, 5, 3)).reshape(x.shape)
    count = min(tiles, max(1, _DECODED_BYTES // (4 * rows * weight.padded_inputs)))

    def part(number: Array, y: Array) -> Array:
        # The last part begins earlier, so that all have the same size.
        begin = jnp.minimum(number * jnp.int32(count), jnp.int32(tiles - count))
        cut = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, begin, count, 0), weight)
        decoded = _dequantized(lax.optimization_barrier(cut))
        product = lax.dot_general(
            x, decoded, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST
        )
        return lax.dynamic_update_slice_in_dim(y, product, begin * jnp.int32(rows), 1)

    y = jnp.zeros((x.shape[0], tiles * rows), jnp.float32)
    return lax.fori_loop(0, -(-tiles // count), part, y)[:, : weight.outputs]


def _dequantized(weight: QuantizedTensor) -> Float[Array, "outputs inputs"]:
    """All weights, with padding; inputs in the order step, superblock, half, strip, g."""
    tiles, _, _, rows, columns = weight.words.shape
    parts = _parts(weight)
    scale, base = lax.optimization_barrier(_block_numbers(weight))
    steps = []
    for step in range(8):
        part = step * parts // 8
        values = _values(weight, step) * scale[part, ..., None, :]
        steps.append(values if base is None else values + base[part, ..., None, :])
    # Materialized before R and the inputs are swapped: both at once is not vectorized.
    stacked = lax.optimization_barrier(jnp.stack(steps, axis=1))
    stacked = stacked.reshape(tiles, -1, rows, columns)
    return jnp.swapaxes(stacked, 1, 2).reshape(tiles * rows, -1)


def _parts(weight: QuantizedTensor) -> int:
    """Blocks that a column's codes belong to."""
    return 2 if weight.format.block == 16 else 1


def _values(weight: QuantizedTensor, step: int) -> Float[Array, "tiles superblocks halves 4 lanes"]:
    """The codes 4 * step + strip: the codes themselves, or their codebook values."""
    format = weight.format
    tiles, superblocks, bits, rows, columns = weight.words.shape
    words = weight.words.reshape(tiles, superblocks, bits, 1, 1, rows * columns)
    strip = jnp.arange(0, 32, 8, dtype=jnp.uint32).reshape(1, 1, 1, 4, 1)
    codes = jnp.uint32(0)
    for byte, low, width, at in PIECES[bits][step]:
        mask = jnp.uint32((1 << width) - 1)
        codes |= ((words[:, :, byte] >> (strip + jnp.uint32(low))) & mask) << jnp.uint32(at)
    codes = codes.astype(jnp.int32)  # for which there is a conversion to float32 in vectors
    if format.codebook is not None:
        return _looked_up(codes, format.codebook)
    if format.per_code == 1:
        return codes.astype(jnp.float32)
    # Both halves by one formula, without a choice: high, and codes - levels * high. The quotient
    # by multiplication, exact below 128: XLA has a signed division written out in many operations.
    half = jnp.arange(2, dtype=jnp.float32).reshape(1, 1, 2, 1, 1)
    high = ((codes * jnp.int32((1 << 11) // format.levels + 1)) >> jnp.int32(11)).astype(
        jnp.float32
    )
    return codes.astype(jnp.float32) * half + high * (1 - (format.levels + 1) * half)


def _looked_up(codes: Array, codebook: tuple[int, ...]) -> Array:
    """Codebook values by a tree of selects: XLA:CPU does not vectorize a gather."""
    values = [jnp.float32(value) for value in codebook]
    bit = 1
    while len(values) > 1:
        odd = (codes & jnp.int32(bit)) != 0
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [jnp.where(odd, second, first) for first, second in pairs]
        bit *= 2
    return values[0]


def _block_numbers(
    weight: QuantizedTensor,
) -> tuple[
    Float[Array, "parts tiles superblocks halves lanes"],
    Float[Array, "parts tiles superblocks halves lanes"] | None,
]:
    """Scale and base of each lane's block: a weight is scale * `_values` + base (None: scale only).

    A column has one block, or two parts in blocks of 16.
    """
    format = weight.format
    p, parts = format.per_code, _parts(weight)

    def per_lane(numbers: Array, block: int, which: int) -> Array:
        tiles, superblocks, _, rows, _ = weight.words.shape
        result = numbers[..., which].astype(jnp.float32)
        if (share := superblocks // result.shape[1]) > 1:  # superblocks of a block
            result, block = jnp.repeat(result, share, axis=1), block // share
        result = result[..., None]
        if block > 32:
            result = jnp.broadcast_to(result, (*result.shape[:-1], block // 32))
        inner = 2 if block == 16 else 1
        result = result.reshape(tiles, superblocks, rows, p, weight.columns, inner)
        result = jnp.transpose(result, (5, 0, 1, 3, 2, 4))
        result = result.reshape(inner, tiles, superblocks, p, rows * weight.columns)
        return jnp.broadcast_to(result, (parts, *result.shape[1:]))

    numbers = []
    for which in range(format.numbers):
        result = per_lane(weight.scales, format.block, which)
        if weight.steps is not None:
            result = result * per_lane(weight.steps, SUPER, which)
        numbers.append(result)
    if format.codebook is not None and format.symmetric:
        return numbers[0], None
    return numbers[0], numbers[0] * -format.zero if format.symmetric else numbers[1]
