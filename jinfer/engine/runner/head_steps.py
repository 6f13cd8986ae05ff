"""What is compiled for a head that drafts from what its target's layers give.

It stands one token ahead: in place i it is given token i + 1 and the target's vectors of token i.
Further tokens it finds after those that it has proposed, beside vectors of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jinfer.engine.runner.device_state import State
from jinfer.engine.runner.draft_steps import likeliest, nobody
from jinfer.engine.runner.flat_batch import Tables, going, placed
from jinfer.engine.runner.sampler_output import MAX_STEPS
from jinfer.engine.runner.steps import Leaves, read_each_time
from jinfer.nn.abstract_model import AbstractModel
from jinfer.ops.attention.kv_cache import BLOCK, Cache, LayerCache, cache_group
from jinfer.quant.kv_vectors import QuantizedVectors

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def kept(
    layers: Sequence[LayerCache],
    rows: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    tables: Tables,
) -> Float[Array, "tokens width"]:
    """What layers gave of some tokens, one layer's behind the other's.

    Args:
        layers: those parts of the cache that keep this.
        rows: of the tables, for each token; -1: padding.
        positions: in its sequence.
    """
    places = jnp.maximum(positions, 0)
    block = tables[cache_group(None)][jnp.maximum(rows, 0), places // BLOCK]

    def of(layer: LayerCache) -> Array:
        own = jax.tree.map(lambda part: part[block, 0, places % BLOCK], layer.keys)
        if isinstance(own, QuantizedVectors):
            return own.dequantize()
        return own.astype(jnp.float32)

    return jnp.concatenate([of(layer) for layer in layers], axis=-1)


def absorb(
    model: AbstractModel,
    leaves: Leaves,
    cache: Cache,
    state: State,
    rows: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    tables: Tables,
    vectors: Float[Array, "tokens width"],
) -> Cache:
    """A head's cache with tokens in it that are known; rows and positions as of `logits`.

    Args:
        vectors: the target's, of the token before each.
    """
    places, _ = placed(state, rows, positions, jnp.full(1, -1, jnp.int32))
    module = model.module(leaves)
    given = module.taken(vectors)
    at, first = places.step(tables), jnp.zeros(1, jnp.int32)
    return module.decode_all(places.tokens, at, cache, first, given)[1]


def lead(
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
    """As `propose`, by a head.

    Args:
        vectors: the target's, of the token before the last one known.
    """
    count = rows.shape[0]
    every, newest = jnp.arange(count, dtype=jnp.int32), jnp.full(count, -1, jnp.int32)
    type Carry = tuple[Array, Cache, State, Array, Array]

    def compute(leaves: Leaves, cache: Cache, state: State, given: Array) -> Any:
        places, which = placed(state, rows, newest, every)
        module, at = model.module(leaves), places.step(tables)
        return which, *module.decode_all(places.tokens, at, cache, None, given)

    def one_more(carry: Carry) -> Carry:
        i, cache, state, given, so_far = carry
        parts, lengths = anew(state.lengths)
        state = state._replace(lengths=lengths)
        which, out, cache = compute(parts, cache, state, given)
        state, tokens = likeliest(stages, state, out["logits"], which)
        so_far = lax.dynamic_update_index_in_dim(so_far, tokens, i, 0)
        return i + 1, cache, state, out["hidden"].astype(given.dtype), so_far

    def more(carry: Carry) -> Array:
        return (carry[0] < steps) & jnp.any(going(carry[2], rows))

    given = model.module(leaves).taken(vectors)
    step = partial(compute, cache=cache, state=state, given=given)
    anew = read_each_time(step, leaves)
    empty = jnp.broadcast_to(nobody(model, count), (MAX_STEPS, *nobody(model, count).shape))
    begun = (jnp.int32(0), cache, state, given, empty)
    _, cache, state, _, proposed = lax.while_loop(more, one_more, begun)
    return cache, state, proposed
