"""KV cache offload: a layer split into the steps before, during and after its attention.

`before_attention` computes the queries, keys and values, `partial_attention` attends to the blocks
of one memory (device or host), and `after_attention` merges the partial results, as in flash
decoding, and computes the rest of the layer. The first and the last trace the layer's whole
formula; XLA removes what does not contribute to their results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from jinfer.engine.runner.flat_batch import FlatBatch
from jinfer.nn.transformer_layer import HiddenState
from jinfer.ops.attention.hadamard import rotate_qk
from jinfer.ops.attention.kv_cache import AttentionMetadata, Cache, LayerCache
from jinfer.ops.attention.mask_rules import ScoreRules
from jinfer.ops.attention.paged_attention import extend_partial
from jinfer.ops.attention.partial_merge import PartialAttention, merge_partials
from jinfer.parallel.stage_model import StageModel

if TYPE_CHECKING:
    from jaxtyping import Float, Int

type Leaves = tuple[Array, ...]


class AttentionInputs(NamedTuple):
    """The inputs of an attention: new queries, keys and values, and arrays of score biases.

    Attributes:
        v: None for latent attention, whose values are in `k`.
        slopes: ALiBi's.
        by_distance: relative position biases.
    """

    q: Float[Array, "tokens heads head_dim"]
    k: Float[Array, "tokens kv_heads head_dim"]
    v: Float[Array, "tokens kv_heads value_dim"] | None
    slopes: Float[Array, " heads"] | None
    by_distance: Float[Array, "heads distances"] | None


@dataclass
class TracedAttention:
    """Name and score rules (without arrays) of an attention; set when `before_attention` traces."""

    name: str = ""
    rules: ScoreRules = field(default_factory=lambda: ScoreRules(1.0))


@dataclass(frozen=True)
class _CacheStandIn:
    """Replaces the cache of one attention while the layer's formula is traced.

    Attributes:
        partials: as of `before_attention`.
        traced, inputs: set by the first attention whose partial results are not known.
    """

    name: str
    partials: Mapping[str, Sequence[PartialAttention]]
    traced: TracedAttention
    inputs: list[AttentionInputs]

    def extend(
        self, q: Array, k: Array, v: Array | None, at: AttentionMetadata, rules: ScoreRules
    ) -> Array:
        """The merged result if it is known; else records the inputs, and returns unused zeros."""
        if self.name in self.partials:
            return merge_partials(self.partials[self.name], rules.sinks, q.dtype)
        if not self.inputs:
            self.inputs.append(AttentionInputs(q, k, v, rules.slopes, rules.by_distance))
            self.traced.name = self.name
            self.traced.rules = rules._replace(sinks=None, slopes=None, by_distance=None)
        return jnp.zeros((*q.shape[:2], (k if v is None else v).shape[-1]), q.dtype)


def before_attention(
    stage: StageModel,
    traced: TracedAttention,
    leaves: Leaves,
    cache: Cache,
    given: HiddenState,
    batch: FlatBatch,
    partials: Mapping[str, Sequence[PartialAttention]],
) -> AttentionInputs:
    """The inputs of the next attention of a layer.

    Args:
        stage: a sub-stage of one layer.
        traced: filled in with the attention's name and rules.
        cache: what is on the device alone: recurrent states, and the caches of cross-attentions,
            which are computed here.
        partials: partial results of the layer's attentions before this one.
    """
    _, _, (inputs,) = _run(stage, traced, leaves, cache, given, batch, partials)
    return inputs


def after_attention(
    stage: StageModel,
    leaves: Leaves,
    states: Cache,
    cross: Cache,
    given: HiddenState,
    batch: FlatBatch,
    partials: Mapping[str, Sequence[PartialAttention]],
) -> tuple[Cache, HiddenState]:
    """The recurrent states, and the layer's output from all partial results.

    Args:
        states: recurrent states before the batch.
        cross: the caches of cross-attentions; other arguments as of `before_attention`.
    """
    cache = {**states, **cross}
    out, kept, _ = _run(stage, TracedAttention(), leaves, cache, given, batch, partials)
    return {name: kept[name.rpartition(".")[2]] for name in states}, out


def _run(
    stage: StageModel,
    traced: TracedAttention,
    leaves: Leaves,
    cache: Cache,
    given: HiddenState,
    batch: FlatBatch,
    partials: Mapping[str, Sequence[PartialAttention]],
) -> tuple[HiddenState, Cache, list[AttentionInputs]]:
    """The layer's output, its caches by module, and the inputs of its next attention if any."""
    module, at, inputs = stage.module(leaves), batch.step(), list[AttentionInputs]()
    caches: dict[str, Any] = {
        name.rpartition(".")[2]: cache.get(name) or _CacheStandIn(name, partials, traced, inputs)
        for name in stage.model.caches
    }
    decoder, tokens = module.stacks["decoder"], batch.tokens[None]
    return *decoder.run_alone(given, tokens, at, caches, module.shared), inputs


def partial_attention(
    rules: ScoreRules,
    blocks: tuple[int, int],
    inputs: AttentionInputs,
    cache: LayerCache,
    rows: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    table: Int[Array, "rows blocks"],
) -> tuple[PartialAttention, LayerCache]:
    """Attention over the blocks of one memory, after writing the new keys and values there.

    Args:
        rules: the score rules without arrays.
        blocks: the first of the memory's blocks, and the end of their range.
        cache: the memory's pool.
        table: block tables over all memories.

    Returns:
        The unnormalized result with its softmax statistics, to be merged; the pool.
    """
    first, end = blocks
    local = jnp.where((table >= first) & (table < end), table - first, -1)
    q, k, v, slopes, by_distance = inputs
    rules = rules._replace(slopes=slopes, by_distance=by_distance)
    if v is not None:  # as in `jinfer.nn.forward_context`
        q, k = rotate_qk(q, k, cache.keys)
    return extend_partial(q, k, v, cache, AttentionMetadata(rows, positions, local), rules)
