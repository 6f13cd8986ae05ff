"""From a block's description to its module."""

from __future__ import annotations

from collections.abc import Callable

from flax import nnx
from jax.typing import DTypeLike

from jinfer.nn.attention import Attention, CrossAttention
from jinfer.nn.ffn import MLP, Activation, GatedMLP
from jinfer.nn.joined import Concat, Spread
from jinfer.nn.latent import LatentAttention
from jinfer.nn.linear import Embedding, Head, Linear
from jinfer.nn.moe import MixtureOfExperts
from jinfer.nn.norm import LayerNorm, RMSNorm
from jinfer.nn.pool import Pool
from jinfer.nn.position import PositionTable, Sinusoids
from jinfer.nn.split import EmbeddingPart, HeadPart, SplitEmbedding, SplitHead
from jinfer.nn.tap import Kept
from jinfer.spec import blocks
from jinfer.spec.following import Tap

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
    """The module that computes a block, its parameters yet to be loaded."""
    return _MODULES[type(block)](block, dtype)
