"""Int8 keys: a long text's old keys, kept as bytes beside the KV cache for attention on CPUs.

Attention in integers (`jinfer/cpu/src/attention/attention_int8_numbers.h`) rounds the old keys of a
cache of 16-bit numbers to bytes. With these it reads bytes that it has rounded once, and gives the
same bits. `attention_int8_cache.h` has the layout.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jinfer.cpu.isa import own_isa
from jinfer.modelspec.quant_format import Kind
from jinfer.ops.backend import backend

LONG_TEXT = 1024  # tokens of a text that has no int8 keys yet; as in attention.h
_ISAS = ("avx512", "avx512bf16", "amx")
_SPLIT = 512  # SPLIT_KEYS of attention.h
_LANES = 16
_DIGEST = slice(8)  # bytes of a block's digest


def are_useful(key_dim: int, value_dim: int, window: int | None) -> bool:
    """Whether a cache of such vectors and with such a window gains by int8 keys.

    Without values the keys are read as values anyway; a short window has few old keys.
    """
    whole = value_dim > 0 and key_dim % _LANES == value_dim % _LANES == 0
    return whole and (window is None or window >= 4 * _SPLIT)


def abstract_int8_keys(
    blocks: int, heads: int, size: int, key_dim: int, kind: Kind
) -> jax.ShapeDtypeStruct | None:
    """The shape and type of int8 keys; None where this machine or the cache's format has none.

    Args:
        size: tokens of a block.
        kind: number format of the cache.
    """
    if kind not in (jnp.float16, jnp.bfloat16) or backend() != "cpu" or own_isa() not in _ISAS:
        return None
    columns = -(-key_dim // 64) * 64 * size
    ranges = -(-4 * key_dim // 64) * 64
    return jax.ShapeDtypeStruct((blocks, heads, 64 + columns + ranges), jnp.uint8)


def clear_int8_keys(int8_keys: Array, block: Any) -> Array:
    """Int8 keys after other writes to blocks than attention's; ids out of range are dropped."""
    return int8_keys.at[block, :, _DIGEST].set(jnp.uint8(0), mode="drop")
