"""Attention by the GPU's kernel, which reads the cache as it is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jinfer.ops.cache import Rows
from jinfer.quant.vectors import QuantizedVectors

if TYPE_CHECKING:
    from jinfer.ops.score_rules import ScoreRules
    from kernels_pallas.kept import Kept


def serves(rows: Rows) -> bool:
    """Whether the kernel takes such keys or values."""
    return _kept(rows).tiled


def attend_gpu(
    q: Float[Array, "batch tokens heads head_dim"],
    keys: Rows,
    values: Rows | None,
    positions: Int[Array, "batch tokens"],
    last: Int[Array, "batch tokens"],
    slot: Int[Array, ""],
    rules: ScoreRules,
    *,
    interpret: bool = False,
) -> Float[Array, "batch tokens heads value_dim"]:
    """`jinfer.ops.attention.attend` by the kernel.

    Args:
        values: None: the keys are the values too.
        rules: without a bias.
        interpret: runs the kernel without a GPU, slowly.
    """
    # Imported here: half a second, which only those pay who have a GPU.
    from kernels_pallas.attention import Alibi, attend, with_sinks

    low = jnp.zeros_like(positions)
    if rules.window is not None:
        low = positions - jnp.int32(rules.window - 1)
    if rules.ahead is not None:
        last = jnp.minimum(last, positions + jnp.int32(rules.ahead - 1))
    part = attend(
        q,
        _kept(keys),
        None if values is None else _kept(values),
        slot + jnp.arange(q.shape[0], dtype=jnp.int32),
        low,
        last,
        scale=rules.scale,
        softcap=rules.softcap,
        alibi=None if rules.slopes is None else Alibi(rules.slopes, positions),
        interpret=interpret,
    )
    return with_sinks(part, rules.sinks).astype(q.dtype)


def _kept(rows: Rows) -> Kept:
    from kernels_pallas.kept import Kept

    if not isinstance(rows, QuantizedVectors):
        return Kept(rows)
    return Kept(rows.words, rows.scales, rows.format.levels, rows.width)
