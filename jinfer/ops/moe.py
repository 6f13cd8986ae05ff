"""MoE routing (mixture of experts), and grouped matmul of tokens with their experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jinfer.cpu import matmul_call as cpu
from jinfer.modelspec.feed_forward_blocks import MoESpec
from jinfer.ops.activation import activate
from jinfer.ops.backend import has_cpu_calls, needs_derivatives
from jinfer.ops.matmul.lora import RowAdapters, Stacks, add_lora, sorted_by_slot
from jinfer.ops.matmul.matmul import (
    LinearWeight,
    fuses_activation,
    grouped_linears,
    linear_of_stack,
    supports_grouped,
)
from jinfer.ops.norm import softmax
from jinfer.ops.reductions import add_in_order

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


def route(
    logits: Float[Array, "rows experts"],
    correction: Float[Array, " experts"] | None,
    rule: MoESpec,
) -> tuple[Int[Array, "rows top_k"], Float[Array, "rows top_k"]]:
    """Chooses `rule.top_k` experts per row, as `rule` describes.

    Args:
        correction: a bias added to the scores, or logits, for the choice only.
    """
    whole = rule.scoring != "sparsemixer" and rule.groups == rule.top_k_groups
    if whole and rule.correction_bias != "logits" and has_cpu_calls():
        return cpu.route(
            logits,
            correction,
            rule.top_k,
            softmax=rule.scoring == "softmax",
            renormalize=rule.renormalize,
            scale=rule.scale,
        )
    if rule.scoring == "sparsemixer":
        chosen, weights = _sparsemixer(logits, rule)
    else:
        scores = softmax(logits) if rule.scoring == "softmax" else activate("sigmoid", logits)
        ranked = logits if rule.correction_bias == "logits" else scores
        ranked = ranked if correction is None else ranked + correction[None, :]
        chosen = lax.top_k(_mask_groups(ranked, rule), rule.top_k)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=1)
    if rule.renormalize:
        # Added in sequence, so that the order does not depend on the number of rows.
        total = reduce(add, (weights[:, i : i + 1] for i in range(rule.top_k)))
        weights = weights / jnp.maximum(total, 1e-20)  # sigmoids can all be 0
    return chosen, weights * rule.scale


def _mask_groups(
    scores: Float[Array, "rows experts"], rule: MoESpec
) -> Float[Array, "rows experts"]:
    """Masks scores outside the best groups with -inf (group-limited routing, arXiv 2405.04434)."""
    if rule.groups == rule.top_k_groups:
        return scores
    grouped = scores.reshape(scores.shape[0], rule.groups, -1)
    best = lax.top_k(grouped, 1 if rule.group_score == "max" else 2)[0]
    groups = lax.top_k(jnp.sum(best, axis=2), rule.top_k_groups)[1]
    kept = jnp.any(groups[:, :, None] == jnp.arange(rule.groups)[None, None, :], axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(scores.shape)


def _sparsemixer(
    logits: Float[Array, "rows experts"], rule: MoESpec
) -> tuple[Int[Array, "rows top_k"], Float[Array, "rows top_k"]]:
    """SparseMixer (arXiv 2409.12136): repeated arg-max, each with its own softmax.

    A score takes part in the softmax if it is close to the best remaining one: they differ by at
    most 2 jitter_eps times the greater of the best score and its own magnitude.
    """
    numbers = jnp.arange(rule.experts)[None, :]
    left, chosen, weights = logits, [], []
    for _ in range(rule.top_k):
        best = jnp.max(left, axis=1, keepdims=True)
        pick = jnp.argmax(left, axis=1)
        far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > 2 * rule.jitter_eps
        near = jnp.where(far, -jnp.inf, left)
        share = softmax(near)
        chosen.append(pick)
        weights.append(jnp.take_along_axis(share, pick[:, None], axis=1)[:, 0])
        left = jnp.where(numbers == pick[:, None], -jnp.inf, left)
    return jnp.stack(chosen, axis=1), jnp.stack(weights, axis=1)


def adapters_of_pairs(rows: RowAdapters, order: cpu.Sorted, experts: int) -> RowAdapters:
    """Returns the adapters of sorted pairs: a slot for each expert of each adapter."""
    slots = rows.slots[order.row_of]
    own = (slots - 1) * experts + order.expert_of + 1
    return sorted_by_slot(jnp.where(slots > 0, own, 0), rows.scales[order.row_of])


def repeated(rows: RowAdapters, times: int) -> RowAdapters:
    """Returns the adapters of rows that are each repeated `times` times in sequence."""
    return sorted_by_slot(jnp.repeat(rows.slots, times), jnp.repeat(rows.scales, times))


def add_expert_lora(
    y: Float[Array, "pairs outputs"],
    x: Float[Array, "pairs inputs"],
    stacks: Stacks,
    at: RowAdapters,
) -> Float[Array, "pairs outputs"]:
    """Adds the low-rank terms of the pairs to `y`; pairs without an adapter keep their bits.

    Args:
        y: float32.
        stacks: [slots, experts, rank, inputs] and [slots, experts, rank, outputs], perhaps with
            factors [slots, experts, 2, rank].
        at: `adapters_of_pairs`.
    """
    flat = jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:]), stacks)
    return add_lora([y], x, [flat], at)[0]


# Rows of a block. Below 8 reading the weights dominates; above 256 padding an expert's last block
# costs more than is saved.
_LEAST_ROWS, _MOST_ROWS = 8, 256


class ExpertProjection(NamedTuple):
    """One projection of all experts."""

    weight: LinearWeight  # [experts, outputs, inputs]
    bias: Float[Array, "experts outputs"] | None
    stacks: Stacks | None = None  # adapters' [slots, experts, rank, inputs or outputs]


class ExpertWeights(NamedTuple):
    """The weights of all experts: feed-forwards of equal shape; without `gate` they are plain MLPs.

    Attributes:
        activation: a function of gate and up, or of None and up.
        fused: name of `activation` if the fused matmul supports it, otherwise "none".
    """

    gate: ExpertProjection | None
    up: ExpertProjection
    down: ExpertProjection
    activation: Callable[[Array | None, Array], Array]
    fused: str = "none"


def mixture_of_experts(
    x: Float[Array, "rows hidden"],
    chosen: Int[Array, "rows top_k"],
    weights: Float[Array, "rows top_k"],
    experts: ExpertWeights,
    adapters: RowAdapters | None = None,
) -> Float[Array, "rows hidden"]:
    """Computes the weighted sum of the outputs of each row's chosen experts.

    (row, expert) pairs are sorted by expert once. CPU custom calls and GPU kernels take them sorted
    (grouped matmul); elsewhere they are split into blocks of one expert each, and a loop runs over
    the blocks that exist. Either way only the weights of chosen experts are read, unlike with
    `jax.lax.ragged_dot` on XLA:CPU or gathered weights.

    Args:
        chosen: experts of each row, all different.
        weights: of the chosen experts, float32.
        adapters: the rows' LoRA adapters, if any.
    """
    rows, top_k = chosen.shape
    projections = [
        projection
        for projection in (experts.gate, experts.up, experts.down)
        if projection is not None
    ]
    count = experts.up.weight.shape[0]
    order = _sort_by_expert(chosen, count)
    at = None if adapters is None else adapters_of_pairs(adapters, order, count)
    if all(supports_grouped(projection.weight) for projection in projections):
        out = _grouped_feed_forward(x, order, experts, at)
        if has_cpu_calls():
            return cpu.combine_experts(out.astype(jnp.float32), order.place_of, weights).astype(
                x.dtype
            )
    else:
        out = _blockwise_feed_forward(x, order, experts, at)
    y = out[order.place_of].reshape(rows, top_k, -1).astype(jnp.float32)
    return sum_chosen(y * weights[..., None]).astype(x.dtype)


def mixture_of_weighted_inputs(
    x: Float[Array, "rows hidden"],
    chosen: Int[Array, "rows top_k"],
    weights: Float[Array, "rows top_k"],
    experts: ExpertWeights,
    adapters: RowAdapters | None = None,
) -> Float[Array, "rows hidden"]:
    """Sums the outputs of each row's chosen experts for the weighted row (Llama 4)."""
    rows, top_k = chosen.shape
    weighted = (x.astype(jnp.float32)[:, None] * weights[..., None]).astype(x.dtype)
    unit = jnp.ones((rows * top_k, 1), jnp.float32)
    at = None if adapters is None else repeated(adapters, top_k)
    pairs = weighted.reshape(rows * top_k, -1)
    y = mixture_of_experts(pairs, chosen.reshape(-1, 1), unit, experts, at)
    return sum_chosen(y.reshape(rows, top_k, -1).astype(jnp.float32)).astype(x.dtype)


