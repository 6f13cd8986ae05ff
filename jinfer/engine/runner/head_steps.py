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
from jax import Array, lax

from jinfer.engine.runner.device_state import State
from jinfer.engine.runner.draft_steps import no_proposals, propose_next
from jinfer.engine.runner.flat_batch import Tables, can_continue, make_flat_batch
from jinfer.engine.runner.sampler_output import MAX_STEPS
from jinfer.engine.runner.steps import Leaves, reread_weights
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
        rows, positions, tables: as of `steps.logits`.
        vectors: the target's hidden states of the token before each.
    """
    batch, _ = make_flat_batch(state, rows, positions, jnp.full(1, -1, jnp.int32))
    module = model.module(leaves)
    hidden = module.taken(vectors)
    at, first = batch.step(tables), jnp.zeros(1, jnp.int32)
    return module.decode_all(batch.tokens, at, cache, first, hidden)[1]


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
    """As `draft_steps.propose`, with a head.

    Args:
        stages, rows, tables, steps: as of `draft_steps.propose`.
        vectors: the target's hidden states of the token before the last one.
    """
    count = rows.shape[0]
    every, newest = jnp.arange(count, dtype=jnp.int32), jnp.full(count, -1, jnp.int32)
    type Carry = tuple[Array, Cache, State, Array, Array]

    def compute(leaves: Leaves, cache: Cache, state: State, hidden: Array) -> Any:
        batch, sampled = make_flat_batch(state, rows, newest, every)
        module, at = model.module(leaves), batch.step(tables)
        return sampled, *module.decode_all(batch.tokens, at, cache, None, hidden)

    def one_more(carry: Carry) -> Carry:
        i, cache, state, hidden, so_far = carry
        parts, lengths = anew(state.lengths)
        state = state._replace(lengths=lengths)
        sampled, out, cache = compute(parts, cache, state, hidden)
        state, tokens = propose_next(stages, state, out["logits"], sampled)
        so_far = lax.dynamic_update_index_in_dim(so_far, tokens, i, 0)
        return i + 1, cache, state, out["hidden"].astype(hidden.dtype), so_far

    def more(carry: Carry) -> Array:
        return (carry[0] < steps) & jnp.any(can_continue(carry[2], rows))

    hidden = model.module(leaves).taken(vectors)
    step = partial(compute, cache=cache, state=state, hidden=hidden)
    anew = reread_weights(step, leaves)
    empty = jnp.broadcast_to(
        no_proposals(model, count), (MAX_STEPS, *no_proposals(model, count).shape)
    )
    begun = (jnp.int32(0), cache, state, hidden, empty)
    _, cache, state, _, proposed = lax.while_loop(more, one_more, begun)
    return cache, state, proposed
