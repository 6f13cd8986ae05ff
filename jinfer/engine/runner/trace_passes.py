"""Trace passes: forward passes of whole prompts that capture named values (activations).

A prompt is computed in chunks, and each chunk's values go to arrays on the host, so that the device
never holds those of a whole prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from jinfer.engine.activation_use import ActivationUse
from jinfer.engine.requests import AdapterUse
from jinfer.engine.runner.edit_tables import taps_of
from jinfer.engine.runner.flat_batch import FlatBatch, padded
from jinfer.engine.runner.forward_passes import (
    Passes,
    compiled_program,
    padded_texts,
    reserve,
    temporary_tables,
)
from jinfer.engine.runner.model_runner import SIZES, ModelRunner, padded_length
from jinfer.engine.runner.step_key import StepKey
from jinfer.engine.scheduling.scheduler import Scheduler
from jinfer.nn.activation_shapes import ActivationShape
from jinfer.ops.attention.kv_cache import BLOCK

if TYPE_CHECKING:
    from jaxtyping import Float

type Values = dict[str, Float[np.ndarray, "..."]]

CHUNK_BYTES = 256 << 20  # of a chunk's values on the device, unless a token's alone are more


@dataclass(frozen=True)
class TracePlan:
    """What to capture of a prompt, and the bytes that it takes.

    Attributes:
        shapes: of the values, by name.
        tokens: of the prompt.
        keys: of the attentions whose scores or patterns are captured or edited, by their names.
    """

    shapes: Mapping[str, ActivationShape]
    tokens: int
    keys: Mapping[str, int]

    def sizes(self, name: str) -> tuple[int, ...]:
        """The shape of a value of the whole prompt."""
        free = {"tokens": self.tokens, "keys": self.keys.get(name, 0)}
        return tuple(free[s] if isinstance(s, str) else s for s in self.shapes[name].sizes)

    @property
    def bytes(self) -> int:
        """Of all values of the prompt, on the host."""
        return 4 * sum(prod(self.sizes(name)) for name in self.shapes)

    def empty(self) -> Values:
        """Arrays for the values."""
        return {name: np.zeros(self.sizes(name), np.float32) for name in self.shapes}

    def put(self, into: Values, captured: Mapping[str, Any], start: int, count: int) -> None:
        """Copies a chunk's values to their places."""
        for name, value in captured.items():
            part, axes, whole = np.asarray(value), self.shapes[name].axes, into[name]
            if axes == ("heads", "tokens", "keys"):
                keys = whole.shape[2]
                whole[:, start : start + count] = part[:count, :, :keys].swapaxes(0, 1)
            elif axes[0] == "tokens":
                whole[start : start + count] = part[:count]
            else:  # of the whole text, or after the last token so far
                whole[...] = part


def trace_decoder(
    runner: ModelRunner,
    scheduler: Scheduler,
    prompt: Sequence[int],
    plan: TracePlan,
    encoder: Sequence[int] = (),
    adapter: AdapterUse | None = None,
    edits: ActivationUse | None = None,
) -> Passes[Values]:
    """Values of a decoder, of every token of a prompt.

    Args:
        encoder: token ids that the encoder reads.
        edits: what is edited on the way.
    """
    tokens, values = np.array(prompt, np.int32), plan.empty()
    capture, blocks = tuple(sorted(plan.shapes)), _blocks(runner, plan)
    taps = taps_of([edits])
    with temporary_tables(scheduler) as block_tables:
        block_tables.adapter = adapter
        yield from reserve(runner, scheduler, block_tables, prompt, encoder)
        for start, count, size in _chunks(runner, scheduler, plan, blocks):
            if start:
                yield "computed"
            while not scheduler.blocks.reserve(block_tables, start + count):
                yield "room"
            key = StepKey("trace", size, rows=1, capture=capture, blocks=blocks, taps=taps)
            program = yield from compiled_program(runner, key)
            rows = padded([0] * count, size, -1)
            positions = padded(np.arange(start, start + count), size)
            total, encoded = (np.array([len(ids)], np.int32) for ids in (prompt, encoder))
            ids = padded(tokens[start : start + count], size)
            tables = runner.block_tables(1, [(0, block_tables)])
            if blocks:
                groups = runner.programs.sizes.blocks
                tables = {n: t[:, :blocks] if n in groups else t for n, t in tables.items()}
            if taps is not None and edits is not None:
                tables |= runner.edit_tables(taps, 1, [(0, edits)])
            batch = FlatBatch(*cast("Any", (ids, rows, positions, total, encoded, tables)))
            cache, captured = program(runner.leaves, runner.cache, batch)
            runner.set_cache(cache)
            plan.put(values, captured, start, count)
            scheduler.blocks.slide_window(block_tables, start + count)
    return values


def trace_encoder(
    runner: ModelRunner,
    text: Sequence[int],
    types: Sequence[int],
    plan: TracePlan,
    edits: ActivationUse | None = None,
) -> Passes[Values]:
    """Values of an encoder, of a text; arguments as of `trace_decoder`."""
    values, size, taps = plan.empty(), _padded_text(runner, len(text)), taps_of([edits])
    tokens, lengths = padded_texts([text], size)
    token_types, _ = padded_texts([types], size)
    capture = tuple(sorted(plan.shapes))
    key = StepKey("trace_encoder", size, rows=1, capture=capture, taps=taps)
    program = yield from compiled_program(runner, key)
    tables = {}
    if taps is not None and edits is not None:
        tables = runner.edit_tables(taps, 1, [(0, edits)])
    captured = program(runner.leaves, {}, tokens, token_types, lengths, tables)
    plan.put(values, captured, 0, len(text))
    return values


def key_width(runner: ModelRunner, stack: str, plan: TracePlan) -> int:
    """How many keys scores and patterns have in a program."""
    if stack == "encoder":
        return _padded_text(runner, plan.tokens)
    return (_blocks(runner, plan) or runner.programs.sizes.table) * BLOCK


def _padded_text(runner: ModelRunner, tokens: int) -> int:
    # Not beyond the context, where a table of learned positions ends.
    return max(tokens, min(padded_length(tokens), runner.programs.sizes.context))


def _blocks(runner: ModelRunner, plan: TracePlan) -> int:
    """Length of the block tables where scores are captured, which are as wide; 0: all of it."""
    if not plan.keys:
        return 0
    needed = -(-max(plan.tokens, *plan.keys.values()) // BLOCK)
    return min(1 << (needed - 1).bit_length(), runner.programs.sizes.table)


def _chunks(
    runner: ModelRunner, scheduler: Scheduler, plan: TracePlan, blocks: int
) -> Iterator[tuple[int, int, int]]:
    """As `forward_passes.chunks`, of no more tokens than `CHUNK_BYTES` has room for."""
    free = {"keys": (blocks or runner.programs.sizes.table) * BLOCK, "tokens": 1}
    each = 4 * sum(
        prod(free[s] if isinstance(s, str) else s for s in shape.sizes)
        for shape in plan.shapes.values()
        if "tokens" in shape.axes
    )
    start = 0
    sizes = [size for size in scheduler.sizes if size * each <= CHUNK_BYTES]
    while start < plan.tokens:
        most = scheduler.mixed if scheduler.running else scheduler.chunk
        most = min(most, sizes[-1] if sizes else scheduler.sizes[0])
        count = scheduler.fit_batch(min(most, plan.tokens - start))
        least = min(SIZES[0], sizes[-1] if sizes else count)
        yield start, count, max(scheduler.batch_size(count), scheduler.batch_size(least))
        start += count
