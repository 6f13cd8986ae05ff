"""What a model's weights are multiplied with, while it reads a calibration text.

A weight is wrapped into a `Recorded` and takes its place among the model's parameters. Where it is
multiplied, `record` adds to sums that are kept in mutable arrays (`jax.Ref`): the compiled programs
stay as they are, nothing goes through the host, and equal layers still share one program. So a
tool does

    leaves = [tap(leaf, "products") if name in wanted else leaf for name, leaf in ...]
    run the forward pass over the text, without padding
    inputs = leaves[i].inputs()
    quantize(weight, format, method="feedback", hessian=inputs.mean)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jinfer.xla import trees

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

# "squares" of each input, or "products" of all pairs: importance, or what error feedback needs.
Kind = Literal["squares", "products"]


class Inputs(NamedTuple):
    """The inputs that a weight met.

    Attributes:
        mean: of the squares, [*stack, inputs], or of the products, [*stack, inputs, inputs].
        rows: how many there were, [*stack]. Where there were none, the mean is 0.
    """

    mean: np.ndarray
    rows: np.ndarray

    @property
    def importance(self) -> np.ndarray:
        """Mean square of each input: [*stack, inputs]."""
        if self.mean.ndim == self.rows.ndim + 1:
            return self.mean
        return np.diagonal(self.mean, axis1=-2, axis2=-1)


@trees.register
@dataclass(frozen=True)
class Recorded:
    """A weight whose inputs are recorded.

    Attributes:
        weight: [*stack, outputs, inputs], an array or any kind of tensor.
        sums: a `jax.Ref`, float32 [*stack, inputs] or [*stack, inputs, inputs].
        count: a `jax.Ref`, float32 [*stack]: rows in the sums.
    """

    weight: Any
    sums: Any
    count: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix, without padding."""
        return tuple(self.weight.shape)

    def __getitem__(self, index: Any) -> Recorded:
        """The tensor itself, for `...`: Flax reads parameters so."""
        if index is not Ellipsis:
            raise IndexError("a tapped weight is not cut; `record` takes the index of a stack")
        return self

    def inputs(self) -> Inputs:
        """What was recorded so far."""
        sums, count = np.asarray(self.sums[...]), np.asarray(self.count[...])
        some = np.maximum(count, 1).reshape(count.shape + (1,) * (sums.ndim - count.ndim))
        return Inputs(sums / some, count)


def tap(weight: Any, kind: Kind) -> Recorded:
    """Wraps a weight [*stack, outputs, inputs], with nothing recorded yet."""
    *stack, _, inputs = weight.shape
    width = (inputs, inputs) if kind == "products" else (inputs,)
    return Recorded(
        weight,
        jax.new_ref(jnp.zeros((*stack, *width), jnp.float32)),
        jax.new_ref(jnp.zeros(tuple(stack), jnp.float32)),
    )


def records(tree: Any) -> bool:
    """Whether something in a tree is recorded."""
    leaves = trees.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Recorded))
    return any(isinstance(leaf, Recorded) for leaf in leaves)


def record(
    x: Float[Array, "*rows inputs"],
    weights: Sequence[Any],
    index: Any = ...,
    where: Bool[Array | np.ndarray, "*rows"] | None = None,
) -> list[Any]:
    """Adds rows to the sums of those weights that are `Recorded`.

    Args:
        x: what all of the weights are about to be multiplied with.
        index: of the matrix in a stack that is multiplied.
        where: rows that count; None: all.

    Returns:
        The weights without taps.
    """
    taps = [weight for weight in weights if isinstance(weight, Recorded)]
    if taps:
        rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
        count = jnp.float32(rows.shape[0])
        if where is not None:
            kept = jnp.asarray(where.reshape(-1), jnp.float32)
            rows, count = rows * kept[:, None], jnp.sum(kept)
        for tapped in taps:
            # Several taps on the same rows compute this once: XLA finds the common expression.
            if tapped.sums.ndim == tapped.count.ndim + 2:
                more = jnp.dot(rows.T, rows, precision=lax.Precision.HIGHEST)
            else:
                more = jnp.sum(rows * rows, axis=0)
            tapped.sums[index] += more
            tapped.count[index] += count
    return [weight.weight if isinstance(weight, Recorded) else weight for weight in weights]
