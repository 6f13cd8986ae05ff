"""What the Mosaic GPU kernels have in common."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu

plgpu: Any = mosaic_gpu  # whose types leave out what it exports
ROWS = 64  # of a product of a warp group
_SHARED = 231_000  # bytes of a multiprocessor
_MOST_STAGES = 4


def call(kernel: Any, name: str, out: Any, grid: dict[str, int], *, interpret: bool) -> Any:
    """A kernel of one warp group a program, as a function of arrays.

    Args:
        out: shapes of its results.
        grid: names of its axes and their sizes.
    """
    options = {"interpret": plgpu.InterpretGPUParams()} if interpret else {}
    return plgpu.kernel(
        kernel,
        out_type=out,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name=name,
        **options,
    )


def order(columns: int, bits: int) -> tuple[Any, ...]:
    """How rows of so many numbers lie in shared memory; factors of a product must lie alike."""
    swizzle = plgpu.find_swizzle(columns * bits, "tile")
    return plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle)


def stages(each: int, beside: int) -> int:
    """How many tiles of `each` bytes shared memory holds beside all else; of two programs' rather.

    Fewer than two where not even one program has room for them.
    """
    for programs in (2, 1):
        count = (_SHARED // programs - beside) // each
        if count >= 2:
            return int(min(count, _MOST_STAGES))
    return 1


def wide(row: jax.Array, columns: int) -> jax.Array:
    """A number of each row in all its columns."""
    return jax.lax.broadcast_in_dim(row, (row.shape[0], columns), (0,))
