"""jaxtyping's names for annotations: `Float[Array, "rows columns"]`.

They are for readers and type checkers. Nobody looks at them while a program runs, and jaxtyping
brings along what Python has for tests and for servers: one start in thirty would go to that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.typing import DTypeLike as DTypeLike
    from jaxtyping import Bool as Bool
    from jaxtyping import Float as Float
    from jaxtyping import Int as Int
    from jaxtyping import UInt as UInt
    from jaxtyping import UInt8 as UInt8
else:
    DTypeLike = Any

    class _Array:
        def __class_getitem__(cls, _array_and_axes: object) -> type:
            return cls

    class Bool(_Array):
        """Truths."""

    class Float(_Array):
        """Floating point numbers of any width."""

    class Int(_Array):
        """Integers with a sign."""

    class UInt(_Array):
        """Integers without one."""

    class UInt8(_Array):
        """Bytes."""
