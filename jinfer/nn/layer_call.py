"""Layer call: a layer as a function of its arrays, so that equal layers are traced once."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import Array

from jinfer.nn.forward_context import ForwardBatch
from jinfer.nn.transformer_layer import HiddenState
from jinfer.ops.attention.kv_cache import Cache
from jinfer.ops.fusion.fuse_cpu import fuse_operations
from jinfer.ops.fusion.weight_pointers import PointerTable, WeightPointers


@partial(jax.jit, static_argnums=(0, 1, 2))
def run_layer(
    platform: tuple[str, bool, bool],
    definition: Any,
    alone: bool,
    state: Any,
    hidden: HiddenState,
    tokens: Array,
    batch: ForwardBatch,
    cache: Cache,
    table: PointerTable | None,
) -> tuple[HiddenState, Cache]:
    """A layer as a function, so that equal layers are traced and lowered once.

    Args:
        platform: target platform of the trace, whether kernels are interpreted, and whether matmuls
            may round to bfloat16.
        alone: whether its operations are fused here, or later with other layers'.
        table: pointers of the layer's weights, the first of `state`.
    """

    def run(
        state: Any, hidden: HiddenState, tokens: Array, batch: ForwardBatch, cache: Cache
    ) -> tuple[HiddenState, Cache]:
        layer, shared = nnx.merge(definition, state)
        return layer(hidden, tokens, batch, cache, shared)

    pointers = None if table is None else WeightPointers(table, range(len(table)))
    given = state, hidden, tokens, batch, cache
    return fuse_operations(run, pointers)(*given) if alone else run(*given)


class LayerCall(NamedTuple):
    """A layer and the shared modules it calls, as graph definition and arrays.

    Attributes:
        name: such as "decoder.3".
        state: the arrays, the layer's own first.
        takes: the values beside `x` that it reads.
        shares: its attentions to other layers' keys -> the names of the caches of these.
        pointers: of its own weights; None: they are operands.
    """

    name: str
    definition: Any
    state: Any
    takes: tuple[str, ...]
    shares: dict[str, str]
    pointers: WeightPointers | None
