"""Queries and keys turned before a quantized cache keeps the keys (QuaRot, arXiv 2404.00456).

A block of the cache has one scale, so a channel of the keys that is much larger than the others
leaves them few levels. An orthogonal matrix on both sides changes no score, and spreads such a
channel over its head. The matrix is a Hadamard matrix times a diagonal of signs: log2(size) sums
and differences a number. A head whose size is no power of two is transformed in parts that are:
80 as 64 and 16.

The signs are those of the Rudin-Shapiro sequence, so that channels which are all alike are spread
as well. What is orthogonal about the matrix, a factor of 1 / sqrt(size) on each side, is put into
two powers of two whose product is 1 / size: every operation is a sum of two numbers or exact, and
all backends give the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jinfer.cpu import rowwise as cpu
from jinfer.ops.backend import backend
from jinfer.quant.kv_vectors import QuantizedVectors

if TYPE_CHECKING:
    from jaxtyping import Float

PART = 512  # of a head that is transformed together, at most


def turned(
    q: Float[Array, "tokens heads head_dim"], k: Float[Array, "tokens kv_heads head_dim"], keys: Any
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "tokens kv_heads head_dim"]]:
    """Queries and keys as they are used with a pool of keys: transformed where it is quantized."""
    return turned_queries(q, keys), turned_keys(k, keys)


def turned_queries(
    q: Float[Array, "tokens heads head_dim"], keys: Any
) -> Float[Array, "tokens heads head_dim"]:
    """The queries of `turned`."""
    return hadamard(q, query=True) if isinstance(keys, QuantizedVectors) else q


def turned_keys(
    k: Float[Array, "tokens kv_heads head_dim"], keys: Any
) -> Float[Array, "tokens kv_heads head_dim"]:
    """The keys of `turned`."""
    return hadamard(k, query=False) if isinstance(keys, QuantizedVectors) else k


def hadamard(
    x: Float[Array, "tokens heads size"], *, query: bool
) -> Float[Array, "tokens heads size"]:
    """Each head transformed, in float32.

    Args:
        query: whether the power of two is that of queries, else that of keys.
    """
    if x.size and backend() == "cpu" and cpu.available():
        flat = x.astype(jnp.float32).reshape(x.shape[0], -1)
        y = cpu.hadamard(flat, size=x.shape[-1], query=query)
        return y.reshape(x.shape).astype(x.dtype)
    return hadamard_reference(x, query=query)


def hadamard_reference(
    x: Float[Array, "tokens heads size"], *, query: bool
) -> Float[Array, "tokens heads size"]:
    """The same in XLA's operations."""
    wide, done = x.astype(jnp.float32), list[Array]()
    begin = 0
    for size in parts(x.shape[-1]):
        part, apart = wide[..., begin : begin + size] * _factors(size, query), 1
        while apart < size:
            pairs = part.reshape(*part.shape[:-1], size // (2 * apart), 2, apart)
            a, b = pairs[..., 0, :], pairs[..., 1, :]
            part, apart = jnp.stack([a + b, a - b], axis=-2).reshape(part.shape), 2 * apart
        done.append(part)
        begin += size
    return jnp.concatenate(done, axis=-1).astype(x.dtype)


def parts(size: int) -> list[int]:
    """The powers of two that a head is transformed in, the largest first."""
    found = []
    while size:
        found.append(min(1 << (size.bit_length() - 1), PART))
        size -= found[-1]
    return found


def _factors(size: int, query: bool) -> Float[np.ndarray, "1 1 size"]:
    """What each number of a part is multiplied by first: a sign and a power of two."""
    odd = np.array([(i & (i >> 1)).bit_count() % 2 for i in range(size)])
    bits = size.bit_length() - 1
    halvings = bits - bits // 2 if query else bits // 2
    return np.where(odd, -1, 1).astype(np.float32)[None, None] * np.float32(2.0**-halvings)
