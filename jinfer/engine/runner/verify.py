"""Verify step, tree attention: drafted tokens are computed in one call and sampled as without.

A draft is a tree of tokens that may follow a sequence; its root is the sequence's last token. The
ordinary sampler samples after the root. If a child of the root has the sampled token, sampling goes
on from that child, whose logits are computed already. So a draft decides how many tokens a call
gives, and never which.

Keys and values of a node are written where plain decoding would write them: at its position in
blocks of its sequence. Branches have separate blocks, and so separate rows of the block tables;
nodes that branches share are written for each of them. The attention kernels do not know of trees,
so that sliding windows, position biases and quantized caches are exact to the bit.

Recurrent states have one future: where a model has some, trees are chains, and the states after the
accepted nodes are computed when these are known (`jinfer.ops.recurrence.drafted_scan`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jinfer.engine.runner.device_state import State
from jinfer.engine.runner.flat_batch import FlatBatch, Tables, can_continue, or_padding_row
from jinfer.engine.runner.sampler_output import SamplerOutput
from jinfer.engine.runner.steps import Stage, empty_output, sample_next
from jinfer.nn.abstract_model import AbstractModel
from jinfer.nn.forward_context import TreeCopies
from jinfer.ops.attention.kv_cache import Cache
from jinfer.ops.recurrence.drafted_scan import accept_drafted
from jinfer.sampling import penalties

if TYPE_CHECKING:
    from jaxtyping import Int, UInt


class Nodes(NamedTuple):
    """Token trees in a flat batch, each with its root first and parents before their children.

    Attributes:
        tokens: token of each node.
        rows: row of the block tables for each node; -1: padding.
        positions: position of each node in its sequence.
        parents: index of each node's parent in the batch; -1: none.
        owners: the slot of each row of the tables; -1: none.
        roots: index of each sequence's root; -1: none.
        copies: places of nodes that are in several branches; None: each is in one.
    """

    tokens: Int[Array, " nodes"]
    rows: Int[Array, " nodes"]
    positions: Int[Array, " nodes"]
    parents: Int[Array, " nodes"]
    owners: Int[Array, " rows"]
    roots: Int[Array, " sequences"]
    copies: TreeCopies | None = None


def begin_verify(
    state: State, tables: Tables, nodes: Nodes, mask: Array | None = None
) -> tuple[FlatBatch, None, None]:
    """The flat batch of some token trees.

    Args:
        tables: block tables by row of the nodes.
    """
    owners = or_padding_row(state, nodes.owners)
    lengths = state.prompts[owners], state.encoded[owners]
    return FlatBatch(*nodes[:3], *lengths, tables, nodes.copies), None, None


def accept_states(
    cache: Cache,
    batch: FlatBatch,
    roots: Int[Array, " sequences"],
    tokens: Int[Array, "nodes sequences"],
) -> Cache:
    """The cache with the recurrent states after the accepted nodes.

    Args:
        cache: as the forward pass over `batch` has returned it.
        roots: as of `Nodes`.
        tokens: sampled from the roots on, one after each accepted node and -1 from there on.
    """
    runs = batch.step().with_runs().runs
    if runs is None:
        return cache
    # Each sampled token was sampled after a node that is accepted, the first after the root.
    counts = jnp.where(roots >= 0, jnp.sum(tokens >= 0, axis=0, dtype=jnp.int32), 0)
    rows = jnp.where(roots >= 0, batch.rows[jnp.maximum(roots, 0)], runs.lengths.shape[0])
    accepted = jnp.zeros_like(runs.lengths).at[rows].set(counts, mode="drop")
    return accept_drafted(cache, runs, accepted)


def finish_verify(
    model: AbstractModel,
    stages: Sequence[Stage],
    state: State,
    results: Mapping[str, Array],
    carried: None,
    nodes: Nodes,
    mask: UInt[Array, "nodes words"] | None = None,
) -> tuple[State, SamplerOutput]:
    """Samples from the roots on, as long as the sampled tokens are in the trees.

    Args:
        stages: sampling stages that these sequences may need, and extras.
        results: the logits [nodes, vocab] after each node.
        nodes: the trees.
        mask: grammar bitmask after each node: bit i % 32 of word i // 32 allows token i; None: all.

    Returns:
        The state, and the sampled tokens, whose leading axis is as long as the nodes.
    """
    logits = results["logits"]
    if mask is not None:
        every = jnp.arange(logits.shape[0], dtype=jnp.int32)
        logits = penalties.masked(logits, mask, every, every >= 0)
    root = jnp.maximum(nodes.roots, 0)
    owners = nodes.owners[jnp.maximum(nodes.rows[root], 0)]
    slots = jnp.where(nodes.roots >= 0, owners, -1)
    count, most = slots.shape[0], nodes.tokens.shape[0]

    def one_more(
        carry: tuple[Array, Array, State, SamplerOutput],
    ) -> tuple[Array, Array, State, SamplerOutput]:
        i, current, state, so_far = carry
        active, node = current >= 0, jnp.maximum(current, 0)
        rows = or_padding_row(state, jnp.where(active, slots, -1))
        state, chosen = sample_next(model, stages, state, logits[node], rows)
        so_far = jax.tree.map(
            lambda all, one: lax.dynamic_update_index_in_dim(all, one, i, 0), so_far, chosen
        )
        children = nodes.parents[None] == node[:, None]
        meant = children & (nodes.tokens[None] == chosen.tokens[:, None])
        on = active & jnp.any(meant, axis=1) & can_continue(state, slots)
        return i + 1, jnp.where(on, jnp.argmax(meant, axis=1).astype(jnp.int32), -1), state, so_far

    def more(carry: tuple[Array, Array, State, SamplerOutput]) -> Array:
        i, current, _, _ = carry
        return (i < most) & jnp.any(current >= 0)

    none = jax.tree.map(
        lambda one: jnp.full((most, *one.shape), -1, one.dtype), empty_output(state, count)
    )
    begin = jnp.where(can_continue(state, slots), nodes.roots, -1)
    _, _, state, chosen = lax.while_loop(more, one_more, (jnp.int32(0), begin, state, none))
    return state, chosen
