"""Trace steps: compiled forward passes that return named values of the model (activations)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array

from jinfer.engine.runner.flat_batch import FlatBatch
from jinfer.engine.runner.steps import Leaves
from jinfer.nn.abstract_model import AbstractModel
from jinfer.nn.activation_taps import ActivationTaps
from jinfer.nn.row_edits import take_row_edits
from jinfer.ops.attention.kv_cache import Cache

if TYPE_CHECKING:
    from jaxtyping import Int

type Captured = dict[str, Array]


def trace(
    model: AbstractModel, capture: tuple[str, ...], leaves: Leaves, cache: Cache, batch: FlatBatch
) -> tuple[Cache, Captured]:
    """The decoder's forward pass over a flat batch.

    What no captured value needs, such as logits, is not computed.

    Args:
        capture: names of the values.

    Returns:
        The cache, and the values [tokens, ...] by name: float32, or whole numbers.
    """
    at = batch.step()
    edits = {} if at.taps is None else at.taps.edits
    at = at._replace(taps=ActivationTaps(capture, edits))
    results, cache = model.module(leaves).decode_all(batch.tokens, at, cache)
    return cache, _plain(results["captured"])


def trace_encoder(
    model: AbstractModel,
    capture: tuple[str, ...],
    leaves: Leaves,
    cache: Cache,
    tokens: Int[Array, "1 tokens"],
    types: Int[Array, "1 tokens"],
    lengths: Int[Array, " 1"],
    tables: Mapping[str, Any],
) -> Captured:
    """The encoder's forward pass over a text; the values as of `trace`. The cache is empty.

    Args:
        tables: of edits, if there are any.
    """
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    rows = jnp.where(positions < lengths[0], 0, -1)
    _, edits = take_row_edits(dict(tables), rows, positions)
    taps = ActivationTaps(capture, edits)
    return _plain(model.module(leaves).encode(tokens, types, lengths, taps)["captured"])


def _plain(captured: Captured) -> Captured:
    def of(value: Array) -> Array:
        wide = jnp.issubdtype(value.dtype, jnp.floating)
        return value[0].astype(jnp.float32) if wide else value[0]

    return {name: of(value) for name, value in captured.items()}
