"""Inline PTX in Mosaic GPU kernels, on registers of two 16-bit numbers, as in Triton kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from kernels_pallas.matmul import unpack
from kernels_pallas.mosaic_common import plgpu

mgpu: Any = mosaic_gpu


@contextmanager
def mosaic_assembler() -> Iterator[None]:
    """Makes `unpack` emit its PTX for a Mosaic kernel within the context."""
    token = unpack.ASSEMBLER.set(ptx)
    try:
        yield
    finally:
        unpack.ASSEMBLER.reset(token)


def ptx(body: str, args: Sequence[Array]) -> Array:
    """See `unpack.ASSEMBLER`; arrays are [64, columns] in the layout of tensor cores."""
    layout = plgpu.Layout.WGMMA
    constraints = ",".join(["=r"] + ["r"] * len(args))

    @plgpu.inline_mgpu(
        arg_types=(layout,) * len(args),
        return_type=plgpu.ShapeDtypeStruct(args[0].shape, jnp.float16, layout),
    )
    def run(_: Any, *arrays: Any) -> Any:
        word = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), ir.F16Type.get())
        results = np.empty_like(arrays[0].registers)
        for place in np.ndindex(results.shape):
            words = [llvm.bitcast(word, array.registers[place]) for array in arrays]
            result = llvm.inline_asm(word, words, "{" + body + "}", constraints)
            results[place] = llvm.bitcast(pair, result)
        return mgpu.FragmentedArray(_registers=results, _layout=arrays[0].layout, _is_signed=None)

    result: Array = run(*args)
    return result


def fence_async() -> None:
    """Orders a warp group's writes to global memory before asynchronous copies that read them."""

    @plgpu.inline_mgpu()
    def run(_: Any) -> None:
        llvm.inline_asm(None, [], "fence.proxy.async.global;", "", has_side_effects=True)

    run()


def arranged_store(ref: Any, row: Array) -> None:
    """Writes a row in the order of `weight_layout.arrange_inputs`.

    Args:
        ref: float16 [superblocks, 1024] in global memory, its last axis contiguous.
        row: float32 [superblocks * 1024], in four consecutive numbers a thread.
    """
    layout = plgpu.Layout.WG_STRIDED(row.shape, vec_size=4)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def run(_: Any, to: Any, numbers: Any) -> None:
        index = ir.IndexType.get()

        def const(value: int) -> Any:
            return mgpu.utils.c(value, index)

        half = ir.F16Type.get()
        places = numbers.layout.linear_thread_idxs()
        for first, four in zip(places, numbers.registers.flat, strict=True):
            # Input 32 g + 4 s + 2 h + e; a thread has all h and e.
            superblock, place = arith.divui(first, const(1024)), arith.remui(first, const(1024))
            g, s = (
                arith.divui(place, const(32)),
                arith.remui(arith.divui(place, const(4)), const(8)),
            )
            halves = arith.truncf(ir.VectorType.get((4,), half), four)
            for e in range(2):
                both = vector.shuffle(halves, halves, [e, 2 + e])
                slice_ = arith.addi(arith.muli(s, const(2)), const(e))
                at = arith.addi(arith.muli(slice_, const(64)), arith.muli(g, const(2)))
                vector.store(both, to, [superblock, at])

    run(ref, row)


def transposed_store(ref: Any, tile: Array) -> None:
    """Writes a tile [64, 8] as [8, 64].

    Args:
        ref: float32 in global memory.
        tile: in the layout of tensor cores, where a thread has two columns of a row.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def run(_: Any, to: Any, numbers: Any) -> None:
        places = numbers.layout.thread_idxs(numbers.shape)
        for (row, column), pair in zip(places, numbers.registers.flat, strict=True):
            for n in range(2):
                number = vector.extract(pair, dynamic_position=[], static_position=[n])
                at = arith.addi(column, mgpu.utils.c(n, ir.IndexType.get()))
                memref.store(number, to, [at, row])

    run(ref, tile)
