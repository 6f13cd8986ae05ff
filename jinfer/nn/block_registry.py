"""Block registry: the Flax module that computes each block of a specification."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jinfer.modelspec import (
    attention_blocks,
    blocks,
    feed_forward_blocks,
    image_blocks,
    position_blocks,
    recurrent_blocks,
)
from jinfer.modelspec.block import Block
from jinfer.modelspec.eagle_head import HiddenTapSpec
from jinfer.nn import (
    attention_modules,
    feed_forward,
    image_modules,
    mla,
    norm_modules,
    pooling,
    positions,
    projections,
    recurrent_modules,
    stream_modules,
    tensor_parallel,
)
from jinfer.nn.tensor_parallel import (
    ColumnLinearBlock,
    RowLinearBlock,
    ShardedEmbeddingBlock,
    ShardedHeadBlock,
    ShardedRMSBlock,
)

if TYPE_CHECKING:
    from flax import nnx
    from jax.typing import DTypeLike

# Each makes a module of a block and the dtype to compute in. A test compares the first ones with
# `jinfer.modelspec.blocks.BLOCKS`; no specification names those from `HiddenTapSpec` on.
MODULES: dict[type[Block], Callable[[Any, Any], nnx.Module]] = {
    blocks.EmbeddingSpec: projections.Embedding,
    position_blocks.LearnedPositionsSpec: positions.PositionTable,
    position_blocks.SinusoidalPositionsSpec: positions.Sinusoids,
    blocks.RMSNormSpec: norm_modules.RMSNorm,
    blocks.L2NormSpec: norm_modules.L2Norm,
    blocks.LayerNormSpec: norm_modules.LayerNorm,
    blocks.ScaleSpec: norm_modules.Scale,
    blocks.BiasSpec: norm_modules.Bias,
    blocks.LinearSpec: projections.Linear.of,
    blocks.BlockLinearSpec: projections.BlockLinear,
    blocks.ConcatSpec: stream_modules.Concat,
    blocks.SelectSpec: pooling.Select,
    blocks.MixSpec: stream_modules.Mix,
    blocks.RepeatSpec: stream_modules.Repeat,
    blocks.SumSpec: stream_modules.Sum,
    blocks.RescaleSpec: stream_modules.Rescale,
    blocks.VocabMapSpec: stream_modules.VocabMap,
    blocks.HeadSpec: projections.Head,
    feed_forward_blocks.ActivationSpec: feed_forward.Activation,
    blocks.PoolSpec: pooling.Pool,
    blocks.ClassifierSpec: pooling.Classifier,
    attention_blocks.AttentionSpec: attention_modules.Attention,
    attention_blocks.ExpertAttentionSpec: attention_modules.ExpertAttention,
    attention_blocks.CrossAttentionSpec: attention_modules.CrossAttention,
    attention_blocks.LatentAttentionSpec: mla.LatentAttention,
    feed_forward_blocks.MLPSpec: feed_forward.MLP,
    feed_forward_blocks.GatedMLPSpec: feed_forward.GatedMLP,
    feed_forward_blocks.MoESpec: feed_forward.MixtureOfExperts,
    recurrent_blocks.ConvSpec: recurrent_modules.ShortConv,
    recurrent_blocks.SSMSpec: recurrent_modules.SSM,
    recurrent_blocks.SelectiveScanSpec: recurrent_modules.SelectiveScan,
    recurrent_blocks.DeltaSpec: recurrent_modules.GatedDelta,
    recurrent_blocks.RGLRUSpec: recurrent_modules.RGLRU,
    recurrent_blocks.LinearAttentionSpec: recurrent_modules.LinearAttention,
    recurrent_blocks.ShiftSpec: recurrent_modules.Shift,
    recurrent_blocks.WKVSpec: recurrent_modules.WKV,
    recurrent_blocks.WKV7Spec: recurrent_modules.WKV7,
    recurrent_blocks.BonusSpec: recurrent_modules.Bonus,
    image_blocks.ClassTokenSpec: image_modules.ClassToken,
    image_blocks.DropTokensSpec: image_modules.DropTokens,
    image_blocks.LearnedVectorSpec: image_modules.LearnedVector,
    image_blocks.GridPositionsSpec: image_modules.GridPositions,
    image_blocks.MergeSpec: image_modules.Merge,
    HiddenTapSpec: stream_modules.HiddenTap,
    ShardedEmbeddingBlock: tensor_parallel.ShardedEmbedding,
    ShardedHeadBlock: tensor_parallel.ShardedHead,
    ShardedRMSBlock: tensor_parallel.ShardedRMSNorm,
    ColumnLinearBlock: tensor_parallel.column_linear,
    RowLinearBlock: tensor_parallel.row_linear,
}


def build_module(block: Block, dtype: DTypeLike) -> nnx.Module:
    """Builds the module of a block, without parameter values."""
    return MODULES[type(block)](block, dtype)
