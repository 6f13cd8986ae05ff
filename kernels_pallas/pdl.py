"""Lets the next kernel of a GPU begin while this one still runs.

From Hopper on a kernel can be launched before the one it waits for has ended (programmatic
dependent launch, CUDA C++ Programming Guide): its programs take their places and wait in front of
their first instruction, where XLA has put `griddepcontrol.wait`, until all of the other's results
can be seen. Without being asked a kernel lets the next one begin when its programs end; asked for
at their start, the microsecond or so that a launch takes is gone. They ask after having waited
themselves, so that whoever begins early finds all but the results of this kernel done.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.triton_ops import plt

_HOPPER = 90  # compute capability
# Waits once more, in case that XLA ever has it done later than first of all.
_BEGIN = "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, $1;"


def first_program_id(*, asm: bool) -> Any:
    """`pl.program_id(0)`, and the next kernel may begin.

    What a program does must depend on the result, or nobody is told.

    Args:
        asm: whether the kernel is compiled for a GPU.
    """
    number = pl.program_id(0)
    if not asm or not _can_begin_early():
        return number
    (result,) = plt.elementwise_inline_asm(
        _BEGIN,
        args=[jnp.full((1,), number)],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct((1,), jnp.int32)],
    )
    return result.reshape(())


def _can_begin_early() -> bool:
    try:
        return bool(plt.get_gpu_info().compute_capability >= _HOPPER)
    except ValueError:  # none that JAX knows
        return False
