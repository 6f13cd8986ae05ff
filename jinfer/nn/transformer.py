"""Transformer: a whole model as Flax modules, assembled as its specification says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import add
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jinfer.modelspec.layer_spec import StackSpec
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.nn.activation_taps import ActivationTaps, Tapping
from jinfer.nn.attention_modules import CrossAttention
from jinfer.nn.block_registry import build_module
from jinfer.nn.forward_context import ForwardBatch
from jinfer.nn.image_modules import PatchGrid
from jinfer.nn.lora_rows import AdapterSlots, building_with
from jinfer.nn.pooling import Pool
from jinfer.nn.positions import Rotary
from jinfer.nn.projections import Head
from jinfer.nn.transformer_layer import HiddenState, Layer, LayerCall, run_layer, shared_modules
from jinfer.ops.attention.kv_cache import AttentionMetadata, Cache
from jinfer.ops.backend import backend, interpreted
from jinfer.ops.fusion.fuse_cpu import FusedFunction, fuses_for_cpu
from jinfer.ops.fusion.weight_pointers import merge_weight_pointers, weight_pointers_of
from jinfer.ops.matmul.dense import allow_bfloat16_rounding, allows_bfloat16_rounding

if TYPE_CHECKING:
    from jaxtyping import Float, Int


# Results of a head without the head's prefix in their names.
_RESULTS = ("hidden", "logits", "pooled", "classes")


class Stack(nnx.Module):
    """A stem, layers and a head."""

    def __init__(
        self,
        spec: StackSpec,
        dtype: DTypeLike,
        adapters: AdapterSlots | None = None,
        with_decoder: bool = False,
    ) -> None:
        """Builds the modules.

        Args:
            with_decoder: whether results get the prefix "encoder."; the decoder has short names.
        """
        self.name = spec.name
        self.outer = f"{spec.name}." if with_decoder else ""
        self.stem, self.head = spec.stem, spec.head
        self.follows, self.group = spec.follows, spec.group
        self.rounded = False  # whether products may round; see `jinfer.ops.matmul.dense`
        self.remat = False  # whether a backward pass computes each layer again (`jax.checkpoint`)
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
        """Maps tokens to vectors; a draft head also reads the target's hidden states."""
        inputs = {"tokens": tokens, "positions": batch.positions, "token_types": types}
        return self._begin(inputs | ({} if hidden is None else {"hidden": hidden}), batch, shared)

    def embed_patches(
        self, patches: Float[Array, "tiles patches values"], grid: PatchGrid, shared: nnx.Dict
    ) -> tuple[HiddenState, ForwardBatch]:
        """Maps the patches of tiles to vectors; returns the batch of patches and class tokens."""
        inputs = {"patches": patches, "rows": grid.rows, "columns": grid.columns, "grid": grid}
        batch = ForwardBatch.of_patches(grid, patches.shape[1])
        state = self._begin(inputs, batch, shared)
        return state, ForwardBatch.of_patches(grid, state.x.shape[1])

    def _begin(
        self, inputs: Mapping[str, Any], batch: ForwardBatch, shared: nnx.Dict
    ) -> HiddenState:
        """Applies the stem."""

        def run(inputs: Mapping[str, Any]) -> HiddenState:
            taps = self._tapping(batch, "stem", {"x": f"{self.outer}embed"})
            call = self.stem.run
            x, made = call(inputs, lambda name, args: self._module(name, shared)(*args), taps)
            captured = {} if taps is None else taps.captured
            return HiddenState(x, {n: v for n, v in made.items() if n in self.carried}, captured)

        with allow_bfloat16_rounding(self.rounded):
            return FusedFunction(run, (inputs,)).results() if fuses_for_cpu(inputs) else run(inputs)

    def project_hidden(
        self, vectors: Float[Array, "*rows width"], shared: nnx.Dict
    ) -> Float[Array, "*rows hidden"]:
        """Projects the target's hidden states for a draft head."""
        assert self.follows is not None, "only a draft head has a target"
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
        """Applies all layers, with their cache if any."""
        batch = batch.with_cos_sin(self._ropes()).with_runs()
        layers = [self._layer(i, shared) for i in range(len(self.layers))]
        before, hidden = hidden.captured, hidden._replace(captured={})
        given = hidden, tokens, batch, dict(cache)
        # If two layers do not become one call, each layer is a call: equal layers are then traced
        # and lowered once.
        states = [layer.state for layer in layers]
        read_names = {name for layer in layers[-2:] for name in layer.takes}
        checked = layers[-2:] if read_names <= hidden.values.keys() else layers
        if fuses_for_cpu(states, given) and self._joined(checked, given).count < 2:
            out, cache = self._joined(layers, given).results()
        else:
            out, cache = self._through(layers, *given, alone=True)
        return out._replace(captured=before | out.captured), cache

    def _joined(
        self, layers: Sequence[LayerCall], given: Any
    ) -> FusedFunction[tuple[HiddenState, Cache]]:
        """Fuses the operations of consecutive layers."""
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
        layers: Sequence[LayerCall],
        hidden: HiddenState,
        tokens: Array,
        batch: ForwardBatch,
        cache: Cache,
        *,
        alone: bool,
    ) -> tuple[HiddenState, Cache]:
        """Applies consecutive layers."""
        cache, (x, values, captured) = dict(cache), hidden
        taps = batch.taps
        for layer in layers:
            prefix = f"{layer.name}."
            own = {k.removeprefix(prefix): v for k, v in cache.items() if k.startswith(prefix)}
            own |= {name: cache[other] for name, other in layer.shares.items()}
            given = HiddenState(x, {name: values[name] for name in layer.takes}, {})
            batch = batch.resized(x.shape[1])
            batch = batch if taps is None else batch._replace(taps=taps.of(layer.name))
            (x, changed, seen), own = self._run(layer, given, tokens, batch, own, alone=alone)
            cache |= {prefix + name: part for name, part in own.items()}
            values = values | changed
            captured = captured | {prefix + name: value for name, value in seen.items()}
        sent = {name: values[name] for name in self.sent if name in values}
        return HiddenState(x, sent, captured), cache

    def run_layer(
        self,
        number: int,
        x: Array,
        tokens: Array,
        batch: ForwardBatch,
        cache: Cache,
        shared: nnx.Dict,
    ) -> tuple[Float[Array, "batch tokens hidden"], Cache]:
        """Applies one layer without carried values, with its attentions' caches by module name."""
        layer, hidden = self._layer(number, shared), HiddenState(x, {}, {})
        out, cache = self._run(layer, hidden, tokens, batch, cache, alone=True)
        return out.x, cache

    def _layer(self, number: int, shared: nnx.Dict) -> LayerCall:
        layer = self.layers[number]
        definition, state = nnx.split((layer, shared_modules(layer, shared)))
        name = f"{self.name}.{number}"
        pointers = weight_pointers_of(name)
        # Weights read by pointer must be those in the table.
        assert pointers is None or len(pointers.rows) == len(jax.tree.leaves(state[0]))
        shares = {own: f"{self.name}.{other}.{own}" for own, other in layer.shares}
        return LayerCall(name, definition, state, layer.takes, shares, pointers)

    def _run(
        self,
        layer: LayerCall,
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
            call = partial(run_layer, here, layer.definition, alone)
            return (jax.checkpoint(call) if self.remat else call)(*given)

    def run_alone(
        self,
        hidden: HiddenState,
        tokens: Array,
        batch: ForwardBatch,
        cache: Mapping[str, Any],
        shared: nnx.Dict,
    ) -> tuple[HiddenState, Cache]:
        """Applies the only layer of a one-layer stack; other programs may compute its attention.

        Args:
            cache: by the names of the layer's modules.
        """
        (layer,) = self.layers
        batch = batch.with_cos_sin(self._ropes()).with_runs()
        with allow_bfloat16_rounding(self.rounded):
            called = shared_modules(layer, shared)
            out, kept = layer(hidden, tokens, batch, dict(cache), called)
        values = hidden.values | out.values
        return HiddenState(out.x, {name: values[name] for name in self.sent}, {}), kept

    def _ropes(self) -> Iterator[Rotary]:
        for layer in self.layers:
            for module in layer.modules.values():
                for part in (module, getattr(module, "indexer", None)):
                    if isinstance(rope := getattr(part, "rope", None), Rotary):
                        yield rope

    def results(self, hidden: HiddenState, batch: ForwardBatch, shared: nnx.Dict) -> dict[str, Any]:
        """Applies the head: returns the values it assigns by name, and its result as "logits".

        "hidden" is the input of the LM head, or the result, unless the head assigns it. With taps,
        "captured" has all captured values by name.
        """
        seen: dict[str, Array] = {}
        taps = self._tapping(batch, "head", {name: self.outer + name for name in _RESULTS})
        has_head = any(isinstance(self._module(name, shared), Head) for name in self.head.calls)
        named = "logits" if has_head or "hidden" in self.head.assigned else "hidden"

        def call(name: str, arguments: list[Any]) -> Any:
            module: Any = self._module(name, shared)
            if isinstance(module, Head):
                if taps is not None and "hidden" not in self.head.assigned:
                    arguments = [taps.assigned("hidden", arguments[0])]
                seen["hidden"] = arguments[0]
                embed: Any = shared["embed"] if module.tied else None
                return module(arguments[0], embed)
            if isinstance(module, Pool):
                assert batch.lengths is not None, "only whole texts are pooled"
                return module(arguments[0], batch.lengths)
            return module(*arguments)

        with allow_bfloat16_rounding(self.rounded):
            inputs = {**hidden.values, "x": hidden.x, "grid": batch.grid}
            value, assigned = self.head.run(inputs, call, taps, named)
        found = {"hidden": value, **seen, "logits": value, **assigned}
        return found if taps is None else found | {"captured": hidden.captured | taps.captured}

    def _tapping(
        self, batch: ForwardBatch, part: str, results: Mapping[str, str]
    ) -> Tapping | None:
        """Returns the taps of the stem or the head."""
        if batch.taps is None:
            return None
        return Tapping(batch.taps, f"{self.name}.{part}.", results=results)

    def _module(self, name: str, shared: nnx.Dict) -> Any:
        return self.modules[name] if name in self.modules else shared[name]


class Model(nnx.Module):
    """A whole model. Parameters are named `embed.weight`, `decoder.3.attn.q.weight`, ..."""

    def __init__(
        self, spec: ModelSpec, dtype: DTypeLike, adapters: AdapterSlots | None = None
    ) -> None:
        self.dtype = jnp.dtype(dtype)
        self.shared = nnx.Dict({name: build_module(b, dtype) for name, b in spec.shared})
        self.stacks = nnx.Dict(
            {
                stack.name: Stack(
                    stack, dtype, adapters, with_decoder=self._has_decoder(stack, spec)
                )
                for stack in spec.stacks
            }
        )

    @staticmethod
    def _has_decoder(stack: StackSpec, spec: ModelSpec) -> bool:
        return stack.name == "encoder" and spec.decoder is not None

    def project_hidden(
        self, vectors: Float[Array, "tokens width"]
    ) -> Float[Array, "tokens hidden"]:
        """Projects the target's hidden states for a draft head, in its own dtype."""
        stack = self.stacks["decoder"]
        return stack.project_hidden(vectors.astype(self.dtype), self.shared)

    def decode(
        self,
        tokens: Int[Array, " tokens"],
        batch: ForwardBatch,
        cache: Cache,
        want: str,
        last: Int[Array, " chosen"] | None = None,
    ) -> tuple[Float[Array, "chosen width"], Cache]:
        """Computes one result of `decode_all`."""
        results, cache = self.decode_all(tokens, batch, cache, last)
        return results[want], cache

    def decode_all(
        self,
        tokens: Int[Array, " tokens"],
        batch: ForwardBatch,
        cache: Cache,
        last: Int[Array, " chosen"] | None = None,
        hidden: Float[Array, "tokens hidden"] | None = None,
    ) -> tuple[dict[str, Any], Cache]:
        """Runs the decoder over a flat batch; returns "logits", "hidden", and "classes" if any.

        With taps there is also "captured": by name, the values [1, tokens, ...].

        Args:
            tokens: new tokens of any sequences.
            batch: their positions and block tables.
            cache: the KV cache; returned with the new tokens.
            last: the tokens whose results are needed; None: all.
            hidden: for a draft head: the target's hidden states of the tokens.
        """
        stack = self.stacks["decoder"]
        hidden_row = None if hidden is None else hidden[None]
        state = stack.embed(
            tokens[None], jnp.zeros_like(tokens)[None], batch, self.shared, hidden_row
        )
        state, cache = stack.run_layers(state, tokens[None], batch, cache, self.shared)
        if last is not None:
            chosen = jax.tree.map(lambda each: each[:, last], state._replace(captured={}))
            state = chosen._replace(captured=state.captured)
            if batch.taps is not None:
                batch = batch._replace(taps=batch.taps.select_rows(last))
        results = stack.results(state, batch, self.shared)
        named = ("logits", "hidden", *({"classes"} & results.keys()))
        captured = {} if batch.taps is None else {"captured": results["captured"]}
        return {name: results[name][0] for name in named} | captured, cache

    def encode(
        self,
        tokens: Int[Array, "batch tokens"],
        types: Int[Array, "batch tokens"],
        lengths: Int[Array, " batch"],
        taps: ActivationTaps | None = None,
    ) -> dict[str, Any]:
        """Runs the encoder over whole texts.

        Args:
            tokens: padded at the end.
            types: token type ids (first or second text).
            lengths: tokens of each text.
            taps: values to capture or edit.

        Returns:
            The head's results by name; its value is "logits". With taps, "captured" too.
        """
        stack = self.stacks["encoder"]
        batch = ForwardBatch.of_texts(tokens, lengths)._replace(taps=taps)
        state = stack.embed(tokens, types, batch, self.shared)
        state, _ = stack.run_layers(state, tokens, batch, {}, self.shared)
        return stack.results(state, batch, self.shared)

    def encode_image(
        self,
        patches: Float[Array, "tiles patches values"],
        sizes: Int[Array, "tiles 2"],
    ) -> dict[str, Any]:
        """Runs the encoder of images.

        Args:
            patches: padded at the end of each tile.
            sizes: rows and columns of each tile's patches.

        Returns:
            "features" [tiles, tokens, hidden], padded; and what the head assigns by name.
        """
        stack = self.stacks["vision"]
        grid = PatchGrid.of(sizes, patches.shape[1], stack.group)
        state, batch = stack.embed_patches(patches.astype(self.dtype), grid, self.shared)
        state, _ = stack.run_layers(state, batch.positions, batch, {}, self.shared)
        results = stack.results(state, batch.resized(state.x.shape[1]), self.shared)
        return results | {"features": results["hidden"]}

    def fill(
        self, encoded: Float[Array, "1 length hidden"], cache: Cache, at: AttentionMetadata
    ) -> Cache:
        """Writes the cross-attention keys and values of an encoder's output to the cache."""
        cache = dict(cache)
        stack = self.stacks["decoder"]
        with allow_bfloat16_rounding(stack.rounded):
            for i, layer in enumerate(stack.layers):
                for name, module in layer.modules.items():
                    if isinstance(module, CrossAttention):
                        key = f"decoder.{i}.{name}"
                        cache[key] = module.fill(encoded, cache[key], at)
        return cache
