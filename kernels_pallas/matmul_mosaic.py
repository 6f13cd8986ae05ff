"""Products with packed matrices as Mosaic GPU kernels, on the layout of the Triton-style ones.

The numbers of blocks are spread over the columns by XLA before the kernel, because Mosaic has no
instruction for it yet; that costs a pass over them. Inputs are not split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from kernels_pallas import registers
from kernels_pallas.layout import Packed
from kernels_pallas.tiling import Tiling

plgpu: Any = mosaic_gpu  # whose types leave out what it exports
OUTPUTS = 64  # of a tile: the rows of a warp group's product
_INPUTS = 256  # of x in a tile that is copied at once


def product(
    x: Array,
    factors: Array,
    which: Array,
    matrices: Sequence[Packed],
    tiling: Tiling,
    *,
    gated: bool = False,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """See `matmul_triton.product`; all tiles of rows are for the same matrix.

    The result has one part, [1, rows, outputs].
    """
    rows = x.shape[0]
    padded = jnp.pad(x, ((0, -rows % tiling.rows), (0, 0), (0, 0), (0, 0)))
    results = [
        _one(padded, which[0, :1], matrix, tiling.rows, interpret)[:rows] * factors[:, None]
        for matrix in matrices
    ]
    if gated:
        results = [jax.nn.silu(results[0]) * results[1]]
    return tuple(result[None] for result in results)


def _one(x: Array, index: Array, packed: Packed, size: int, interpret: bool) -> Array:
    rows, superblocks, slices, width = x.shape
    p, bits = packed.per_code, packed.bits
    transposed = x.reshape(rows, -1).T
    numbers = lax.dynamic_index_in_dim(packed.numbers(), index[0], keepdims=False)
    spread = [part for half in range(p) for part in _spread(numbers, packed, half)]
    words = packed.half_words().reshape(-1, packed.outputs, superblocks * bits * width)
    copies = slices * width // _INPUTS

    def kernel(index_ref: Any, x_ref: Any, words_ref: Any, *refs: Any) -> None:
        *spread_refs, out_ref = refs
        first = jnp.minimum(lax.axis_index("n") * OUTPUTS, packed.outputs - OUTPUTS)
        outputs = pl.ds(first, OUTPUTS)
        columns = pl.ds(lax.axis_index("m") * size, size)
        index = index_ref[0]

        def run(total_ref: Any, staged: Any = None) -> None:
            def body(_: Any, words_tile: Any, *tiles: Any) -> None:
                parts, x_tiles = tiles[: 2 * p], tiles[2 * p :]
                half = [
                    registers.Numbers(parts[2 * h][...], parts[2 * h + 1][...]) for h in range(p)
                ]
                codes = [words_tile[:, pl.ds(t * width, width)] for t in range(bits)]
                for s, e, f in registers.fractions(codes, bits, asm=False):
                    for h, w in enumerate(registers.weights(f, half, packed.levels, asm=False)):
                        at = (16 * h + 2 * s + e) * width
                        if staged is not None:
                            staged[...] = w
                            plgpu.commit_smem()
                            w = staged
                        piece = x_tiles[at // _INPUTS].at[pl.ds(at % _INPUTS, width)]
                        plgpu.wgmma(total_ref, w, piece)
                        plgpu.wgmma_wait(0)

            def spec(shape: tuple[int, int], step: int, offset: int, columns: int) -> Any:
                return plgpu.BlockSpec(
                    shape,
                    (lambda k: (k * step + offset, 0)) if columns else (lambda k: (0, k)),
                    transforms=_transforms(shape[1] if columns else width),
                    memory_space=plgpu.SMEM,
                )

            plgpu.emit_pipeline(
                body,
                grid=(superblocks,),
                max_concurrent_steps=2,
                in_specs=[
                    spec((OUTPUTS, bits * width), 1, 0, 0),
                    *(spec((OUTPUTS, width), 1, 0, 0) for _ in spread),
                    *(spec((_INPUTS, size), copies, j, 1) for j in range(copies)),
                ],
            )(
                words_ref.at[index, outputs],
                *(ref.at[outputs] for ref in spread_refs),
                *[x_ref.at[:, columns]] * copies,
            )
            out_ref[outputs, columns] = total_ref[...]

        total = plgpu.ACC((OUTPUTS, size), jnp.float32)
        if interpret:  # which takes the left factor from shared memory only
            staged = plgpu.SMEM((OUTPUTS, width), jnp.float16, transforms=_transforms(width))
            pl.run_scoped(lambda s: pl.run_scoped(lambda t: run(t, s), total), staged)
        else:
            pl.run_scoped(run, total)

    options = {"interpret": plgpu.InterpretGPUParams()} if interpret else {}
    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((packed.outputs, rows), jnp.float32),
        grid=(-(-packed.outputs // OUTPUTS), rows // size),
        grid_names=("n", "m"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        **options,
    )
    return call(index, transposed, words, *spread).T


def _spread(numbers: Array, packed: Packed, half: int) -> list[Array]:
    """What a half's fractions are multiplied by and what is added, [outputs, superblocks * 2 G]."""
    width, count = 2 * packed.columns, 1 if packed.symmetric else 2
    shape = (*numbers.shape[:2], packed.per_code, -1, count)
    tile = numbers.reshape(shape)[:, :, half]  # [outputs, superblocks, blocks, count]
    each = width // tile.shape[2] // count
    tile = jnp.repeat(tile, each, axis=2).reshape(-1, width)
    prepared = registers.prepare(tile, packed.levels, packed.symmetric, half, asm=False)
    plus = jnp.zeros_like(tile) if prepared.plus is None else prepared.plus
    return [part.reshape(numbers.shape[0], -1) for part in (prepared.times, plus)]


def _transforms(columns: int) -> tuple[Any, ...]:
    swizzle = plgpu.find_swizzle(columns * 16, "tile")
    return plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)
