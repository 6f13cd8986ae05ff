"""Paged attention by the GPU kernels of `kernels_pallas`, which read the cache as stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jinfer.ops import disable_kernels, gpu_backend
from jinfer.ops.attention.kv_cache import Placement, Rows
from jinfer.ops.attention.partial_merge import Part
from jinfer.ops.backend import interpreted
from jinfer.quant.kv_vectors import QuantizedVectors

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from jinfer.ops.attention.mask_rules import ScoreRules
    from kernels_pallas.attention.batch import Queries, Scores
    from kernels_pallas.attention.kv_layout import Kept


def serves(keys: Rows, values: Rows | None, rules: ScoreRules) -> bool:
    """Whether the kernels are enabled and support these keys and values."""
    if not disable_kernels.kernels("attention"):
        return False
    from kernels_pallas.attention.paged_attention import takes

    kept = _kept(keys), None if values is None else _kept(values)
    return takes(*kept, gpu_backend.kind(), by_distance=rules.by_distance is not None)


def attend_gpu(
    q: Float[Array, "tokens heads head_dim"],
    keys: Rows,
    values: Rows | None,
    at: Placement,
    last: Int[Array, " tokens"],
    rules: ScoreRules,
) -> Float[Array, "tokens heads value_dim"]:
    """`jinfer.ops.attention.paged_attention.attend` by the GPU kernel.

    Args:
        values: None: the keys are the values too.
        rules: without a `bias` function.
    """
    # Imported lazily: Pallas is slow to import and only a GPU needs it.
    from kernels_pallas.attention.paged_attention import attend

    given = _given(q, keys, values, at, last, rules)
    return attend(*given, backend=gpu_backend.kind(), interpret=interpreted())


def attend_part_gpu(
    q: Float[Array, "tokens heads head_dim"],
    keys: Rows,
    values: Rows | None,
    at: Placement,
    last: Int[Array, " tokens"],
    rules: ScoreRules,
) -> Part:
    """Attention over the blocks in this pool; table entries may be -1. Without sinks."""
    from kernels_pallas.attention.paged_attention import attend_part

    given = _given(q, keys, values, at, last, rules)
    out, highest, total = attend_part(*given, backend=gpu_backend.kind(), interpret=interpreted())
    return Part(out, jnp.stack([highest, total], axis=-1))


def _given(
    q: Array, keys: Rows, values: Rows | None, at: Placement, last: Array, rules: ScoreRules
) -> tuple[Array, Kept, Kept | None, Queries, Scores]:
    """The kernel's operands."""
    from kernels_pallas.attention.batch import Queries, Scores

    low = jnp.zeros_like(at.positions)
    if rules.window is not None:
        low = at.positions - jnp.int32(rules.window - 1)
    if rules.ahead is not None:
        last = jnp.minimum(last, at.positions + jnp.int32(rules.ahead - 1))
    return (
        q,
        _kept(keys),
        None if values is None else _kept(values),
        Queries(at.rows, at.positions, low, last, at.tables),
        Scores(
            rules.scale,
            rules.softcap,
            rules.by_distance,
            rules.lowest,
            rules.slopes,
            rules.sinks,
        ),
    )


def _kept(rows: Rows) -> Kept:
    from kernels_pallas.attention.kv_layout import Kept

    if not isinstance(rows, QuantizedVectors):
        return Kept(rows)
    return Kept(rows.words, rows.scales, rows.format.levels, rows.width)
