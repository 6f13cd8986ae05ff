"""What a model's weights are multiplied with while it reads a text, for `tools.quantize`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jinfer import LLM, cache
from jinfer.generation import RequestError
from jinfer.quant.calibration import Inputs, Kind, tap
from jinfer.steps import encode, forward

LENGTH = 512  # tokens of a window
MOST_TOKENS = 1 << 15  # of the text
_MOST_SUMS = 4 << 30  # bytes of sums in memory; for more, the text is read again


def collect_inputs(
    llm: LLM,
    text: str,
    kinds: Mapping[str, Kind],
    *,
    length: int = LENGTH,
    most: int = MOST_TOKENS,
    progress: bool = False,
) -> dict[str, Inputs]:
    """Reads a text, in windows that fill the context.

    Args:
        llm: the model, not quantized.
        text: its beginning is read.
        kinds: names of parameters, and what is to be known of their inputs.
        length: tokens of a window.
        most: tokens that are read.

    Returns:
        What each parameter was multiplied with; not those that never were.

    Raises:
        RequestError: the text is too short, or the model reads two texts at a time.
    """
    model, leaves = llm._engine.model, llm._engine.leaves
    windows = _windows(llm.encode(text)[:most], min(length, llm.context))
    if not windows:
        raise RequestError("the calibration text is shorter than a window; give a longer one")
    read = _reader(llm, len(windows[0]))
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


def _windows(ids: Sequence[int], length: int) -> list[np.ndarray]:
    """Of one length, without what is left at the end."""
    whole = len(ids) // length * length
    return list(np.asarray(ids[:whole], np.int32).reshape(-1, length))


def _reader(llm: LLM, length: int) -> Callable[[tuple[Any, ...], np.ndarray], Any]:
    """The forward pass over a window."""
    model = llm._engine.model
    if llm.spec.type == "encoder-decoder":
        raise RequestError("a calibration text is for a model with an encoder or a decoder alone")
    lengths = np.array([length], np.int32)
    if llm.spec.decoder is None:
        program = jax.jit(partial(encode, model, "hidden"))
        zeros = np.zeros((1, length), np.int32)
        return lambda leaves, ids: program(leaves, {}, ids[None], zeros, lengths)
    decoder = jax.jit(partial(forward, model, "logits"))
    room = llm._engine.padded_length(length)
    empty = cache.empty(model.caches, 1, room, 0, llm._engine.programs.kv_cache)
    start, none = np.int32(0), np.zeros(1, np.int32)
    return lambda leaves, ids: decoder(leaves, empty, ids[None], start, lengths, none)[1]


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
