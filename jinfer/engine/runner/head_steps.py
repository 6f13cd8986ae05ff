"""EAGLE/MTP heads: compiled steps of a draft head that reads its target's hidden states.

The head is one token ahead: at position i it reads token i + 1 and the target's hidden states of
token i. For further draft tokens it reads those that it has proposed, and its own hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from jinfer.engine.runner.device_state import State
from jinfer.engine.runner.draft_steps import no_proposals, propose_next
from jinfer.engine.runner.flat_batch import Tables, make_flat_batch
from jinfer.engine.runner.steps import Leaves, decode_loop
from jinfer.nn.abstract_model import AbstractModel
from jinfer.ops.attention.kv_cache import BLOCK, Cache, LayerCache, cache_group
from jinfer.quant.kv_vectors import QuantizedVectors

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def gather_taps(
    layers: Sequence[LayerCache],
    rows: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    tables: Tables,
) -> Float[Array, "tokens width"]:
    """The target's cached hidden states of some tokens, concatenated over its tapped layers.

    Args:
        layers: the parts of the KV cache that have them.
        rows: row of the block tables for each token; -1: padding.
        positions: position of each token in its sequence.
        tables: the target's block tables.
    """
    at = jnp.maximum(positions, 0)
    block = tables[cache_group(None)][jnp.maximum(rows, 0), at // BLOCK]

    def of(layer: LayerCache) -> Array:
        vectors = jax.tree.map(lambda part: part[block, 0, at % BLOCK], layer.keys)
        if isinstance(vectors, QuantizedVectors):
            return vectors.dequantize()
        return vectors.astype(jnp.float32)

    return jnp.concatenate([of(layer) for layer in layers], axis=-1)


def prefill_head(
    model: AbstractModel,
    leaves: Leaves,
    cache: Cache,
    state: State,
    rows: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    tables: Tables,
    vectors: Float[Array, "tokens width"],
) -> Cache:
    """Prefill of a head: its KV cache with some known tokens computed.

    Args:
        rows, positions, tables: as of `steps.begin_logits`.
        vectors: the target's hidden states of the token before each.
    """
    batch, _ = make_flat_batch(state, rows, positions, tables, jnp.full(1, -1, jnp.int32))
    module = model.module(leaves)
    hidden = module.project_hidden(vectors)
    first = jnp.zeros(1, jnp.int32)
    return module.decode_all(batch.tokens, batch.step(), cache, first, hidden)[1]


def propose_with_head(
    model: AbstractModel,
    stages: Sequence[str],
    leaves: Leaves,
    cache: Cache,
    state: State,
    rows: Int[Array, " sequences"],
    tables: Tables,
    steps: Int[Array, ""],
    vectors: Float[Array, "sequences width"],
) -> tuple[Cache, State, Int[Array, "steps sequences width"]]:
    """Proposes the next tokens of sequences; each position follows the likeliest token before it.

    Args:
        stages: sampling stages that these sequences may need.
        rows: slots of the sequences; -1: none.
        tables: block tables by slot.
        steps: number of positions, at most `MAX_STEPS`.
        vectors: the target's hidden states of the token before the last one.
    """
    count = rows.shape[0]
    every, newest = jnp.arange(count, dtype=jnp.int32), jnp.full(count, -1, jnp.int32)

    def compute(leaves: Leaves, cache: Cache, state: State, hidden: Array) -> Any:
        batch, sampled = make_flat_batch(state, rows, newest, tables, every)
        module = model.module(leaves)
        out, cache = module.decode_all(batch.tokens, batch.step(), cache, None, hidden)
        return cache, out["logits"], sampled, out["hidden"].astype(hidden.dtype)

    hidden, none = model.module(leaves).project_hidden(vectors), no_proposals(model, count)
    choose = partial(propose_next, stages)
    return decode_loop(compute, choose, none, leaves, cache, state, rows, steps, hidden=hidden)
