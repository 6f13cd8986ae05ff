"""Verification: drafted tokens are computed at once, and then chosen as if there were no draft.

A draft is a tree of tokens that may follow a sequence; its root is the sequence's last token. The
ordinary sampler chooses after the root; where a child of the root is what it chose, it goes on from
that child, whose logits are there already. So a draft decides how many tokens a call gives, and
never which.

The keys and values of a node stand where plain decoding would put them: at its position in blocks
of its sequence. Branches have blocks of their own and so rows of their own in the tables; what a
branch shares with others is written into those of each. Nothing in attention knows of trees, so
windows, biases by distance and quantized caches are right among nodes to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jinfer.engine.runner.device_state import State
from jinfer.engine.runner.flat_batch import Places, Tables, going, or_spare
from jinfer.engine.runner.sampler_output import Chosen
from jinfer.engine.runner.steps import Leaves, choose_next, nothing
from jinfer.nn.abstract_model import AbstractModel
from jinfer.nn.forward_context import Copies
from jinfer.ops.attention.kv_cache import Cache
from jinfer.sampling import penalties

if TYPE_CHECKING:
    from jaxtyping import Float, Int, UInt


class Nodes(NamedTuple):
    """Trees in a flat batch, the root of each first and parents before their children.

    Attributes:
        tokens: of each node.
        rows: of the tables, where each node sees what stands before it; -1: padding.
        positions: of each node in its sequence.
        parents: by their place in the batch; -1: none.
        owners: the slot of each row of the tables; -1: of none.
        roots: the root of each sequence that gets tokens; -1: none.
        copies: where nodes are that stand in several branches; None: each stands in one.
    """

    tokens: Int[Array, " nodes"]
    rows: Int[Array, " nodes"]
    positions: Int[Array, " nodes"]
    parents: Int[Array, " nodes"]
    owners: Int[Array, " rows"]
    roots: Int[Array, " sequences"]
    copies: Copies | None = None


def verify(
    model: AbstractModel,
    stages: Sequence[str],
    leaves: Leaves,
    cache: Cache,
    state: State,
    nodes: Nodes,
    tables: Tables,
    mask: UInt[Array, "nodes words"] | None = None,
) -> tuple[Cache, State, Chosen]:
    """Computes trees, and chooses tokens from their roots on as far as they go.

    Args:
        stages: of sampling, that these sequences may need.
        mask: bit i % 32 of word i // 32 allows token i after a node; None: all are allowed.

    Returns:
        What was chosen has a leading axis with room for as many tokens as there are nodes.
    """
    places = planted(state, nodes)
    logits, cache = model.module(leaves).decode(places.tokens, places.step(tables), cache, "logits")
    return cache, *walk(model, stages, state, nodes, logits, mask)


def planted(state: State, nodes: Nodes) -> Places:
    """The flat batch of some trees."""
    owners = or_spare(state, nodes.owners)
    return Places(
        nodes.tokens,
        nodes.rows,
        nodes.positions,
        state.prompts[owners],
        state.encoded[owners],
        nodes.copies,
    )


def walk(
    model: AbstractModel,
    stages: Sequence[str],
    state: State,
    nodes: Nodes,
    logits: Float[Array, "nodes vocab"],
    mask: UInt[Array, "nodes words"] | None = None,
) -> tuple[State, Chosen]:
    """Chooses tokens from the roots on as far as trees go; arguments as of `verify`."""
    if mask is not None:
        every = jnp.arange(logits.shape[0], dtype=jnp.int32)
        logits = penalties.masked(logits, mask, every, every >= 0)
    root = jnp.maximum(nodes.roots, 0)
    own = nodes.owners[jnp.maximum(nodes.rows[root], 0)]
    slots = jnp.where(nodes.roots >= 0, own, -1)
    count, most = slots.shape[0], nodes.tokens.shape[0]

    def one_more(carry: tuple[Array, Array, State, Chosen]) -> tuple[Array, Array, State, Chosen]:
        i, places, state, so_far = carry
        there, place = places >= 0, jnp.maximum(places, 0)
        rows = or_spare(state, jnp.where(there, slots, -1))
        state, chosen = choose_next(model, stages, state, logits[place], rows)
        so_far = jax.tree.map(
            lambda all, one: lax.dynamic_update_index_in_dim(all, one, i, 0), so_far, chosen
        )
        children = nodes.parents[None] == place[:, None]
        meant = children & (nodes.tokens[None] == chosen.tokens[:, None])
        on = there & jnp.any(meant, axis=1) & going(state, slots)
        return i + 1, jnp.where(on, jnp.argmax(meant, axis=1).astype(jnp.int32), -1), state, so_far

    def more(carry: tuple[Array, Array, State, Chosen]) -> Array:
        i, places, _, _ = carry
        return (i < most) & jnp.any(places >= 0)

    none = jax.tree.map(
        lambda one: jnp.full((most, *one.shape), -1, one.dtype), nothing(state, count)
    )
    begin = jnp.where(going(state, slots), nodes.roots, -1)
    _, _, state, chosen = lax.while_loop(more, one_more, (jnp.int32(0), begin, state, none))
    return state, chosen
