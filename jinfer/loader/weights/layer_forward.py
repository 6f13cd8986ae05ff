"""Layer-by-layer forward pass, and the texts that it reads, for GPTQ and importance.

Memory holds the weights of a layer at a time, and the hidden states of all texts between two
layers. Weights are passed by name: arrays, quantized tensors, or wrappers that record their inputs.

If the user passes no texts, a decoder generates them: two random tokens, then samples of its own
distribution. These are closer to its later inputs than random tokens, which an encoder gets, or a
decoder without a vocabulary head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jinfer.loader.weights.plan_weights import AT_ONCE, LENGTH, TOKENS, WeightPlan
from jinfer.loader.weights.read_weights import read
from jinfer.modelspec.bounded_types import DEFAULT_CONTEXT
from jinfer.nn.abstract_model import AbstractModel, build_abstract_model
from jinfer.nn.forward_context import ForwardBatch
from jinfer.nn.transformer import Model
from jinfer.nn.transformer_layer import HiddenState
from jinfer.ops.attention import kv_cache
from jinfer.progress import task
from jinfer.quant import parse_format

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
        """Take a model with this stack alone, whose parameters are all plain."""
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
        blocks = -(-tokens // kv_cache.BLOCK)
        table = jnp.arange(texts * blocks, dtype=jnp.int32).reshape(texts, blocks)
        groups = {shape.group for shape in self._model.caches.values()}
        step = ForwardBatch.flat(
            jnp.repeat(jnp.arange(texts, dtype=jnp.int32), tokens),
            jnp.tile(jnp.arange(tokens, dtype=jnp.int32), texts),
            lengths,
            dict.fromkeys(groups, table),
            jnp.zeros(texts, jnp.int32),
        )
        return rows.reshape(1, -1), step


_RANDOM = 2  # random tokens that each begins with
_RANDOM_LENGTH = 64  # tokens of random texts, in which there is little to attend to
# All later tokens attend to the first token of a text, so its error has more weight: one token in
# this many is read again as a first token.
_FIRST = 64
_BATCH = 1024  # tokens that are computed together
_WRITES = parse_format("q8")  # the format of weights while texts are generated


def default_texts(plan: WeightPlan, *, tokens: int = TOKENS, progress: bool = False) -> list[Texts]:
    """Texts for a model's calibration, in batches."""
    context = min(plan.spec.dims.get("context", DEFAULT_CONTEXT), DEFAULT_CONTEXT)
    if not plan.spec.generates:
        return random_texts(plan.plain.vocab, context, tokens)
    return generated_texts(plan, context, tokens=tokens, progress=progress)


def generated_texts(
    plan: WeightPlan, context: int, *, tokens: int = TOKENS, progress: bool = False
) -> list[Texts]:
    """Texts that a decoder generates, in batches.

    Args:
        plan: of its weights, which have 8 bits here.
        context: tokens that a text may have.
        tokens: of all texts together.
    """
    model = build_abstract_model(plan.spec, "float32")
    length = min(LENGTH, context, tokens)
    count = max(1, tokens // length)
    # Activations in 8 bits are fastest, whichever the model will have.
    rounded: dict[str, Any] = {"format": _WRITES, "method": "rtn", "outliers": 0.0}
    fast = {
        name: replace(storage, activations="int8", **({} if storage.as_in_file else rounded))
        for name, storage in plan.storages.items()
    }
    leaves = read(replace(plan, plain=model, storages=fast))
    rng = np.random.default_rng(0)
    begins = rng.integers(0, model.vocab, (count, min(_RANDOM, length)), np.int32)
    written = []
    with task("writing a text", count * (length - 1), unit="token", shown=progress or None) as bar:
        for begin in range(0, count, AT_ONCE):
            some = begins[begin : begin + AT_ONCE]
            written.append(_write(model, leaves, some, length, begin, bar.update))
    return with_firsts(np.concatenate(written))


def random_texts(vocab: int, context: int, tokens: int = TOKENS) -> list[Texts]:
    """Random tokens, in batches."""
    length = min(_RANDOM_LENGTH, context, tokens)
    shape = max(1, tokens // length), length
    return in_batches(np.random.default_rng(0).integers(0, vocab, shape, np.int32))


def with_firsts(ids: Texts) -> list[Texts]:
    """Return texts of a length in batches, and some of their tokens again as first tokens."""
    batches = in_batches(ids)
    if ids.shape[1] <= _FIRST:  # the first tokens of short texts are enough
        return batches
    return [*batches, *in_batches(ids.reshape(-1)[::_FIRST, None])]


def in_batches(ids: Texts) -> list[Texts]:
    """Divide texts of a length into batches."""
    rows = max(1, _BATCH // ids.shape[1])
    return [ids[begin : begin + rows] for begin in range(0, len(ids), rows)]


def _write(
    model: AbstractModel,
    leaves: tuple[Any, ...],
    begins: Texts,
    length: int,
    seed: int,
    progress: Callable[[int], Any],
) -> Texts:
    """Texts of a length that begin with these tokens."""
    count = len(begins)
    blocks = -(-length // kv_cache.BLOCK)
    table = jnp.arange(count * blocks, dtype=jnp.int32).reshape(count, blocks)
    tables = {shape.group: table for shape in model.caches.values()}
    cache = kv_cache.zero_cache(model.caches, count * blocks, jnp.float16)
    rows, none = jnp.arange(count, dtype=jnp.int32), jnp.zeros(count, jnp.int32)
    key = jax.random.key(seed)

    @partial(jax.jit, donate_argnums=1)
    def append_token(leaves: Any, cache: Any, tokens: Array, place: Array) -> tuple[Array, Any]:
        step = ForwardBatch.flat(rows, jnp.full(count, place), none, tables, none)
        out, cache = model.module(leaves).decode(tokens, step, cache, "logits")
        if model.never:
            out = out.at[:, jnp.array(model.never, jnp.int32)].set(-jnp.inf)
        chosen = jax.random.categorical(jax.random.fold_in(key, place), out.astype(jnp.float32))
        return chosen.astype(jnp.int32), cache

    texts = np.empty((count, length), np.int32)
    texts[:, : begins.shape[1]] = begins
    for place in range(length - 1):
        chosen, cache = append_token(leaves, cache, texts[:, place], jnp.int32(place))
        if place + 1 >= begins.shape[1]:
            texts[:, place + 1] = chosen
        progress(count)
    return texts
