"""Transformer layer: its Flax modules, wired as its specification says."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jinfer.modelspec.layer_spec import LayerSpec, chosen_value, shared_keys
from jinfer.nn.activation_taps import observed, tapping
from jinfer.nn.block_registry import build_module
from jinfer.nn.forward_context import ForwardBatch
from jinfer.nn.lora_rows import rows_adapted_by
from jinfer.nn.tensor_parallel import DeferredAllReduce, resolve_all_reduce
from jinfer.ops.attention.kv_cache import STATE, Cache, IndexedCache, LayerCache, StateCache
from jinfer.ops.fusion.fuse_cpu import fuse_operations
from jinfer.ops.fusion.weight_pointers import PointerTable, WeightPointers

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class HiddenState(NamedTuple):
    """Values that one layer passes on to the next.

    Attributes:
        x: the hidden states.
        values: the assigned values of `StackSpec.carried`, by name.
        captured: values that taps have captured so far, by name: [batch, tokens, ...].
    """

    x: Float[Array, "batch tokens hidden"]
    values: dict[str, Float[Array, "batch tokens width"]]
    captured: dict[str, Array]


class Layer(nnx.Module):
    """A transformer layer: its modules, applied as its wiring formula says."""

    def __init__(self, spec: LayerSpec, dtype: DTypeLike, carried: frozenset[str]) -> None:
        self.wiring, self.axis = spec.wiring, spec.axis
        self.takes = tuple(sorted(spec.takes))
        self.gives = tuple(sorted(spec.wiring.assigned & carried))
        self.chosen = frozenset(map(chosen_value, spec.choosing)) & carried
        self.reusing = spec.reusing
        self.cached = frozenset(n for n, block in spec.modules if block.cached() is not None)
        self.shares = tuple((name, other) for (_, name), other in shared_keys([spec]).items())
        self.partial = frozenset(n for n, block in spec.modules if block.gives_partial_sums())
        self.modules = nnx.Dict({name: build_module(b, dtype) for name, b in spec.modules})

    def __call__(
        self,
        state: HiddenState,
        tokens: Int[Array, "batch tokens"],
        batch: ForwardBatch,
        cache: Cache,
        shared: Mapping[str, nnx.Module],
    ) -> tuple[HiddenState, Cache]:
        """Computes the layer's output, and its attentions' caches by module name.

        An attention to another layer's keys finds that layer's cache under its own name. Reads the
        carried values that it takes, in addition to `x`, and returns those that it assigns.
        """
        cache = dict(cache)
        others = {name: cache.pop(name) for name, _ in self.shares}
        chosen = dict[str, Any]()

        def call(name: str, inputs: list[Any]) -> Any:
            module: Any = self.modules[name] if name in self.modules else shared[name]
            # The encoder's output is in the cache.
            arguments = [resolve_all_reduce(one) for one in inputs if one is not None]
            if name in self.cached:
                before = cache.get(name)
                if name in self.reusing:
                    kept = state.values[chosen_value(name)][0]
                    before = IndexedCache(cache[name], None, kept)
                out, entry = module(*arguments, batch, before)
                if isinstance(entry, IndexedCache):
                    chosen[chosen_value(name)], entry = _parted(entry)
                if entry is not None:
                    cache[name] = entry
                if isinstance(entry, dict):
                    _observe_states(entry, batch)
            elif name in others:
                out, _ = module(*arguments, batch, others[name])
            else:
                out = module(*arguments)
            if self.axis is None or name not in self.partial:
                return out
            return DeferredAllReduce(out, self.axis)

        inputs: dict[str, Any] = {"tokens": tokens, "positions": batch.positions}
        inputs |= {"encoded": None, "grid": batch.grid}
        known = {**inputs, **state.values, "x": state.x}
        lead = batch.positions.shape
        with rows_adapted_by(batch.adapters), tapping(batch.taps, lead) as taps:
            x, assigned = self.wiring.run(known, call, taps)
        gives = {name: resolve_all_reduce(assigned[name]) for name in self.gives}
        gives |= {name: chosen[name] for name in self.chosen}
        captured = {} if taps is None else taps.captured
        return HiddenState(resolve_all_reduce(x), gives, captured), cache


def _parted(cache: IndexedCache) -> tuple[Array, LayerCache | IndexedCache]:
    """Returns the chosen keys [1, tokens, top_k], and the cache to keep after the step."""
    assert cache.chosen is not None, "sparse attention says which keys it has seen"
    kept = cache.vectors if cache.index_keys is None else cache._replace(chosen=None)
    return cache.chosen[None], kept


def _observe_states(states: StateCache, batch: ForwardBatch) -> None:
    """Taps of a recurrent block's states after the batch: [sequences, ...]."""
    for name, table in states.items():
        observed(name, partial(_of_sequences, table, batch))


def _of_sequences(table: Array, batch: ForwardBatch) -> Array:
    return table[batch.attention_metadata(STATE).tables[:, 0]]


def shared_modules(layer: Layer, shared: nnx.Dict) -> dict[str, nnx.Module]:
    """Returns the shared modules that a layer calls."""
    return {name: shared[name] for name in layer.wiring.calls if name not in layer.modules}


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
    """Runs a layer as a function, so that equal layers are traced and lowered once.

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
    arguments = state, hidden, tokens, batch, cache
    return fuse_operations(run, pointers)(*arguments) if alone else run(*arguments)


class LayerCall(NamedTuple):
    """A layer and the shared modules it calls, as graph definition and arrays.

    Attributes:
        name: the layer's name, such as "decoder.3".
        state: the arrays, the layer's own first.
        takes: the carried values that it reads, in addition to `x`.
        shares: its attentions to other layers' keys -> the names of these layers' caches.
        pointers: pointers of its own weights; None: the weights are operands.
    """

    name: str
    definition: Any
    state: Any
    takes: tuple[str, ...]
    shares: dict[str, str]
    pointers: WeightPointers | None
