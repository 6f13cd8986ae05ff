"""Block registry: from a block of the specification to the Flax module that computes it."""

from __future__ import annotations

from collections.abc import Callable

from flax import nnx
from jax.typing import DTypeLike

from jinfer.modelspec import blocks
from jinfer.modelspec.draft_head import Tap
from jinfer.nn.attention_modules import Attention, CrossAttention
from jinfer.nn.feed_forward import MLP, Activation, GatedMLP
from jinfer.nn.head_inputs import Concat, Spread
from jinfer.nn.hidden_tap import Kept
from jinfer.nn.mla import LatentAttention
from jinfer.nn.moe_block import MixtureOfExperts
from jinfer.nn.norm_modules import LayerNorm, RMSNorm
from jinfer.nn.pooling import Pool
from jinfer.nn.positions import PositionTable, Sinusoids
from jinfer.nn.projections import Embedding, Head, Linear
from jinfer.nn.tensor_parallel import EmbeddingPart, HeadPart, SplitEmbedding, SplitHead

_MODULES: dict[type, Callable[..., nnx.Module]] = {
    blocks.Embedding: Embedding,
    SplitEmbedding: EmbeddingPart,
    blocks.LearnedPositions: PositionTable,
    blocks.SinusoidalPositions: Sinusoids,
    blocks.RMSNorm: RMSNorm,
    blocks.LayerNorm: LayerNorm,
    blocks.Linear: lambda b, dtype: Linear(b.inputs, b.outputs, b.bias, dtype),
    blocks.Concat: Concat,
    blocks.Spread: Spread,
    Tap: Kept,
    blocks.Head: Head,
    SplitHead: HeadPart,
    blocks.ActivationBlock: Activation,
    blocks.Pool: Pool,
    blocks.Attention: Attention,
    blocks.CrossAttention: CrossAttention,
    blocks.LatentAttention: LatentAttention,
    blocks.MLP: MLP,
    blocks.GatedMLP: GatedMLP,
    blocks.MixtureOfExperts: MixtureOfExperts,
}


def build_module(block: blocks.Block, dtype: DTypeLike) -> nnx.Module:
    """The module of a block, its parameters yet to be loaded."""
    return _MODULES[type(block)](block, dtype)
