"""LoRA of experts: the low-rank terms of (row, expert) pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jinfer.cpu.moe_call import Sorted
from jinfer.ops.matmul.lora import RowAdapters, Stacks, add_lora, sorted_by_slot

if TYPE_CHECKING:
    from jaxtyping import Float


def adapters_of_pairs(rows: RowAdapters, order: Sorted, experts: int) -> RowAdapters:
    """The adapters of sorted pairs: a slot for each expert of each adapter."""
    slots = rows.slots[order.row_of]
    own = (slots - 1) * experts + order.expert_of + 1
    return sorted_by_slot(jnp.where(slots > 0, own, 0), rows.scales[order.row_of])


def repeated(rows: RowAdapters, times: int) -> RowAdapters:
    """The adapters of rows that follow one another so many times each."""
    return sorted_by_slot(jnp.repeat(rows.slots, times), jnp.repeat(rows.scales, times))


def add_expert_lora(
    y: Float[Array, "pairs outputs"],
    x: Float[Array, "pairs inputs"],
    stacks: Stacks,
    at: RowAdapters,
) -> Float[Array, "pairs outputs"]:
    """`y` with the low-rank terms of the pairs; those without an adapter keep their bits.

    Args:
        y: float32.
        stacks: [slots, experts, rank, inputs] and [slots, experts, rank, outputs], perhaps with
            factors [slots, experts, 2, rank].
        at: `adapters_of_pairs`.
    """
    flat = jax.tree.map(lambda each: each.reshape(-1, *each.shape[2:]), stacks)
    return add_lora([y], x, [flat], at)[0]
