"""State cache: the state tables of all recurrences of a model; state in, state out.

Beside the paged KV cache, which grows with a sequence, it holds a slot of fixed size for each
sequence, and snapshots in slots of their own. Copies between slots serve forks, snapshots and their
reuse alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jinfer.ops.attention.block_copies import copy_blocks

if TYPE_CHECKING:
    from jaxtyping import Float, Int

# Recurrence name -> its state table, float32 [slots, ...].
type StateCache = dict[str, Array]


def abstract_states(
    shapes: Mapping[str, tuple[int, ...]], slots: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and types of a state cache.

    Args:
        shapes: recurrence name -> shape of a sequence's state.
    """
    return {
        name: jax.ShapeDtypeStruct((slots, *shape), jnp.float32) for name, shape in shapes.items()
    }


def zero_states(shapes: Mapping[str, tuple[int, ...]], slots: int) -> StateCache:
    """A state cache of zeros; arguments as for `abstract_states`.

    What is in a slot does not matter to a sequence that begins at position 0.
    """
    whole = abstract_states(shapes, slots)
    return {name: jnp.zeros(one.shape, one.dtype) for name, one in whole.items()}


def slot_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes of one slot in all tables."""
    return sum(one.size * 4 for one in abstract_states(shapes, 1).values())


def copy_slots(
    states: StateCache,
    sources: Int[Array, " copies"],
    targets: Int[Array, " copies"],
    count: Int[Array, ""],
) -> StateCache:
    """The state cache, which may be donated, with some slots copied.

    Args:
        sources, targets: slots, copied in order, so that a copy can itself be copied.
        count: number of valid entries.
    """
    arrays, tree = jax.tree.flatten(states)
    return jax.tree.unflatten(tree, list(copy_blocks(arrays, sources, targets, count)))


def read_slot(states: StateCache, slot: Int[Array, ""]) -> dict[str, Float[Array, "state ..."]]:
    """A sequence's state, to be saved elsewhere."""
    return {name: table[slot] for name, table in states.items()}


def write_slot(
    states: StateCache, slot: Int[Array, ""], saved: Mapping[str, Float[Array, "state ..."]]
) -> StateCache:
    """The state cache, which may be donated, with a saved state in a slot."""
    return {name: table.at[slot].set(saved[name]) for name, table in states.items()}
