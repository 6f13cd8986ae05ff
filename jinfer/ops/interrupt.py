"""Early exit from a compiled loop when the host raises a flag."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jinfer.cpu import interrupt_call as cpu
from jinfer.cpu.interrupt_call import Flag as Flag
from jinfer.ops.backend import has_cpu_calls

if TYPE_CHECKING:
    from jaxtyping import Bool, Int


def interrupted(flag: Int[Array, ""], step: Int[Array, ""]) -> Bool[Array, ""]:
    """Whether the host has raised a flag; False where a program cannot read it.

    Args:
        flag: its number; see `jinfer.cpu.interrupt_call.Flag`.
        step: the loop iteration about to begin.
    """
    if has_cpu_calls():
        return cpu.interrupted(flag, step)
    return jnp.bool_(False)