def project_chosen(
    x: Float[Array, "rows inputs"],
    chosen: Int[Array, "rows top_k"],
    projection: ExpertProjection,
) -> Float[Array, "rows top_k outputs"]:
    """Multiplies each row by the matrices of its chosen experts."""
    (rows, top_k), (count, outputs, _) = chosen.shape, projection.weight.shape
    order = _sort_by_expert(chosen, count)
    if supports_grouped(projection.weight):
        y = grouped_linears(x[order.row_of], [projection.weight], order.offsets)[0].astype(x.dtype)
    else:

        def project(part: Array, expert: Array, own: Array) -> Array:
            return linear_of_stack(part, projection.weight, projection.bias, expert, own)

        y = _blockwise(x, order, count, outputs, project)
    return y[order.place_of].reshape(rows, top_k, -1)


def sum_chosen(parts: Float[Array, "rows top_k *width"]) -> Array:
    """Sums over the chosen experts."""
    return add_in_order(parts[:, k] for k in range(parts.shape[1]))


def _sort_by_expert(chosen: Int[Array, "rows top_k"], count: int) -> cpu.Sorted:
    if has_cpu_calls():
        return cpu.sort_by_expert(chosen.astype(jnp.int32), count)
    expert_of, top_k = chosen.reshape(-1), chosen.shape[1]
    order = jnp.argsort(expert_of, stable=True)
    sizes = jnp.sum(expert_of[:, None] == jnp.arange(count)[None], axis=0, dtype=jnp.int32)
    offsets = jnp.pad(jnp.cumsum(sizes, dtype=jnp.int32), (1, 0))
    return cpu.Sorted(order // top_k, expert_of[order], offsets, jnp.argsort(order))


def _grouped_feed_forward(
    x: Float[Array, "rows hidden"],
    order: cpu.Sorted,
    experts: ExpertWeights,
    at: RowAdapters | None,
) -> Float[Array, "pairs hidden"]:
    """Computes the outputs of the sorted pairs by grouped matmul."""
    offsets = order.offsets

    def product(x: Array, projection: ExpertProjection) -> Array:
        y = grouped_linears(x, [projection.weight], offsets)[0]
        if at is not None and projection.stacks is not None:
            y = add_expert_lora(y, x, projection.stacks, at)
        if projection.bias is not None:
            y = y + projection.bias[order.expert_of].astype(jnp.float32)
        return y.astype(x.dtype)

    rows, gate, up = x[order.row_of], experts.gate, experts.up
    plain = gate is not None and gate.bias is None and up.bias is None and at is None
    if gate is not None and plain and fuses_activation(gate.weight, up.weight, experts.fused):
        (y,) = grouped_linears(rows, [gate.weight, up.weight], offsets, experts.fused)
        inner = y.astype(x.dtype)
    else:
        before = None if gate is None else product(rows, gate)
        inner = experts.activation(before, product(rows, up))
    return product(inner, experts.down)


def _blockwise_feed_forward(
    x: Float[Array, "rows hidden"],
    order: cpu.Sorted,
    experts: ExpertWeights,
    at: RowAdapters | None,
) -> Float[Array, "pairs_and_block hidden"]:
    """Computes the outputs of the sorted pairs in a loop over blocks of one expert each."""
    if at is not None:
        return _blockwise_with_adapters(x[order.row_of], order, experts, at)

    def feed_forward(part: Array, expert: Array, own: Array) -> Array:
        return _feed_forward(part, experts, expert, own)

    return _blockwise(x, order, experts.up.weight.shape[0], x.shape[1], feed_forward)


def _blockwise_with_adapters(
    rows: Float[Array, "pairs hidden"],
    order: cpu.Sorted,
    experts: ExpertWeights,
    at: RowAdapters,
) -> Float[Array, "pairs hidden"]:
    """Computes the outputs of the sorted pairs in such a loop for each projection."""
    (count, *_), pairs = experts.up.weight.shape, len(rows)
    sorted_pairs = order._replace(row_of=jnp.arange(pairs, dtype=jnp.int32))

    def product(x: Array, projection: ExpertProjection) -> Array:
        def project(part: Array, expert: Array, own: Array) -> Array:
            return linear_of_stack(part, projection.weight, projection.bias, expert, own)

        y = _blockwise(x, sorted_pairs, count, projection.weight.shape[1], project)[:pairs]
        if projection.stacks is not None:
            wide = add_expert_lora(y.astype(jnp.float32), x, projection.stacks, at)
            y = wide.astype(x.dtype)
        return y

    gate = None if experts.gate is None else product(rows, experts.gate)
    return product(experts.activation(gate, product(rows, experts.up)), experts.down)


def _blockwise(
    x: Float[Array, "rows inputs"],
    order: cpu.Sorted,
    count: int,
    width: int,
    apply: Callable[[Array, Array, Array], Array],
) -> Float[Array, "pairs_and_block width"]:
    """Applies a function to the sorted pairs, in blocks of one expert each.

    Args:
        count: number of experts.
        width: of the results.
        apply: a function of a block's rows, its expert, and a mask of the block's own rows.
    """
    pairs = order.row_of.shape[0]
    size = _block_rows(pairs, count)
    blocks = _ExpertBlocks(order.offsets, size)
    row_of = jnp.pad(order.row_of, (0, size))  # so that the last block has its full length

    def multiply_block(number: Array) -> tuple[Array, Array]:
        expert, begin, count = blocks.at(number)
        rows = lax.dynamic_slice_in_dim(row_of, begin, size)
        own = jnp.arange(size, dtype=jnp.int32) < count
        return begin, apply(x[rows], expert, own)

    if needs_derivatives():
        # The maximum number of blocks; beyond the last the last is repeated. The backward pass
        # recomputes each block: otherwise all their matrices would be held until then.
        block_numbers = jnp.arange(min(pairs, count + pairs // size), dtype=jnp.int32)
        _, parts = lax.map(
            jax.checkpoint(multiply_block), jnp.minimum(block_numbers, blocks.number - 1)
        )
        return parts.reshape(-1, width)[blocks.places(order.expert_of)]

    def run(number: Array, out: Array) -> Array:
        begin, y = multiply_block(number)
        # Rows beyond the block's end are overwritten by the next block.
        return lax.dynamic_update_slice_in_dim(out, y, begin, 0)

    empty = jnp.zeros((pairs + size, width), x.dtype)
    return lax.fori_loop(0, blocks.number, run, empty)


class _ExpertBlocks:
    """cpu.Sorted pairs of row and expert, in blocks of at most `size` of one expert."""

    def __init__(self, offsets: Int[Array, " experts_1"], size: int) -> None:
        self.size, self.begin, self.end = size, offsets[:-1], offsets[1:]
        self.blocks = (self.end - self.begin + (size - 1)) // size
        self.ends = jnp.cumsum(self.blocks)
        self.number = self.ends[-1]

    def at(self, number: Int[Array, ""]) -> tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]]:
        """Returns a block's expert, the index of its first sorted pair and its number of pairs.

        Rows beyond that number belong to the next block.
        """
        expert = jnp.sum(self.ends <= number, dtype=jnp.int32)
        within = number - (self.ends[expert] - self.blocks[expert])
        begin = self.begin[expert] + within * self.size
        return expert, begin, jnp.minimum(self.end[expert] - begin, self.size)

    def places(self, expert_of: Int[Array, " pairs"]) -> Int[Array, " pairs"]:
        """Returns the index of each sorted pair in the concatenated blocks."""
        first = (self.ends - self.blocks)[expert_of] * self.size
        return first + jnp.arange(expert_of.shape[0], dtype=jnp.int32) - self.begin[expert_of]


def _block_rows(pairs: int, experts: int) -> int:
    """Returns rows per block: about an expert's average share, as a power of two; at least 1."""
    share = -(-pairs // experts)
    if share == 1:
        return 1
    return min(max(_LEAST_ROWS, 1 << (share - 1).bit_length()), _MOST_ROWS)


def _feed_forward(
    x: Float[Array, "rows hidden"],
    experts: ExpertWeights,
    expert: Int[Array, ""],
    own: Bool[Array, " rows"],
) -> Float[Array, "rows hidden"]:
    """Computes the output of one expert; only rows marked in `own` count."""

    def project(x: Array, projection: ExpertProjection) -> Array:
        return linear_of_stack(x, projection.weight, projection.bias, expert, own)

    gate = None if experts.gate is None else project(x, experts.gate)
    return project(experts.activation(gate, project(x, experts.up)), experts.down)
