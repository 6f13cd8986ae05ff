"""Ends a loop of a running program early: the host raises a flag, and the loop looks at it."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jinfer.cpu import build_library

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

_FLAGS = 1024  # as in interrupt.cc; two that share one only end early more often
_numbers = count()


def available() -> bool:
    """Whether a program can be interrupted on this machine."""
    return build_library.register("jinfer_interrupted")


def interrupted(flag: Int[Array, ""], step: Int[Array, ""]) -> Bool[Array, ""]:
    """Whether a flag is raised when this step of a loop would begin."""
    return jax.ffi.ffi_call("jinfer_interrupted", jax.ShapeDtypeStruct((), jnp.bool_))(flag, step)


class Flag:
    """A flag that any thread may raise and lower.

    Attributes:
        number: what a program knows it by.
    """

    def __init__(self) -> None:
        self.number = next(_numbers) % _FLAGS

    def set(self, raised: bool) -> None:
        """Raises or lowers it. Where there is no library no program looks at it."""
        if (library := build_library.opened_already()) is not None:
            library.jinfer_raise(self.number, raised)
