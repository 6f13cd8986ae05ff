"""Inline PTX in Mosaic GPU kernels, on registers of two 16-bit numbers, as in Triton-style ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from kernels_pallas.matmul import unpack
from kernels_pallas.mosaic_common import plgpu

mgpu: Any = mosaic_gpu


@contextmanager
def mosaic_assembler() -> Iterator[None]:
    """Within the context `unpack` emits its PTX for a Mosaic kernel."""
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
