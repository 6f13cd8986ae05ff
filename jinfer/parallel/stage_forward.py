"""Pipeline parallelism: one stage's forward pass, as pure functions that each device runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jinfer.engine.runner.flat_batch import FlatBatch
from jinfer.nn.abstract_model import Want
from jinfer.nn.forward_context import ForwardBatch
from jinfer.nn.transformer_layer import HiddenState
from jinfer.ops.attention.kv_cache import Cache
from jinfer.parallel.stage_model import StageModel

if TYPE_CHECKING:
    from jaxtyping import Int

type Leaves = tuple[Array, ...]
type StageResults = dict[str, Array]


def decoder_forward(
    stage: StageModel,
    wants: Sequence[Want],
    drafted: bool,
    leaves: Leaves,
    cache: Cache,
    given: HiddenState | None,
    batch: FlatBatch,
    last: Int[Array, " chosen"] | None,
) -> tuple[Cache, HiddenState | StageResults]:
    """The forward pass of a decoder stage over a flat batch.

    Args:
        wants: the results that the last stage returns.
        drafted: whether tokens may be rejected: `verify.accept_states` has to follow.
        leaves: the stage's parameters, flattened.
        given: hidden states from the previous stage; None for the first stage.
        last: indices of the tokens whose results are wanted; None: all.

    Returns:
        The KV cache; hidden states for the next stage, or the last stage's results by name.
    """
    module, at = stage.model.module(leaves), batch.step()
    at = at.with_draft_runs() if drafted else at
    stack, tokens = module.stacks["decoder"], batch.tokens
    if given is None:
        given = stack.embed(tokens[None], jnp.zeros_like(tokens)[None], at, module.shared)
    state, cache = stack.run_layers(given, tokens[None], at, cache, module.shared)
    if not stage.slice.last:
        return cache, state
    if last is not None:
        state = jax.tree.map(lambda each: each[:, jnp.maximum(last, 0)], state)
    results = stack.results(state, at, module.shared)
    return cache, {want: results[want][0] for want in wants}


def encoder_forward(
    stage: StageModel,
    wants: Sequence[Want],
    leaves: Leaves,
    given: HiddenState | None,
    tokens: Int[Array, "batch tokens"],
    types: Int[Array, "batch tokens"],
    lengths: Int[Array, " batch"],
) -> HiddenState | StageResults:
    """The forward pass of an encoder stage over whole texts; arguments as of `decoder_forward`.

    Args:
        types: token type ids.
        lengths: tokens of each text without padding.
    """
    module, at = stage.model.module(leaves), ForwardBatch.of_texts(tokens, lengths)
    stack = module.stacks["encoder"]
    if given is None:
        given = stack.embed(tokens, types, at, module.shared)
    state, _ = stack.run_layers(given, tokens, at, {}, module.shared)
    if not stage.slice.last:
        return state
    results = stack.results(state, at, module.shared)
    return {want: results[want] for want in wants}
