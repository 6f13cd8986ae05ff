"""What a model's weights are multiplied with while it reads a text, for `tools.quantize`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

from jinfer import LLM
from jinfer.engine.requests import RequestError
from jinfer.engine.steps import encode
from jinfer.nn.step import Step
from jinfer.ops import cache
from jinfer.quant.calibration import Inputs, Kind, tap

LENGTH = 512  # tokens of a window
MOST_TOKENS = 1 << 15  # that are read
# All later tokens attend to the first one of a text, so what it is made into counts more than its
# share. In so many tokens, one more is read as a first one: for SmolLM2-135M in 4 and 3 bits this
# takes 15% and 20% off the divergence, and three times as many do no better.
_FIRST = 64
_CHANCE_LENGTH = 64  # of a window of tokens by chance, between which there is little to attend to
_MOST_SUMS = 4 << 30  # bytes of sums in memory; for more, the text is read again


def collect_inputs(
    llm: LLM,
    text: str | None,
    kinds: Mapping[str, Kind],
    *,
    length: int = LENGTH,
    most: int = MOST_TOKENS,
    progress: bool = False,
) -> dict[str, Inputs]:
    """Reads a text, in windows that fill the context.

    Args:
        llm: the model, not quantized.
        text: its beginning is read. None: tokens by chance, which tell less, but most of what
            counts: the directions that all inputs share.
        kinds: names of parameters, and what is to be known of their inputs.
        length: tokens of a window of the text.
        most: tokens that are read, before some of them are read once more.

    Returns:
        What each parameter was multiplied with; not those that never were.

    Raises:
        RequestError: the text is too short, or the model reads two texts at a time.
    """
    model, leaves = llm._engine.model, llm._engine.parameters
    windows = _windows(llm, text, length, most)
    read = _reader(llm)
    shapes = {name: p.shape for name, p in zip(model.names, model.parameters, strict=True)}
    found: dict[str, Inputs] = {}
    for group in _groups({name: shapes[name] for name in kinds}, kinds):
        tapped = {
            name: tap(leaf, kinds[name])
            for name, leaf in zip(model.names, leaves, strict=True)
            if name in group
        }
        given = tuple(
            tapped.get(name, leaf) for name, leaf in zip(model.names, leaves, strict=True)
        )
        for window in tqdm(
            windows, "calibrating", unit="window", leave=False, disable=not progress
        ):
            jax.block_until_ready(read(given, window))
        inputs = {name: each.inputs() for name, each in tapped.items()}
        found |= {name: _known(each) for name, each in inputs.items() if each.rows.any()}
    return found


def _windows(llm: LLM, text: str | None, length: int, most: int) -> list[np.ndarray]:
    """Batches of token ids, int32 [rows, tokens]; of a text without what is left at its end."""
    if text is None:
        length = min(_CHANCE_LENGTH, llm.context)
        rows = max(1, LENGTH // length)  # as many tokens at a time as of a text
        shape = max(1, most // (rows * length)), rows, length
        return list(np.random.default_rng(0).integers(0, llm.spec.dims["vocab"], shape, np.int32))
    length = min(length, llm.context)
    some = llm.encode(text)[:most]
    ids = np.asarray(some[: len(some) // length * length], np.int32)
    if not len(ids):
        raise RequestError("the calibration text is shorter than a window; give a longer one")
    windows = list(ids.reshape(-1, 1, length))
    # An encoder sees all of a text from everywhere; and of short windows the first are enough.
    if llm.spec.decoder is None or length <= _FIRST:
        return windows
    return [*windows, ids[::_FIRST, None]]


def _reader(llm: LLM) -> Callable[[tuple[Any, ...], np.ndarray], Any]:
    """The forward pass over a batch."""
    model, kind = llm._engine.model, llm._engine.programs.sizes.kv_cache
    if llm.spec.type == "encoder-decoder":
        raise RequestError("calibration is for a model with an encoder or a decoder alone")
    if llm.spec.decoder is None:
        encoder = jax.jit(partial(encode, model, "hidden"))
        return lambda leaves, ids: encoder(leaves, {}, ids, np.zeros_like(ids), _lengths(ids))

    @jax.jit
    def decoder(leaves: tuple[Any, ...], ids: Array) -> Array:
        texts, tokens = ids.shape
        each = -(-tokens // cache.BLOCK)
        table = jnp.arange(texts * each, dtype=jnp.int32).reshape(texts, each)
        groups = {shape.group for shape in model.caches.values()}
        step = Step.flat(
            jnp.repeat(jnp.arange(texts, dtype=jnp.int32), tokens),
            jnp.tile(jnp.arange(tokens, dtype=jnp.int32), texts),
            jnp.asarray(_lengths(ids)),
            dict.fromkeys(groups, table),
            jnp.zeros(texts, jnp.int32),
        )
        empty = cache.empty(model.caches, texts * each, kind)
        return model.module(leaves).decode(ids.reshape(-1), step, empty, "hidden")[0]

    return decoder


def _lengths(ids: np.ndarray | Array) -> np.ndarray:
    return np.full(len(ids), ids.shape[1], np.int32)


def _groups(shapes: Mapping[str, tuple[int, ...]], kinds: Mapping[str, Kind]) -> Iterator[set[str]]:
    """Parameters whose sums fit into memory together."""
    group, size = set[str](), 0
    for name, (*stack, _, inputs) in shapes.items():
        own = 4 * prod(stack) * inputs * (inputs if kinds[name] == "products" else 1)
        if group and size + own > _MOST_SUMS:
            yield group
            group, size = set(), 0
        group.add(name)
        size += own
    if group:
        yield group


def _known(inputs: Inputs) -> Inputs:
    """With all inputs alike for the matrices of a stack that met none."""
    if inputs.rows.all():
        return inputs
    mean = np.array(inputs.mean)
    products = mean.ndim == inputs.rows.ndim + 2
    mean[inputs.rows == 0] = np.eye(mean.shape[-1]) if products else 1
    return Inputs(mean, inputs.rows)
