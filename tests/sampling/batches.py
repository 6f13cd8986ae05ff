"""Batches of requests for the tests of samplers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jinfer.ops import sampler_calls
from jinfer.sampling.sampler import apply_samplers, sample
from jinfer.sampling.sampling_metadata import (
    SamplerState,
    SamplingMetadata,
    metadata_row,
    sampler_state_row,
)
from jinfer.sampling.sampling_params import SamplingParams
from jinfer.sampling.token_history import History
from tests.arrays import on_device
from tests.reference.numpy_sampling import Floats

VOCAB = 200
LENGTH = 48  # tokens that a history has room for


class Jitted:
    """A function that is compiled once for the custom call and once for XLA's operations."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self._programs = [
            jax.jit(lambda *args, **more: function(*args, **more), **options) for _ in range(2)
        ]

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        return self.program(*arguments, **more)

    @property
    def program(self) -> Any:
        """The one of what chooses now; see the fixture `both_ways`."""
        return self._programs[sampler_calls.available()]


SAMPLE = Jitted(sample)
FILTER = Jitted(apply_samplers)


class Batch(NamedTuple):
    """What `sample` takes besides logits: of each slot, and the slots of the rows."""

    sampler: SamplingMetadata
    progress: SamplerState
    history: Array
    slots: Array
    lengths: Array
    prompts: Array

    def with_progress(self, progress: SamplerState) -> Batch:
        """The same later."""
        return self._replace(progress=progress)

    def repeated(self, count: int) -> Batch:
        """Each row so often, every time with a slot of its own."""
        many = jax.tree.map(lambda part: on_device(np.repeat(part, count, axis=0)), self)
        return many._replace(slots=jnp.arange(len(many.slots), dtype=jnp.int32))

    @property
    def past(self) -> History:
        """The sequences of the rows, as samplers take them."""
        return History(self.history, self.slots, self.lengths[self.slots], self.prompts[self.slots])


def params(**fields: Any) -> SamplingParams:
    """Parameters with a seed."""
    return SamplingParams(**{"seed": 0} | fields)


def encode(text: str) -> list[int]:
    """A token per character."""
    return [ord(char) % VOCAB for char in text]


def batch(
    *rows: SamplingParams,
    end_ids: Iterable[int] = (),
    past: Sequence[Sequence[int]] = (),
    prompts: Sequence[int] = (),
    length: int = LENGTH,
    vocab: int = VOCAB,
) -> Batch:
    """Rows of requests; `past` are their tokens so far, of which the first `prompts` are given."""
    ends, count = tuple(end_ids), len(rows)
    each = [(metadata_row(r, ends, vocab, encode), sampler_state_row(r)) for r in rows]
    sampler, progress = jax.tree.map(lambda *parts: on_device(np.concatenate(parts)), *each)
    texts = [*past, *[()] * (count - len(past))]
    history = np.full((count, length), 7, np.int32)  # what follows a sequence is not looked at
    for row, text in enumerate(texts):
        history[row, : len(text)] = text
    lengths = np.array([len(text) for text in texts], np.int32)
    given = np.array([*prompts, *lengths[len(prompts) :]], np.int32)
    slots = np.arange(count, dtype=np.int32)
    return Batch(sampler, progress, *map(on_device, (history, slots, lengths, given)))


def call(logits: Floats, rows: Batch, **options: Any) -> tuple[Array, SamplerState]:
    """One step of just these rows."""
    return SAMPLE(on_device(logits, jnp.float32), *rows, **options)


def _extended(part: Any, more: int) -> np.ndarray:
    host = np.asarray(part)
    return np.concatenate([host, np.repeat(host[-1:], more, axis=0)])


def padded(logits: Floats, rows: Batch) -> tuple[Floats, Batch]:
    """With the last row again and again, so that few programs serve all tests."""
    more = -len(logits) % 16
    again = jax.tree.map(lambda part: on_device(_extended(part, more)), rows)
    return _extended(logits, more), again


def draw(logits: Floats, rows: Batch, steps: int = 1) -> np.ndarray:
    """Tokens [steps, batch], from the same logits and histories at each step."""
    count, drawn = len(logits), []
    logits, rows = padded(logits, rows)
    for _ in range(steps):
        tokens, progress = call(logits, rows)
        rows = rows.with_progress(progress)
        drawn.append(np.asarray(tokens)[:count])
    return np.stack(drawn)


def left(logits: Floats, rows: Batch) -> Floats:
    """What all samplers leave, in float64."""
    count = len(logits)
    logits, rows = padded(logits, rows)
    got = FILTER(on_device(logits, jnp.float32), rows.sampler, rows.progress, rows.past)
    return np.asarray(got, np.float64)[:count]


def random_logits(seed: int, rows: int = 1, vocab: int = VOCAB) -> Floats:
    """As a float32 has them, so that both sides see the same numbers."""
    wide = np.random.default_rng(seed).normal(0, 3, (rows, vocab))
    return wide.astype(np.float32).astype(np.float64)
