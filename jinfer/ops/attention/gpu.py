"""Paged attention by the GPU kernels of `kernels_pallas`, which read the cache as stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jinfer.ops.attention.kv_cache import AttentionMetadata, KVPool
from jinfer.ops.attention.partial_merge import PartialAttention
from jinfer.ops.backend import interpreted, selected_backend
from jinfer.ops.disable_kernels import kernels_enabled
from jinfer.quant.kv_vectors import QuantizedVectors

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from jinfer.ops.attention.mask_rules import ScoreRules
    from kernels_pallas.attention.kv_layout import PackedKV
    from kernels_pallas.attention.paged_attention import QueryBatch, ScoreModifiers


def kernel_supports(keys: KVPool, values: KVPool | None) -> bool:
    """Whether the kernels are enabled and support these keys and values."""
    if not kernels_enabled("attention"):
        return False
    from kernels_pallas.attention.paged_attention import kernel_supports

    kept = _packed_kv(keys), None if values is None else _packed_kv(values)
    return kernel_supports(*kept, selected_backend())


def attend_gpu(
    q: Float[Array, "tokens heads head_dim"],
    keys: KVPool,
    values: KVPool | None,
    at: AttentionMetadata,
    last: Int[Array, " tokens"],
    rules: ScoreRules,
) -> Float[Array, "tokens heads value_dim"]:
    """Computes `jinfer.ops.attention.paged_attention.attend` by the GPU kernel.

    Args:
        values: None: the keys are the values too.
        rules: without a `bias` function.
    """
    # Imported lazily: Pallas is slow to import and only a GPU needs it.
    from kernels_pallas.attention.paged_attention import attend

    operands = _kernel_operands(q, keys, values, at, last, rules)
    return attend(*operands, backend=selected_backend(), interpret=interpreted())


def attend_partial_gpu(
    q: Float[Array, "tokens heads head_dim"],
    keys: KVPool,
    values: KVPool | None,
    at: AttentionMetadata,
    last: Int[Array, " tokens"],
    rules: ScoreRules,
) -> PartialAttention:
    """Computes attention over the blocks in this pool, without sinks; table entries may be -1."""
    from kernels_pallas.attention.paged_attention import attend_partial

    operands = _kernel_operands(q, keys, values, at, last, rules)
    out, highest, total = attend_partial(*operands, interpret=interpreted())
    return PartialAttention(out, jnp.stack([highest, total], axis=-1))


def _kernel_operands(
    q: Array,
    keys: KVPool,
    values: KVPool | None,
    at: AttentionMetadata,
    last: Array,
    rules: ScoreRules,
) -> tuple[Array, PackedKV, PackedKV | None, QueryBatch, ScoreModifiers]:
    """The kernel's operands."""
    from kernels_pallas.attention.paged_attention import QueryBatch, ScoreModifiers

    low = jnp.zeros_like(at.positions)
    if rules.window is not None:
        low = at.positions - jnp.int32(rules.window - 1)
    if rules.ahead is not None:
        last = jnp.minimum(last, at.positions + jnp.int32(rules.ahead - 1))
    return (
        q,
        _packed_kv(keys),
        None if values is None else _packed_kv(values),
        QueryBatch(at.rows, at.positions, low, last, at.tables),
        ScoreModifiers(
            rules.scale,
            rules.softcap,
            rules.by_distance,
            rules.lowest,
            rules.slopes,
            rules.sinks,
        ),
    )


def _packed_kv(rows: KVPool) -> PackedKV:
    from kernels_pallas.attention.kv_layout import PackedKV

    if not isinstance(rows, QuantizedVectors):
        return PackedKV(rows)
    return PackedKV(rows.words, rows.scales, rows.format.levels, rows.width)
