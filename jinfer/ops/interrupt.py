"""Whether the host wants a running loop to end early."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jinfer.cpu import interrupt_call as cpu
from jinfer.cpu.interrupt_call import Flag as Flag
from jinfer.ops.backend import backend

if TYPE_CHECKING:
    from jaxtyping import Bool, Int


def interrupted(flag: Int[Array, ""], step: Int[Array, ""]) -> Bool[Array, ""]:
    """Whether the host has raised a flag; where a program cannot see it, it has not.

    Args:
        flag: its number: see `jinfer.cpu.interrupt_call.Flag`.
        step: of the loop, that is about to begin.
    """
    if backend() == "cpu" and cpu.available():
        return cpu.interrupted(flag, step)
    return jnp.bool_(False)
