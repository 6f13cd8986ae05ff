"""QuaRot (Hadamard): rotates queries and keys before keys are quantized (arXiv 2404.00456).

A block of the KV cache has one scale, so a key channel much larger than the others leaves those few
levels. An orthogonal matrix applied to both queries and keys changes no score and spreads such a
channel over its head. The matrix is a Hadamard matrix times a diagonal of signs: log2(size)
additions and subtractions per number. A head whose size is not a power of two is transformed in
parts: 80 as 64 and 16.

The signs are the Rudin-Shapiro sequence, so that equal channels are spread too. The normalization,
1 / sqrt(size) on each side, becomes two powers of two whose product is 1 / size: every operation is
a sum of two numbers or exact, and all back ends give the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jinfer.cpu import rowwise as cpu
from jinfer.ops.backend import has_cpu_calls
from jinfer.quant.kv_vectors import QuantizedVectors

if TYPE_CHECKING:
    from jaxtyping import Float

LARGEST_TRANSFORM = 512  # largest part of a head transformed at once


def rotate_qk(
    q: Float[Array, "tokens heads head_dim"], k: Float[Array, "tokens kv_heads head_dim"], keys: Any
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "tokens kv_heads head_dim"]]:
    """Rotates queries and keys if the pool of keys is quantized."""
    return rotate_queries(q, keys), rotate_keys(k, keys)


def rotate_queries(
    q: Float[Array, "tokens heads head_dim"], keys: Any
) -> Float[Array, "tokens heads head_dim"]:
    """Rotates queries as `rotate_qk` does."""
    return hadamard(q, query=True) if isinstance(keys, QuantizedVectors) else q


def rotate_keys(
    k: Float[Array, "tokens kv_heads head_dim"], keys: Any
) -> Float[Array, "tokens kv_heads head_dim"]:
    """Rotates keys as `rotate_qk` does."""
    return hadamard(k, query=False) if isinstance(keys, QuantizedVectors) else k


def hadamard(
    x: Float[Array, "tokens heads size"], *, query: bool
) -> Float[Array, "tokens heads size"]:
    """Transforms each head, in float32.

    Args:
        query: whether to scale by the power of two of queries or of keys.
    """
    if x.size and has_cpu_calls():
        flat = x.astype(jnp.float32).reshape(x.shape[0], -1)
        y = cpu.hadamard(flat, size=x.shape[-1], query=query)
        return y.reshape(x.shape).astype(x.dtype)
    return hadamard_reference(x, query=query)


def hadamard_reference(
    x: Float[Array, "tokens heads size"], *, query: bool
) -> Float[Array, "tokens heads size"]:
    """`hadamard` in XLA operations."""
    wide, done = x.astype(jnp.float32), list[Array]()
    begin = 0
    for size in transform_sizes(x.shape[-1]):
        part, apart = wide[..., begin : begin + size] * _factors(size, query), 1
        while apart < size:
            pairs = part.reshape(*part.shape[:-1], size // (2 * apart), 2, apart)
            a, b = pairs[..., 0, :], pairs[..., 1, :]
            part, apart = jnp.stack([a + b, a - b], axis=-2).reshape(part.shape), 2 * apart
        done.append(part)
        begin += size
    return jnp.concatenate(done, axis=-1).astype(x.dtype)


def transform_sizes(size: int) -> list[int]:
    """Returns the powers of two that a head is split into, largest first."""
    found = []
    while size:
        found.append(min(1 << (size.bit_length() - 1), LARGEST_TRANSFORM))
        size -= found[-1]
    return found


def _factors(size: int, query: bool) -> Float[np.ndarray, "1 1 size"]:
    """Returns each number's factor: a sign times a power of two."""
    odd = np.array([(i & (i >> 1)).bit_count() % 2 for i in range(size)])
    bits = size.bit_length() - 1
    halvings = bits - bits // 2 if query else bits // 2
    return np.where(odd, -1, 1).astype(np.float32)[None, None] * np.float32(2.0**-halvings)
