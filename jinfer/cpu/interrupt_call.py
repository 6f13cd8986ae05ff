"""Interrupts: the host raises a flag that the loop of a running program polls, to end it early."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jinfer.cpu import build_library

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

_FLAGS = 1024  # as in interrupt.cc; sharing a flag only ends a loop early more often
_numbers = count()


def interrupted(flag: Int[Array, ""], step: Int[Array, ""]) -> Bool[Array, ""]:
    """Whether a flag is raised, asked before a step of a loop.

    Args:
        flag: `Flag.number`.
        step: the loop's counter. With it the call cannot be hoisted out of the loop.
    """
    result = jax.ShapeDtypeStruct((), jnp.bool_)
    return build_library.custom_call("jinfer_interrupted", result)(flag, step)


class Flag:
    """A flag that any thread may raise and lower.

    Attributes:
        number: identifies the flag in programs.
    """

    def __init__(self) -> None:
        self.number = next(_numbers) % _FLAGS

    def set(self, raised: bool) -> None:
        """Raises or lowers the flag; does nothing without a library, as no program polls then."""
        if (library := build_library.opened_already()) is not None:
            library.jinfer_set_interrupt(self.number, raised)
