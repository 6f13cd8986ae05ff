"""Mosaic GPU helpers: kernel launch, shared-memory layouts and pipeline depth."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu

plgpu: Any = mosaic_gpu  # its type stubs lack some exports
ROWS = 64  # of a warp group's matmul
_SHARED = 231_000  # bytes per multiprocessor (SM)
_MOST_STAGES = 4


def mosaic_call(
    kernel: Any,
    name: str,
    out: Any,
    grid: dict[str, int],
    *,
    warp_groups: int = 1,
    interpret: bool,
) -> Any:
    """Wraps a kernel as a function of arrays.

    Args:
        out: shapes of its results.
        grid: names and sizes of its axes.
        warp_groups: of a program; with several, the axis "group" numbers them.
    """
    groups = {"num_threads": warp_groups, "thread_name": "group"} if warp_groups > 1 else {}
    options = {"interpret": plgpu.InterpretGPUParams()} if interpret else {}
    return plgpu.kernel(
        kernel,
        out_type=out,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name=name,
        **groups,
        **options,
    )


def shared_memory_transforms(columns: int, bits: int) -> tuple[Any, ...]:
    """Returns shared-memory transforms (tiling, swizzle) of rows of this width.

    Both operands of a matmul need the same transforms.
    """
    swizzle = plgpu.find_swizzle(columns * bits, "tile")
    return plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle)


def pipeline_stages(each: int, fixed_bytes: int) -> int:
    """Returns the pipeline stages of `each` bytes that fit into shared memory with `fixed_bytes`.

    Sized for two resident programs if possible; fewer than two stages if a single program does not
    fit.
    """
    for programs in (2, 1):
        count = (_SHARED // programs - fixed_bytes) // each
        if count >= 2:
            return int(min(count, _MOST_STAGES))
    return 1


def broadcast_columns(row: jax.Array, columns: int) -> jax.Array:
    """Broadcasts a column vector to all columns."""
    return jax.lax.broadcast_in_dim(row, (row.shape[0], columns), (0,))
