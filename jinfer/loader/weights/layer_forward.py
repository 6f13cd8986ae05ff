"""Layer-by-layer forward pass, for GPTQ: the weights of one layer are in memory at a time.

It computes the hidden states between two layers, of all texts. Weights are passed by name: arrays,
quantized tensors, or wrappers that record their inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jinfer.nn.abstract_model import AbstractModel
from jinfer.nn.forward_context import ForwardBatch
from jinfer.nn.transformer import Model
from jinfer.nn.transformer_layer import HiddenState
from jinfer.ops.attention import kv_cache

if TYPE_CHECKING:
    from jaxtyping import Float, Int

type Leaves = Mapping[str, Any]
type Vectors = Float[Array, "texts tokens hidden"]
type Texts = Int[np.ndarray, "texts tokens"]


class LayerwiseForward:
    """The forward pass of a decoder or an encoder, from tokens to its head.

    Attributes:
        layers: names of each layer's parameters, in order.
        others: names of all other parameters.
    """

    def __init__(self, model: AbstractModel, stack: str) -> None:
        """Of a model with this stack alone, all its parameters plain."""
        self._model, self._stack = model, stack
        empty = self._part({}).stacks[stack]
        prefixes = [f"{stack}.{i}." for i in range(len(empty.layers))]
        self.layers = [[n for n in model.names if n.startswith(p)] for p in prefixes]
        inside = {name for names in self.layers for name in names}
        self.others = [name for name in model.names if name not in inside]
        self._embed = jax.jit(self._embedded)
        self._finish = jax.jit(self._finished)

    def embed(self, leaves: Leaves, ids: Texts) -> Vectors:
        """The first layer's input."""
        return self._embed(dict(leaves), ids)

    def layer(self, number: int, leaves: Leaves, x: Vectors, ids: Texts) -> Vectors:
        """A layer's output."""
        module, (texts, tokens) = self._part(leaves), ids.shape
        stack = module.stacks[self._stack]
        rows, step = self._step(ids)
        prefix = f"{self._stack}.{number}."
        shapes = {
            name.removeprefix(prefix): shape
            for name, shape in self._model.caches.items()
            if name.startswith(prefix)
        }
        cache = kv_cache.zero_cache(shapes, texts * -(-tokens // kv_cache.BLOCK), jnp.float32)
        flat = x.reshape(*rows.shape, -1)
        out, _ = stack.run_layer(number, flat, rows, step, cache, module.shared)
        return out.reshape(x.shape)

    def finish(self, leaves: Leaves, x: Vectors, ids: Texts) -> Array:
        """The vocabulary head's input; the product with it is recorded, not computed."""
        return self._finish(dict(leaves), x, ids)

    def logits(self, leaves: Leaves, x: Vectors, ids: Texts) -> Float[Array, "1 tokens vocab"]:
        """The vocabulary head's result, of all tokens."""
        return self._results(leaves, x, ids)["logits"]

    def _part(self, leaves: Leaves) -> Model:
        """The module with these parameters, and the shapes of all others."""
        model = self._model
        every = zip(model.names, model.parameters, strict=True)
        return model.module(tuple(leaves.get(name, like) for name, like in every))

    def _embedded(self, leaves: Leaves, ids: Array) -> Array:
        module = self._part(leaves)
        rows, step = self._step(ids)
        types = jnp.zeros_like(rows)
        out = module.stacks[self._stack].embed(rows, types, step, module.shared).x
        return out.reshape(*ids.shape, -1).astype(jnp.float32)

    def _finished(self, leaves: Leaves, x: Array, ids: Array) -> Array:
        return self._results(leaves, x, ids)["hidden"]

    def _results(self, leaves: Leaves, x: Array, ids: Array | Texts) -> dict[str, Array]:
        module = self._part(leaves)
        rows, step = self._step(ids)
        flat = x.reshape(*rows.shape, -1)
        stack, state = module.stacks[self._stack], HiddenState(flat, {}, {})
        return stack.results(state, step, module.shared)

    def _step(self, ids: Any) -> tuple[Array, ForwardBatch]:
        """The tokens as the stack takes them, and their batch: an encoder takes texts, a decoder a
        flat batch.
        """
        texts, tokens = ids.shape
        lengths = jnp.full(texts, tokens, jnp.int32)
        rows = jnp.asarray(ids)
        if self._stack == "encoder":
            return rows, ForwardBatch.of_texts(rows, lengths)
        each = -(-tokens // kv_cache.BLOCK)
        table = jnp.arange(texts * each, dtype=jnp.int32).reshape(texts, each)
        groups = {shape.group for shape in self._model.caches.values()}
        step = ForwardBatch.flat(
            jnp.repeat(jnp.arange(texts, dtype=jnp.int32), tokens),
            jnp.tile(jnp.arange(tokens, dtype=jnp.int32), texts),
            lengths,
            dict.fromkeys(groups, table),
            jnp.zeros(texts, jnp.int32),
        )
        return rows.reshape(1, -1), step
