"""Transformer: a whole model as Flax modules, assembled as its specification says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jinfer.modelspec.layer_spec import StackSpec
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.nn.adapted_rows import AdapterSlots, building_with
from jinfer.nn.attention_modules import CrossAttention
from jinfer.nn.block_registry import build_module
from jinfer.nn.forward_context import ForwardBatch
from jinfer.nn.pooling import Pool
from jinfer.nn.positions import Rotary
from jinfer.nn.projections import Head
from jinfer.nn.transformer_layer import HiddenState, Layer, shared_modules
from jinfer.ops.attention.kv_cache import AttentionMetadata, Cache
from jinfer.ops.backend import backend, interpreted
from jinfer.ops.fusion.fuse_cpu import FusedFunction, fuse_operations, fuses_for_cpu
from jinfer.ops.fusion.weight_pointers import (
    PointerTable,
    WeightPointers,
    merge_weight_pointers,
    weight_pointers_of,
)
from jinfer.ops.matmul.dense import allow_bfloat16_rounding, allows_bfloat16_rounding

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@partial(jax.jit, static_argnums=(0, 1, 2))
def _run_layer(
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


class _LayerCall(NamedTuple):
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


class Stack(nnx.Module):
    """A stem, layers and a head."""

    def __init__(
        self, spec: StackSpec, dtype: DTypeLike, adapters: AdapterSlots | None = None
    ) -> None:
        self.name = spec.name
        self.stem, self.head = spec.stem, spec.head
        self.follows = spec.follows
        self.rounded = False  # whether products may round; see `jinfer.ops.matmul.dense`
        self.carried = spec.carried
        self.sent = spec.values_before(len(spec.layers))
        with building_with(adapters):
            self.layers = nnx.List([Layer(layer, dtype, spec.carried) for layer in spec.layers])
        self.modules = nnx.Dict({name: build_module(b, dtype) for name, b in spec.modules})

    def embed(
        self,
        tokens: Int[Array, "batch tokens"],
        types: Int[Array, "batch tokens"],
        batch: ForwardBatch,
        shared: nnx.Dict,
        hidden: Float[Array, "batch tokens hidden"] | None = None,
    ) -> HiddenState:
        """The stem: tokens to vectors; a draft head also takes the target's hidden states."""
        inputs = {"tokens": tokens, "positions": batch.positions, "token_types": types}
        inputs |= {} if hidden is None else {"hidden": hidden}
        with allow_bfloat16_rounding(self.rounded):
            run = self.stem.run
            x, assigned = run(inputs, lambda name, args: self._module(name, shared)(*args))
        return HiddenState(x, {n: v for n, v in assigned.items() if n in self.carried})

    def taken(
        self, vectors: Float[Array, "*rows width"], shared: nnx.Dict
    ) -> Float[Array, "*rows hidden"]:
        """A draft head's projection of the target's hidden states."""
        assert self.follows is not None, "it stands alone"
        inputs = {"hidden": vectors}
        run = self.follows.hidden.run
        with allow_bfloat16_rounding(self.rounded):
            return run(inputs, lambda name, args: self._module(name, shared)(*args))[0]

    def run_layers(
        self,
        hidden: HiddenState,
        tokens: Array,
        batch: ForwardBatch,
        cache: Cache,
        shared: nnx.Dict,
    ) -> tuple[HiddenState, Cache]:
        """All layers, with their cache if any."""
        batch = batch.with_cos_sin(self._ropes()).with_runs()
        layers = [self._layer(i, shared) for i in range(len(self.layers))]
        given = hidden, tokens, batch, dict(cache)
        # If two layers do not become one call, each has its own: equal layers are then traced and
        # lowered once.
        states = [layer.state for layer in layers]
        taken = {name for layer in layers[-2:] for name in layer.takes}
        some = layers[-2:] if taken <= hidden.values.keys() else layers
        if fuses_for_cpu(states, given) and self._joined(some, given).count < 2:
            return self._joined(layers, given).results()
        return self._through(layers, *given, alone=True)

    def _joined(
        self, layers: Sequence[_LayerCall], given: Any
    ) -> FusedFunction[tuple[HiddenState, Cache]]:
        """Consecutive layers with their operations fused."""
        trees = [jax.tree.structure(layer.state) for layer in layers]
        own, others = list[list[Any]](), list[list[Any]]()
        for layer in layers:
            leaves = jax.tree.leaves(layer.state)
            count = 0 if layer.pointers is None else len(layer.pointers.rows)
            own.append(leaves[:count])
            others.append(leaves[count:])

        def run(own: Any, others: Any, *given: Any) -> tuple[HiddenState, Cache]:
            states = map(jax.tree.unflatten, trees, map(add, own, others))
            parts = [
                layer._replace(state=state, pointers=None)
                for layer, state in zip(layers, states, strict=True)
            ]
            return self._through(parts, *given, alone=False)

        pointers = merge_weight_pointers(
            [layer.pointers for layer in layers if layer.pointers is not None]
        )
        return FusedFunction(run, (own, others, *given), pointers)

    def _through(
        self,
        layers: Sequence[_LayerCall],
        hidden: HiddenState,
        tokens: Array,
        batch: ForwardBatch,
        cache: Cache,
        *,
        alone: bool,
    ) -> tuple[HiddenState, Cache]:
        """Applies consecutive layers."""
        cache, (x, values) = dict(cache), hidden
        for layer in layers:
            prefix = f"{layer.name}."
            own = {k.removeprefix(prefix): v for k, v in cache.items() if k.startswith(prefix)}
            own |= {name: cache[other] for name, other in layer.shares.items()}
            given = HiddenState(x, {name: values[name] for name in layer.takes})
            (x, changed), own = self._run(layer, given, tokens, batch, own, alone=alone)
            cache |= {prefix + name: part for name, part in own.items()}
            values = values | changed
        return HiddenState(x, {name: values[name] for name in self.sent if name in values}), cache

    def run_layer(
        self,
        number: int,
        x: Array,
        tokens: Array,
        batch: ForwardBatch,
        cache: Cache,
        shared: nnx.Dict,
    ) -> tuple[Float[Array, "batch tokens hidden"], Cache]:
        """One layer, with its attentions' caches by module name, where none takes other values."""
        layer, hidden = self._layer(number, shared), HiddenState(x, {})
        out, cache = self._run(layer, hidden, tokens, batch, cache, alone=True)
        return out.x, cache

    def _layer(self, number: int, shared: nnx.Dict) -> _LayerCall:
        layer = self.layers[number]
        definition, state = nnx.split((layer, shared_modules(layer, shared)))
        name = f"{self.name}.{number}"
        pointers = weight_pointers_of(name)
        # Weights read by pointer must be those in the table.
        assert pointers is None or len(pointers.rows) == len(jax.tree.leaves(state[0]))
        shares = {own: f"{self.name}.{other}.{own}" for own, other in layer.shares}
        return _LayerCall(name, definition, state, layer.wiring.takes, shares, pointers)

    def _run(
        self,
        layer: _LayerCall,
        hidden: HiddenState,
        tokens: Array,
        batch: ForwardBatch,
        cache: Cache,
        *,
        alone: bool,
    ) -> tuple[HiddenState, Cache]:
        table = None if layer.pointers is None else layer.pointers.sliced_table()
        with allow_bfloat16_rounding(self.rounded):
            here = backend(), interpreted(), allows_bfloat16_rounding()
            given = layer.state, hidden, tokens, batch, cache, table
            return _run_layer(here, layer.definition, alone, *given)

    def run_alone(
        self,
        hidden: HiddenState,
        tokens: Array,
        batch: ForwardBatch,
        cache: Mapping[str, Any],
        shared: nnx.Dict,
    ) -> HiddenState:
        """The only layer of a one-layer stack, whose attention may be computed by other programs.

        Args:
            cache: by the names of the layer's modules.
        """
        (layer,) = self.layers
        batch = batch.with_cos_sin(self._ropes()).with_runs()
        with allow_bfloat16_rounding(self.rounded):
            called = shared_modules(layer, shared)
            out, _ = layer(hidden, tokens, batch, dict(cache), called)
        values = hidden.values | out.values
        return HiddenState(out.x, {name: values[name] for name in self.sent})

    def _ropes(self) -> Iterator[Rotary]:
        for layer in self.layers:
            for module in layer.modules.values():
                for part in (module, getattr(module, "indexer", None)):
                    if isinstance(rope := getattr(part, "rope", None), Rotary):
                        yield rope

    def results(
        self, hidden: HiddenState, batch: ForwardBatch, shared: nnx.Dict
    ) -> dict[str, Array]:
        """The head: the values it assigns by name, and its result as "logits".

        "hidden" is the input of the LM head, or the result, unless the head assigns it.
        """
        seen: dict[str, Array] = {}

        def call(name: str, arguments: list[Any]) -> Any:
            module: Any = self._module(name, shared)
            if isinstance(module, Head):
                seen["hidden"] = arguments[0]
                embed: Any = shared["embed"] if module.tied else None
                return module(arguments[0], embed)
            if isinstance(module, Pool):
                assert batch.lengths is not None, "only whole texts are pooled"
                return module(arguments[0], batch.lengths)
            return module(*arguments)

        with allow_bfloat16_rounding(self.rounded):
            value, assigned = self.head.run({**hidden.values, "x": hidden.x}, call)
        return {"hidden": value, **seen, "logits": value, **assigned}

    def _module(self, name: str, shared: nnx.Dict) -> Any:
        return self.modules[name] if name in self.modules else shared[name]


