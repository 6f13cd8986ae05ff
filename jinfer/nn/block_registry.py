"""Block registry: from a block of the specification to the Flax module that computes it."""

from __future__ import annotations

from collections.abc import Callable

from flax import nnx
from jax.typing import DTypeLike

from jinfer.modelspec import blocks
from jinfer.modelspec.draft_head import TapSpec
from jinfer.nn.attention_modules import Attention, CrossAttention
from jinfer.nn.feed_forward import MLP, Activation, GatedMLP
from jinfer.nn.head_inputs import Concat, VocabMap
from jinfer.nn.hidden_tap import HiddenTap
from jinfer.nn.mla import LatentAttention
from jinfer.nn.moe_block import MixtureOfExperts
from jinfer.nn.norm_modules import LayerNorm, RMSNorm
from jinfer.nn.pooling import Pool
from jinfer.nn.positions import PositionTable, Sinusoids
from jinfer.nn.projections import Embedding, Head, Linear
from jinfer.nn.tensor_parallel import (
    ShardedEmbedding,
    ShardedEmbeddingBlock,
    ShardedHead,
    ShardedHeadBlock,
)

_MODULES: dict[type, Callable[..., nnx.Module]] = {
    blocks.EmbeddingSpec: Embedding,
    ShardedEmbeddingBlock: ShardedEmbedding,
    blocks.LearnedPositionsSpec: PositionTable,
    blocks.SinusoidalPositionsSpec: Sinusoids,
    blocks.RMSNormSpec: RMSNorm,
    blocks.LayerNormSpec: LayerNorm,
    blocks.LinearSpec: lambda b, dtype: Linear(b.inputs, b.outputs, b.bias, dtype),
    blocks.ConcatSpec: Concat,
    blocks.SpreadSpec: VocabMap,
    TapSpec: HiddenTap,
    blocks.HeadSpec: Head,
    ShardedHeadBlock: ShardedHead,
    blocks.ActivationSpec: Activation,
    blocks.PoolSpec: Pool,
    blocks.AttentionSpec: Attention,
    blocks.CrossAttentionSpec: CrossAttention,
    blocks.LatentAttentionSpec: LatentAttention,
    blocks.MLPSpec: MLP,
    blocks.GatedMLPSpec: GatedMLP,
    blocks.MoESpec: MixtureOfExperts,
}


def build_module(block: blocks.Block, dtype: DTypeLike) -> nnx.Module:
    """The module of a block, its parameters yet to be loaded."""
    return _MODULES[type(block)](block, dtype)
