"""Transformer layer: its Flax modules, wired as its specification says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jinfer.modelspec.layer_spec import LayerSpec
from jinfer.nn.attention_modules import Attention, CrossAttention
from jinfer.nn.block_registry import build_module
from jinfer.nn.feed_forward import MLP, GatedMLP
from jinfer.nn.forward_context import ForwardBatch
from jinfer.nn.hidden_tap import HiddenTap
from jinfer.nn.mla import LatentAttention
from jinfer.nn.moe_block import MixtureOfExperts
from jinfer.nn.tensor_parallel import DeferredAllReduce, resolve_all_reduce
from jinfer.ops.attention.kv_cache import Cache

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_ATTENTIONS = (Attention, LatentAttention, CrossAttention)
_FEED_FORWARDS = (MLP, GatedMLP, MixtureOfExperts)


class Layer(nnx.Module):
    """A transformer layer: its modules, applied as its wiring formula says."""

    def __init__(self, spec: LayerSpec, dtype: DTypeLike) -> None:
        self.wiring, self.axis = spec.wiring, spec.axis
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
            arguments = list(map(resolve_all_reduce, given))
            if isinstance(module, HiddenTap):
                out, cache[name] = module(arguments[0], batch, cache[name])
                return out
            if isinstance(module, _ATTENTIONS):
                attention: Any = module
                out, kept = attention(arguments[0], batch, cache.get(name))
                if kept is not None:
                    cache[name] = kept
                return self._summed(out)
            out = module(*arguments)
            return self._summed(out) if isinstance(module, _FEED_FORWARDS) else out

        # The encoder's output is in the cache, so its name is unused here.
        inputs = {"x": x, "tokens": tokens, "positions": batch.positions, "encoded": None}
        return resolve_all_reduce(self.wiring.run(inputs, call)[0]), cache

    def _summed(self, part: Array) -> Any:
        """The all-reduced output of a module sharded over devices."""
        return part if self.axis is None else DeferredAllReduce(part, self.axis)


def shared_modules(layer: Layer, shared: nnx.Dict) -> dict[str, nnx.Module]:
    """The shared modules that a layer calls."""
    return {name: shared[name] for name in layer.wiring.calls if name not in layer.modules}
