"""Attention over a cache, and the writing of new keys and values into it, in one custom call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from jinfer.cpu.build import register

_SYMBOL = "jinfer_attention"
_MOST_GROUP = 192  # query heads of a key head


class Coding(NamedTuple):
    """How the codes of a quantized cache stand for numbers; blocks are of 32."""

    bits: int
    levels: int
    per_code: int
    symmetric: bool


class Parts(NamedTuple):
    """Keys or values of a cache.

    Attributes:
        arrays: one of [slots, kv_heads, length, dim], or codes and numbers of each vector.
        dim: numbers of a vector.
    """

    arrays: tuple[Array, ...]
    dim: int


class Scores(NamedTuple):
    """How scores are changed; as `jinfer.ops.attention.ScoreRules`."""

    scale: float
    softcap: float | None = None
    window: int | None = None
    ahead: int | None = None
    sinks: Float[Array, " heads"] | None = None
    slopes: Float[Array, " heads"] | None = None


def supported(heads: int, kv_heads: int) -> bool:
    """Whether there is a custom call on this machine, and for so many heads."""
    return heads // kv_heads <= _MOST_GROUP and register(_SYMBOL)


def attention(
    q: Float[Array, "batch tokens heads dim"],
    positions: Int[Array, "batch tokens"],
    last: Int[Array, "batch tokens"],
    slot: Int[Array, ""],
    keys: Parts,
    values: Parts | None,
    coding: Coding | None,
    scores: Scores,
    new: tuple[Array, ...] | None = None,
) -> tuple[Float[Array, "batch tokens heads value_dim"], tuple[Array, ...], tuple[Array, ...]]:
    """Attention's output, and the arrays of keys and values.

    Args:
        values: None: the keys are the values too.
        coding: of a quantized cache.
        new: [batch, tokens, kv_heads, dim], keys and, unless shared, values of q's type, which are
            first put into the cache from each row's first position on. The cache's arrays are then
            changed in place: they must not be used afterwards.
    """
    cached = (*keys.arrays, *(values.arrays if values is not None else ()))
    numbers = (_floats(scores.sinks), _floats(scores.slopes))
    given = (q, positions, last, slot, *numbers, *(new or ()))
    value_dim = keys.dim if values is None else values.dim
    result = jax.ShapeDtypeStruct((*q.shape[:3], value_dim), q.dtype)
    kept = [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in cached] if new else []
    bits, levels, per_code, symmetric = coding or Coding(0, 0, 1, True)
    out, *changed = jax.ffi.ffi_call(
        _SYMBOL,
        [result, *kept],
        input_output_aliases={len(given) + i: 1 + i for i in range(len(kept))},
    )(
        *given,
        *cached,
        scale=np.float32(scores.scale),
        softcap=np.float32(scores.softcap or 0.0),
        window=np.int32(-1 if scores.window is None else scores.window),
        ahead=np.int32(-1 if scores.ahead is None else scores.ahead),
        written=bool(new),
        shared=values is None,
        bits=np.int32(bits),
        levels=np.int32(levels),
        per_code=np.int32(per_code),
        symmetric=symmetric,
        dim=np.int32(keys.dim),
        value_dim=np.int32(value_dim),
    )
    after: Sequence[Array] = changed or cached
    count = len(keys.arrays)
    return out, tuple(after[:count]), tuple(after[count:])


def _floats(numbers: Array | None) -> Array:
    return jnp.zeros(0, jnp.float32) if numbers is None else numbers.astype(jnp.float32)
