"""Scaled tensors: matrices of FP8 numbers (E4M3) with float32 scales, as checkpoints have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array

if TYPE_CHECKING:
    from jaxtyping import Float, Int

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_LEAST_BLOCK = 32  # inputs; a multiple of every vector's lanes
_NAN = 0x7F  # of E4M3, but for the sign


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaledTensor:
    """A matrix [outputs, inputs], or a stack of them: numbers[n, k] * scales[n, k // block].

    A block is a power of two of at least 32 inputs, or the row; which follows from the shapes.

    Attributes:
        numbers: float8_e4m3fn [*stack, outputs, inputs]; no NaN among them.
        scales: float32 [*stack, outputs, ceil(inputs / block)].
    """

    numbers: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return tuple(self.numbers.shape)

    @property
    def ndim(self) -> int:
        """Axes of the matrix."""
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """Type of the numbers."""
        return E4M3

    @property
    def block(self) -> int:
        """Inputs of a block."""
        inputs, blocks = self.shape[-1], self.scales.shape[-1]
        return block_of(inputs, blocks) or inputs

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(int(part.size) * part.dtype.itemsize for part in (self.numbers, self.scales))

    def __getitem__(self, index: Any) -> ScaledTensor:
        """Returns a matrix of a stack; `...`: the tensor itself."""
        if index is Ellipsis:
            return self
        if self.ndim < 3:
            raise IndexError("a single matrix has no stack to choose from; use take for rows")
        return jax.tree.map(lambda part: part[index], self)

    def dequantize(self, dtype: Any = np.float32) -> Float[Array, "*stack outputs inputs"]:
        """Dequantizes in float32, then converts to this type: the reference for the kernels."""
        xp: Any = np if isinstance(self.numbers, np.ndarray) else jnp
        scales = xp.repeat(self.scales, self.block, axis=-1)[..., : self.shape[-1]]
        return (self.numbers.astype(np.float32) * scales).astype(dtype)

    def take(self, rows: Int[Array, "*shape"], dtype: Any) -> Float[Array, "*shape inputs"]:
        """Looks up embeddings: rows of the matrix."""
        return ScaledTensor(self.numbers[rows], self.scales[rows]).dequantize(dtype)


def block_of(inputs: int, blocks: int) -> int | None:
    """Inputs of a block where a row has so many; None: there is no such power of two."""
    block = _LEAST_BLOCK
    while -(-inputs // block) > max(1, blocks):
        block *= 2
    return block if -(-inputs // block) == blocks else None


def abstract_scaled(shape: tuple[int, ...], blocks: int) -> ScaledTensor:
    """Returns a tensor of `jax.ShapeDtypeStruct`s."""
    scales = jax.ShapeDtypeStruct((*shape[:-1], blocks), np.float32)
    return ScaledTensor(jax.ShapeDtypeStruct(shape, E4M3), scales)


def scaled_tensor(numbers: np.ndarray, scales: np.ndarray) -> ScaledTensor:
    """Makes a tensor of these arrays; a block with a NaN gets a NaN scale."""
    bits = numbers.view(np.uint8) & _NAN
    if not (bits == _NAN).any():
        return ScaledTensor(numbers, scales)
    block = ScaledTensor(numbers, scales).block
    starts = np.arange(0, numbers.shape[-1], block)
    wrong = np.logical_or.reduceat(bits == _NAN, starts, axis=-1)
    return ScaledTensor(numbers, np.where(wrong, np.float32(np.nan), scales))


@np.errstate(all="ignore")  # NaN and infinity are values like others
def to_e4m3(values: Float[np.ndarray, "*stack outputs inputs"], like: ScaledTensor) -> ScaledTensor:
    """Rounds values to E4M3, with a scale for each block of `like`.

    A block's largest value becomes the largest number, 448.
    """
    max_e4m3 = np.float32(ml_dtypes.finfo(E4M3).max)
    starts = np.arange(0, values.shape[-1], like.block)
    largest = np.maximum.reduceat(np.abs(values), starts, axis=-1)
    scales = np.where(largest > 0, largest / max_e4m3, 1).astype(np.float32)
    factors = np.repeat(scales, like.block, axis=-1)[..., : values.shape[-1]]
    numbers = np.clip(values / factors, -max_e4m3, max_e4m3).astype(E4M3)
    return scaled_tensor(numbers, scales)
