"""What one stage computes of a forward pass: pure functions, as each of its devices runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jinfer.engine.runner.flat_batch import Places, Tables
from jinfer.nn.abstract_model import Want
from jinfer.nn.forward_context import Step
from jinfer.ops.attention.kv_cache import Cache, Placement
from jinfer.parallel.stage import StageModel

if TYPE_CHECKING:
    from jaxtyping import Float, Int

type Leaves = tuple[Array, ...]
type Results = dict[str, Array]


def flow(
    stage: StageModel,
    wants: Sequence[Want],
    leaves: Leaves,
    cache: Cache,
    x: Float[Array, "1 tokens hidden"] | None,
    places: Places,
    tables: Tables,
    last: Int[Array, " chosen"] | None,
) -> tuple[Cache, Array | Results]:
    """A stage's layers over a flat batch.

    Args:
        wants: what the last stage gives.
        x: what the stage before gave; the first one has none.
        last: of which tokens results are wanted; None: of all.

    Returns:
        The cache; vectors for the next stage, or the results by name.
    """
    module, at = stage.model.module(leaves), places.step(tables)
    stack, tokens = module.stacks["decoder"], places.tokens
    if x is None:
        x = stack.embed(tokens[None], jnp.zeros_like(tokens)[None], at, module.shared)
    x, cache = stack.run_layers(x, tokens[None], at, cache, module.shared)
    if not stage.part.last:
        return cache, x
    if last is not None:
        x = x[:, jnp.maximum(last, 0)]
    results = stack.results(x, at, module.shared)
    return cache, {want: results[want][0] for want in wants}


def read(
    stage: StageModel,
    wants: Sequence[Want],
    leaves: Leaves,
    x: Float[Array, "batch tokens hidden"] | None,
    tokens: Int[Array, "batch tokens"],
    types: Int[Array, "batch tokens"],
    lengths: Int[Array, " batch"],
) -> Array | Results:
    """A stage's layers of an encoder over whole texts; arguments as of `flow`."""
    module, at = stage.model.module(leaves), Step.of_texts(tokens, lengths)
    stack = module.stacks["encoder"]
    if x is None:
        x = stack.embed(tokens, types, at, module.shared)
    x, _ = stack.run_layers(x, tokens, at, {}, module.shared)
    if not stage.part.last:
        return x
    results = stack.results(x, at, module.shared)
    return {want: results[want] for want in wants}


def fill(
    stage: StageModel,
    leaves: Leaves,
    cache: Cache,
    encoded: Float[Array, "1 tokens hidden"],
    lengths: Int[Array, " 1"],
    table: Int[Array, "1 blocks"],
) -> Cache:
    """The cache with what a stage's cross-attention needs of an encoder's output."""
    positions = jnp.arange(encoded.shape[1], dtype=jnp.int32)
    rows = jnp.where(positions < lengths[0], 0, -1)
    return stage.model.module(leaves).fill(encoded, cache, Placement(rows, positions, table))
