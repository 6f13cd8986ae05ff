"""Pipeline parallelism: one stage's forward pass, as pure functions that each device runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jinfer.engine.runner.flat_batch import FlatBatch
from jinfer.nn.abstract_model import Want
from jinfer.nn.forward_context import ForwardBatch
from jinfer.ops.attention.kv_cache import Cache
from jinfer.parallel.stage_model import StageModel

if TYPE_CHECKING:
    from jaxtyping import Float, Int

type Leaves = tuple[Array, ...]
type StageResults = dict[str, Array]


def decoder_forward(
    stage: StageModel,
    wants: Sequence[Want],
    leaves: Leaves,
    cache: Cache,
    x: Float[Array, "1 tokens hidden"] | None,
    batch: FlatBatch,
    last: Int[Array, " chosen"] | None,
) -> tuple[Cache, Array | StageResults]:
    """The forward pass of a decoder stage over a flat batch.

    Args:
        wants: the results that the last stage returns.
        leaves: the stage's parameters, flattened.
        x: hidden states from the previous stage; None for the first stage.
        last: indices of the tokens whose results are wanted; None: all.

    Returns:
        The KV cache; hidden states for the next stage, or the last stage's results by name.
    """
    module, at = stage.model.module(leaves), batch.step()
    stack, tokens = module.stacks["decoder"], batch.tokens
    if x is None:
        x = stack.embed(tokens[None], jnp.zeros_like(tokens)[None], at, module.shared)
    x, cache = stack.run_layers(x, tokens[None], at, cache, module.shared)
    if not stage.slice.last:
        return cache, x
    if last is not None:
        x = x[:, jnp.maximum(last, 0)]
    results = stack.results(x, at, module.shared)
    return cache, {want: results[want][0] for want in wants}


def encoder_forward(
    stage: StageModel,
    wants: Sequence[Want],
    leaves: Leaves,
    x: Float[Array, "batch tokens hidden"] | None,
    tokens: Int[Array, "batch tokens"],
    types: Int[Array, "batch tokens"],
    lengths: Int[Array, " batch"],
) -> Array | StageResults:
    """The forward pass of an encoder stage over whole texts; arguments as of `decoder_forward`.

    Args:
        types: token type ids.
        lengths: tokens of each text without padding.
    """
    module, at = stage.model.module(leaves), ForwardBatch.of_texts(tokens, lengths)
    stack = module.stacks["encoder"]
    if x is None:
        x = stack.embed(tokens, types, at, module.shared)
    x, _ = stack.run_layers(x, tokens, at, {}, module.shared)
    if not stage.slice.last:
        return x
    results = stack.results(x, at, module.shared)
    return {want: results[want] for want in wants}
