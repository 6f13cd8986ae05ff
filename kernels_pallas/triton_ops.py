"""Pallas' Triton-style operations (None once JAX drops them), programmatic dependent launch (PDL).

JAX has deprecated its Triton-style back end. PDL lets the next kernel begin while this kernel still
runs: from Hopper on a kernel can be launched before its predecessor has ended (CUDA C++ Programming
Guide). Its programs become resident and wait at their first instruction, where XLA puts
`griddepcontrol.wait`, until the predecessor's results are visible. By default a kernel allows its
successor to launch when its programs end; allowing it at their start hides the launch latency.
Programs allow it after their own wait, so that a successor finds all results but this kernel's.
"""

from __future__ import annotations

import importlib
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

type Backend = Literal["triton", "xla"]


def _operations() -> Any:
    try:
        return importlib.import_module("jax.experimental.pallas.triton")
    except ImportError:
        return None


plt = _operations()
DEFAULT: Backend = "xla" if plt is None else "triton"


_HOPPER = 90  # compute capability
# Waits again, in case XLA ever places its own wait later.
_PDL = "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, $1;"


def first_program_id(*, asm: bool) -> Any:
    """`pl.program_id(0)`, allowing the next kernel to launch.

    The program must depend on the result, or the instruction is optimized away.

    Args:
        asm: whether the kernel is compiled for a GPU.
    """
    number = pl.program_id(0)
    if not asm or not _can_begin_early():
        return number
    (result,) = plt.elementwise_inline_asm(
        _PDL,
        args=[jnp.full((1,), number)],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct((1,), jnp.int32)],
    )
    return result.reshape(())


def _can_begin_early() -> bool:
    try:
        return bool(plt.get_gpu_info().compute_capability >= _HOPPER)
    except ValueError:  # no GPU known to JAX
        return False
