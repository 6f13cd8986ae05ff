"""Encoder steps: compiled functions that encode texts and images."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array

from jinfer.engine.runner.steps import Leaves
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.nn.abstract_model import AbstractModel, Want
from jinfer.ops.attention.kv_cache import AttentionMetadata, Cache

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from jinfer.nn.transformer import Model


def fill_cross_attention(
    model: AbstractModel,
    leaves: Leaves,
    cache: Cache,
    tokens: Int[Array, "1 tokens"],
    lengths: Int[Array, " 1"],
    table: Int[Array, "1 blocks"],
) -> Cache:
    """The KV cache with an encoder's output for a text in some blocks; once per request.

    Args:
        lengths: tokens of the text without padding.
        table: the encoder's block table.
    """
    module = model.module(leaves)
    encoded = module.encode(tokens, jnp.zeros_like(tokens), lengths)["hidden"]
    return fill_encoded(module, cache, encoded, lengths, table)


def fill_encoded(
    module: Model,
    cache: Cache,
    encoded: Float[Array, "1 tokens hidden"],
    lengths: Int[Array, " 1"],
    table: Int[Array, "1 blocks"],
) -> Cache:
    """The KV cache with an encoder's output in some blocks; as of `fill_cross_attention`."""
    positions = jnp.arange(encoded.shape[1], dtype=jnp.int32)
    rows = jnp.where(positions < lengths[0], 0, -1)
    return module.fill(encoded, cache, AttentionMetadata(rows, positions, table))


def encode(
    model: AbstractModel,
    want: Want,
    leaves: Leaves,
    cache: Cache,
    tokens: Int[Array, "batch tokens"],
    types: Int[Array, "batch tokens"],
    lengths: Int[Array, " batch"],
) -> Float[Array, "batch ..."]:
    """The encoder's result for whole texts; the cache is empty.

    Args:
        want: which result.
        types: token types.
        lengths: tokens of each text without padding.
    """
    return model.module(leaves).encode(tokens, types, lengths)[want].astype(jnp.float32)


def patch_values(spec: ModelSpec) -> int:
    """Numbers of a patch: the inputs of the module that maps them to vectors."""
    (stack,) = spec.stacks
    calls = (node for _, line in stack.stem.statements for node in ast.walk(line))
    names = [
        call.func.id
        for call in calls
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        if any(isinstance(n, ast.Name) and n.id == "patches" for n in ast.walk(call))
    ]
    block: Any = dict(stack.modules)[names[-1]]  # the innermost
    return int(block.inputs)


def encode_image(
    model: AbstractModel,
    leaves: Leaves,
    patches: Float[Array, "tiles patches values"],
    sizes: Int[Array, "tiles 2"],
) -> dict[str, Float[Array, "tiles tokens width"]]:
    """The features of tiles, and further results of the head; see `Model.encode_image`."""
    results = model.module(leaves).encode_image(patches, sizes)
    named = ("features", "deepstack", "newline")
    return {name: results[name].astype(jnp.float32) for name in named if name in results}
