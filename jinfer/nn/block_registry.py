"""Block registry: builds the Flax module that computes a block of the specification."""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING

from jinfer.modelspec.block import Block
from jinfer.modelspec.blocks import MODULES
from jinfer.modelspec.draft_head import TapSpec
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

# Blocks that no specification names, in addition to those of the language.
_MODULES = MODULES | {
    TapSpec: "stream_modules.HiddenTap",
    ShardedEmbeddingBlock: "tensor_parallel.ShardedEmbedding",
    ShardedHeadBlock: "tensor_parallel.ShardedHead",
    ShardedRMSBlock: "tensor_parallel.ShardedRMSNorm",
    ColumnLinearBlock: "tensor_parallel.column_linear",
    RowLinearBlock: "tensor_parallel.row_linear",
}


def build_module(block: Block, dtype: DTypeLike) -> nnx.Module:
    """Builds the module of a block, without parameter values."""
    file, _, name = _MODULES[type(block)].partition(".")
    module: nnx.Module = attrgetter(name)(import_module(f"jinfer.nn.{file}"))(block, dtype)
    return module
