"""Calibration statistics: Hessians for GPTQ, and importance (llama.cpp: imatrix) of inputs.

A weight is wrapped into a `RecordedWeight` in place of the model's parameter. Where it is
multiplied, `record` adds the activations' squares or products to sums in mutable arrays
(`jax.Ref`): compiled programs stay as they are, nothing goes through the host, and equal layers
still share one program. So a tool does

    leaves = [record_inputs(leaf, "products") if name in names else leaf for name, leaf in ...]
    run the forward pass over the text, without padding
    inputs = leaves[i].inputs()
    quantize(weight, format, method="gptq", hessian=inputs.mean)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

# "squares" of each input: importance (imatrix); "products" of all pairs: Hessian for GPTQ.
Kind = Literal["squares", "products"]


class InputStats(NamedTuple):
    """Statistics of a weight's inputs.

    Attributes:
        mean: mean of the squares, [*stack, inputs], or of the products, [*stack, inputs, inputs].
        rows: number of input rows, [*stack]. If 0, the mean is 0.
    """

    mean: np.ndarray
    rows: np.ndarray

    @property
    def importance(self) -> np.ndarray:
        """Mean square of each input (imatrix): [*stack, inputs]."""
        if self.mean.ndim == self.rows.ndim + 1:
            return self.mean
        return np.diagonal(self.mean, axis1=-2, axis2=-1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecordedWeight:
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
        """Shape of the matrix, without padding."""
        return tuple(self.weight.shape)

    def __getitem__(self, index: Any) -> RecordedWeight:
        """Returns the tensor itself for `...`, as Flax reads parameters."""
        if index is not Ellipsis:
            raise IndexError("a tapped weight is not cut; `record` takes the index of a stack")
        return self

    def inputs(self) -> InputStats:
        """Returns the statistics recorded so far."""
        sums, count = np.asarray(self.sums[...]), np.asarray(self.count[...])
        divisor = np.maximum(count, 1).reshape(count.shape + (1,) * (sums.ndim - count.ndim))
        return InputStats(sums / divisor, count)


def record_inputs(weight: Any, kind: Kind) -> RecordedWeight:
    """Wraps a weight [*stack, outputs, inputs], with nothing recorded yet."""
    *stack, _, inputs = weight.shape
    width = (inputs, inputs) if kind == "products" else (inputs,)
    return RecordedWeight(
        weight,
        jax.new_ref(jnp.zeros((*stack, *width), jnp.float32)),
        jax.new_ref(jnp.zeros(tuple(stack), jnp.float32)),
    )


def is_recording(tree: Any) -> bool:
    """Whether a tree contains recorded weights."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, RecordedWeight))
    return any(isinstance(leaf, RecordedWeight) for leaf in leaves)


def record(
    x: Float[Array, "*rows inputs"],
    weights: Sequence[Any],
    index: Any = ...,
    where: Bool[Array | np.ndarray, "*rows"] | None = None,
) -> list[Any]:
    """Adds rows to the statistics of those weights that are `RecordedWeight`.

    Args:
        x: the rows that all of the weights are about to be multiplied by.
        index: the matrix of a stack that is multiplied.
        where: rows to record; None: all.

    Returns:
        The weights, unwrapped.
    """
    taps = [weight for weight in weights if isinstance(weight, RecordedWeight)]
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
    return [weight.weight if isinstance(weight, RecordedWeight) else weight for weight in weights]
