"""Sparse matrices of outlier weights, stored exactly in addition to a quantized matrix."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jinfer.quant.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_BYTES = 12  # per weight: row, column and value


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SparseTensor:
    """A sparse matrix [outputs, inputs], or a stack of them (COO).

    Attributes:
        rows: int32 [*stack, count], rising; `outputs` for unused entries.
        columns: int32 [*stack, count].
        values: float32 [*stack, count].
        outputs, inputs: shape of the matrix.
    """

    rows: Any
    columns: Any
    values: Any
    outputs: int = field(metadata={"static": True})
    inputs: int = field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(self.values.size) * _BYTES

    def dense(self) -> Float[Array, "*stack outputs inputs"]:
        """Returns the dense matrix, as a NumPy array if the parts are NumPy arrays."""
        stack = self.values.shape[:-1]
        parts = (self.rows, self.columns, self.values)
        rows, columns, values = (part.reshape(prod(stack), part.shape[-1]) for part in parts)
        size = (rows.shape[0], self.outputs, self.inputs)
        if isinstance(values, np.ndarray):
            full: Any = np.zeros(size, np.float32)
            matrix, which = np.nonzero(rows < self.outputs)
            index = matrix, rows[matrix, which], columns[matrix, which]
            np.add.at(full, index, values[matrix, which])
        else:
            matrix = jnp.arange(rows.shape[0])[:, None]
            full = jnp.zeros(size, jnp.float32).at[matrix, rows, columns].add(values, mode="drop")
        return full.reshape(*stack, self.outputs, self.inputs)

    def product(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows outputs"]:
        """Computes x @ matrix.T in float32, for a single matrix, not a stack."""
        flat = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
        products = flat[:, self.columns] * self.values[None]
        sums = jax.ops.segment_sum(products.T, self.rows, self.outputs, indices_are_sorted=True)
        return sums.T.reshape(*x.shape[:-1], self.outputs)

    def take(self, rows: Int[Array, "*shape"]) -> Float[Array, "*shape inputs"]:
        """Returns dense rows of the matrix."""
        flat, columns, values = (
            rows.reshape(-1),
            jnp.asarray(self.columns),
            jnp.asarray(self.values),
        )
        begin, end = (jnp.searchsorted(self.rows, flat, side=side) for side in ("left", "right"))
        count = end - begin
        zeros = jnp.zeros((flat.size, self.inputs), jnp.float32)
        if not values.size:
            return zeros.reshape(*rows.shape, self.inputs)

        def add(i: Array, result: Array) -> Array:
            """Adds the i-th weight of each row."""
            at = jnp.where(i < count, begin + i, 0)
            more = jnp.where(i < count, values[at], 0.0)
            return result.at[jnp.arange(flat.size), columns[at]].add(more)

        sums = lax.fori_loop(0, jnp.max(count, initial=0), add, zeros)
        return sums.reshape(*rows.shape, self.inputs)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OutlierTensor:
    """A matrix [outputs, inputs], or a stack of them: the sum of a quantized and a sparse one.

    The sum is exact where the sparse matrix is not 0.
    """

    rounded: QuantizedTensor
    outliers: SparseTensor

    @property
    def stack(self) -> tuple[int, ...]:
        """Leading axes: experts."""
        return self.rounded.stack

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, without padding."""
        return self.rounded.shape

    @property
    def outputs(self) -> int:
        """Rows."""
        return self.rounded.outputs

    @property
    def inputs(self) -> int:
        """Columns."""
        return self.rounded.inputs

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.rounded.nbytes + self.outliers.nbytes

    def __getitem__(self, index: Any) -> OutlierTensor:
        """Returns a matrix of a stack; `...`: the tensor itself."""
        if index is Ellipsis:
            return self
        if not self.stack:
            raise IndexError("a single matrix has no stack to choose from; use take for rows")
        return jax.tree.map(lambda part: part[index], self)

    def dequantize(self, dtype: Any = np.float32) -> Float[Array, "*stack outputs inputs"]:
        """Dequantizes the matrix."""
        return (self.rounded.dequantize() + self.outliers.dense()).astype(dtype)

    def take(self, rows: Int[Array, "*shape"], dtype: Any) -> Float[Array, "*shape inputs"]:
        """Looks up embeddings: dequantized rows of the matrix."""
        return (self.rounded.take(rows, jnp.float32) + self.outliers.take(rows)).astype(dtype)


def outlier_count(shape: tuple[int, ...], share: float) -> int:
    """Number of outliers of each matrix [*stack, outputs, inputs]."""
    return round(share * shape[-2] * shape[-1])


def abstract_outliers(rounded: QuantizedTensor, count: int) -> OutlierTensor:
    """Returns an `OutlierTensor` of `jax.ShapeDtypeStruct`s with `count` outliers per matrix."""
    of = (*rounded.stack, count)
    whole, real = jax.ShapeDtypeStruct(of, np.int32), jax.ShapeDtypeStruct(of, np.float32)
    sparse = SparseTensor(whole, whole, real, rounded.outputs, rounded.inputs)
    return OutlierTensor(rounded, sparse)


def to_sparse(values: np.ndarray, where: np.ndarray, count: int) -> SparseTensor:
    """Converts the masked values of a matrix to a sparse matrix of NumPy arrays.

    Args:
        values: [outputs, inputs].
        where: bool [outputs, inputs], true at most `count` times.
    """
    rows, columns = np.nonzero(where)
    more = (0, count - len(rows))
    return SparseTensor(
        np.pad(rows.astype(np.int32), more, constant_values=values.shape[0]),
        np.pad(columns.astype(np.int32), more),
        np.pad(values[rows, columns].astype(np.float32), more),
        *values.shape,
    )
