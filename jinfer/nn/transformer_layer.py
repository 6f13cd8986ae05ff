"""Transformer layer: its Flax modules, wired as its specification says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jinfer.modelspec.layer_spec import LayerSpec
from jinfer.nn.block_registry import build_module
from jinfer.nn.forward_context import ForwardBatch
from jinfer.nn.tensor_parallel import DeferredAllReduce, resolve_all_reduce
from jinfer.ops.attention.kv_cache import Cache

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Layer(nnx.Module):
    """A transformer layer: its modules, applied as its wiring formula says."""

    def __init__(self, spec: LayerSpec, dtype: DTypeLike) -> None:
        self.wiring, self.axis = spec.wiring, spec.axis
        self.cached = frozenset(n for n, block in spec.modules if block.cached() is not None)
        self.partial = frozenset(n for n, block in spec.modules if block.gives_partial_sums())
        self.modules = nnx.Dict({name: build_module(b, dtype) for name, b in spec.modules})

    def __call__(
        self,
        x: Float[Array, "batch tokens hidden"],
        tokens: Int[Array, "batch tokens"],
        batch: ForwardBatch,
        cache: Cache,
        shared: Mapping[str, nnx.Module],
    ) -> tuple[Float[Array, "batch tokens hidden"], Cache]:
        """The layer's output, and its attentions' caches, keyed by module name."""
        cache = dict(cache)

        def call(name: str, given: list[Any]) -> Any:
            module: Any = self.modules[name] if name in self.modules else shared[name]
            # The encoder's output is in the cache.
            arguments = [resolve_all_reduce(one) for one in given if one is not None]
            if name in self.cached:
                out, entry = module(*arguments, batch, cache.get(name))
                if entry is not None:
                    cache[name] = entry
            else:
                out = module(*arguments)
            if self.axis is None or name not in self.partial:
                return out
            return DeferredAllReduce(out, self.axis)

        inputs = {"x": x, "tokens": tokens, "positions": batch.positions, "encoded": None}
        return resolve_all_reduce(self.wiring.run(inputs, call)[0]), cache


def shared_modules(layer: Layer, shared: nnx.Dict) -> dict[str, nnx.Module]:
    """The shared modules that a layer calls."""
    return {name: shared[name] for name in layer.wiring.calls if name not in layer.modules}
