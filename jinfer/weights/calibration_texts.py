"""What a model reads while its weights are quantized, where nobody gives it a text.

A decoder writes it: by its own probabilities, from two tokens by chance on, of which it takes the
first for the beginning whatever it is. Such texts tell more of what the model will meet than tokens
by chance do, which are what an encoder reads, or a decoder without a vocabulary head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jinfer.modelspec.bounded_types import DEFAULT_CONTEXT
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.nn.abstract_model import AbstractModel
from jinfer.nn.forward_context import Step
from jinfer.ops.attention import kv_cache
from jinfer.progress import task
from jinfer.quant import parse_format
from jinfer.weights.layer_forward import Texts
from jinfer.weights.load_weights import load
from jinfer.weights.storage_plan import Storage
from jinfer.weights.tensor_mapping import Origin

TOKENS = 1 << 13  # that are read
LENGTH = 256  # of a text that the model writes
AT_ONCE = 32  # texts that it writes together
_GIVEN = 2  # tokens by chance that each begins with
_CHANCE_LENGTH = 64  # of tokens by chance, between which there is little to attend to
# All later tokens attend to the first one of a text, so what it is made into counts more than its
# share. In so many tokens, one more is read as a first one: for SmolLM2-135M in 4 and 3 bits this
# takes 15% and 20% off the divergence, and three times as many do no better.
_FIRST = 64
_BATCH = 1024  # tokens that are computed together
_WRITES = parse_format("q8")  # what the model's weights are in while it writes


def usual_texts(
    spec: ModelSpec,
    model: AbstractModel,
    origins: Mapping[str, Origin],
    storages: Mapping[str, Storage],
    *,
    tokens: int = TOKENS,
    progress: bool = False,
) -> list[Texts]:
    """What the model of a specification reads where it is given no text, in batches."""
    context = min(spec.dims.get("context", DEFAULT_CONTEXT), DEFAULT_CONTEXT)
    if not spec.generates:
        return chance_texts(model.vocab, context, tokens)
    return own_texts(model, origins, storages, context, tokens=tokens, progress=progress)


def own_texts(
    model: AbstractModel,
    origins: Mapping[str, Origin],
    storages: Mapping[str, Storage],
    context: int,
    *,
    tokens: int = TOKENS,
    progress: bool = False,
) -> list[Texts]:
    """Texts that a decoder writes, in batches.

    Args:
        model: all its parameters plain.
        origins, storages: as `load` takes them; weights are in 8 bits while they write.
        context: tokens that a text may have.
        tokens: of all texts together.
    """
    length = min(LENGTH, context, tokens)
    count = max(1, tokens // length)
    # Activations in 8 bits, whatever the model will have: it writes three times as fast.
    fast = {name: replace(each, activations="int8") for name, each in storages.items()}
    while_writing = {
        name: each if each.kept else replace(each, format=_WRITES, method="nearest", outliers=0.0)
        for name, each in fast.items()
    }
    leaves = load(model, origins, while_writing)
    rng = np.random.default_rng(0)
    begins = rng.integers(0, model.vocab, (count, min(_GIVEN, length)), np.int32)
    written = []
    with task("writing a text", count * (length - 1), unit="token", shown=progress or None) as bar:
        for begin in range(0, count, AT_ONCE):
            some = begins[begin : begin + AT_ONCE]
            written.append(_write(model, leaves, some, length, begin, bar.update))
    return with_firsts(np.concatenate(written))


def chance_texts(vocab: int, context: int, tokens: int = TOKENS) -> list[Texts]:
    """Tokens by chance, in batches."""
    length = min(_CHANCE_LENGTH, context, tokens)
    shape = max(1, tokens // length), length
    return in_batches(np.random.default_rng(0).integers(0, vocab, shape, np.int32))


def with_firsts(ids: Texts) -> list[Texts]:
    """Texts of one length in batches, and some of their tokens once more, as first ones."""
    batches = in_batches(ids)
    if ids.shape[1] <= _FIRST:  # the first ones of short texts are enough
        return batches
    return [*batches, *in_batches(ids.reshape(-1)[::_FIRST, None])]


def in_batches(ids: Texts) -> list[Texts]:
    """Texts of one length, as many at a time as are computed together."""
    rows = max(1, _BATCH // ids.shape[1])
    return [ids[begin : begin + rows] for begin in range(0, len(ids), rows)]


def _write(
    model: AbstractModel,
    leaves: tuple[Any, ...],
    begins: Texts,
    length: int,
    seed: int,
    told: Callable[[int], Any],
) -> Texts:
    """Texts of a length with these first tokens."""
    count = len(begins)
    each = -(-length // kv_cache.BLOCK)
    table = jnp.arange(count * each, dtype=jnp.int32).reshape(count, each)
    tables = {shape.group: table for shape in model.caches.values()}
    kept = kv_cache.empty(model.caches, count * each, jnp.float16)
    rows, none = jnp.arange(count, dtype=jnp.int32), jnp.zeros(count, jnp.int32)
    key = jax.random.key(seed)

    @partial(jax.jit, donate_argnums=1)
    def one_more(leaves: Any, kept: Any, tokens: Array, place: Array) -> tuple[Array, Any]:
        step = Step.flat(rows, jnp.full(count, place), none, tables, none)
        out, kept = model.module(leaves).decode(tokens, step, kept, "logits")
        if model.never:
            out = out.at[:, jnp.array(model.never, jnp.int32)].set(-jnp.inf)
        chosen = jax.random.categorical(jax.random.fold_in(key, place), out.astype(jnp.float32))
        return chosen.astype(jnp.int32), kept

    texts = np.empty((count, length), np.int32)
    texts[:, : begins.shape[1]] = begins
    for place in range(length - 1):
        chosen, kept = one_more(leaves, kept, texts[:, place], jnp.int32(place))
        if place + 1 >= begins.shape[1]:
            texts[:, place + 1] = chosen
        told(count)
    return texts