class Model(nnx.Module):
    """A whole model. Parameters are named `embed.weight`, `decoder.3.attn.q.weight`, ..."""

    def __init__(
        self, spec: ModelSpec, dtype: DTypeLike, adapters: AdapterSlots | None = None
    ) -> None:
        self.dtype = jnp.dtype(dtype)
        self.shared = nnx.Dict({name: build_module(b, dtype) for name, b in spec.shared})
        self.stacks = nnx.Dict({stack.name: Stack(stack, dtype, adapters) for stack in spec.stacks})

    def taken(self, vectors: Float[Array, "tokens width"]) -> Float[Array, "tokens hidden"]:
        """A draft head's projection of the target's hidden states, in its own dtype."""
        stack = self.stacks["decoder"]
        return stack.taken(vectors.astype(self.dtype), self.shared)

    def decode(
        self,
        tokens: Int[Array, " tokens"],
        batch: ForwardBatch,
        cache: Cache,
        want: str,
        last: Int[Array, " chosen"] | None = None,
    ) -> tuple[Float[Array, "chosen width"], Cache]:
        """One result of `decode_all`."""
        results, cache = self.decode_all(tokens, batch, cache, last)
        return results[want], cache

    def decode_all(
        self,
        tokens: Int[Array, " tokens"],
        batch: ForwardBatch,
        cache: Cache,
        last: Int[Array, " chosen"] | None = None,
        hidden: Float[Array, "tokens hidden"] | None = None,
    ) -> tuple[dict[str, Float[Array, "chosen width"]], Cache]:
        """The decoder's forward pass over a flat batch: "logits", "hidden", and "classes" if any.

        Args:
            tokens: new tokens of any sequences.
            batch: their positions and block tables.
            cache: the KV cache; returned with the new tokens.
            last: the tokens whose results are wanted; None: all.
            hidden: for a draft head: the target's hidden states beside the tokens.
        """
        stack = self.stacks["decoder"]
        beside = None if hidden is None else hidden[None]
        state = stack.embed(tokens[None], jnp.zeros_like(tokens)[None], batch, self.shared, beside)
        state, cache = stack.run_layers(state, tokens[None], batch, cache, self.shared)
        if last is not None:
            state = jax.tree.map(lambda each: each[:, last], state)
        results = stack.results(state, batch, self.shared)
        named = ("logits", "hidden", *({"classes"} & results.keys()))
        return {name: results[name][0] for name in named}, cache

    def encode(
        self,
        tokens: Int[Array, "batch tokens"],
        types: Int[Array, "batch tokens"],
        lengths: Int[Array, " batch"],
    ) -> dict[str, Float[Array, "batch ..."]]:
        """The encoder's forward pass over whole texts.

        Args:
            tokens: padded at the end.
            types: token type ids (first or second text).
            lengths: tokens of each text.

        Returns:
            The head's results by name; its value is "logits".
        """
        stack = self.stacks["encoder"]
        batch = ForwardBatch.of_texts(tokens, lengths)
        state = stack.embed(tokens, types, batch, self.shared)
        state, _ = stack.run_layers(state, tokens, batch, {}, self.shared)
        return stack.results(state, batch, self.shared)

    def fill(
        self, encoded: Float[Array, "1 length hidden"], cache: Cache, at: AttentionMetadata
    ) -> Cache:
        """The cache with the cross-attention keys and values of an encoder's output."""
        cache = dict(cache)
        stack = self.stacks["decoder"]
        with allow_bfloat16_rounding(stack.rounded):
            for i, layer in enumerate(stack.layers):
                for name, module in layer.modules.items():
                    if isinstance(module, CrossAttention):
                        key = f"decoder.{i}.{name}"
                        cache[key] = module.fill(encoded, cache[key], at)
        return cache
