"""Forward passes without sampling: logits, hidden states, scores, encoders' results (embeddings).

A pass is a generator that yields after each chunk, so that steps of the engine run in between.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast

import jax
import numpy as np

from jinfer.engine.runner.compiled_programs import Program
from jinfer.engine.runner.flat_batch import FlatBatch, padded
from jinfer.engine.runner.model_runner import SIZES, ModelRunner, padded_length
from jinfer.engine.runner.step_key import StepKey
from jinfer.engine.scheduling.block_manager import BlockTables
from jinfer.engine.scheduling.scheduler import Scheduler
from jinfer.nn.abstract_model import Want

if TYPE_CHECKING:
    from jaxtyping import Float

# Why a pass yields: a chunk is computed; other requests use the blocks that it needs; or it waits
# for a program, which is named.
type Pause = Literal["computed", "room"] | StepKey
type Passes[T] = Generator[Pause, None, T]


class NoRoomError(Exception):
    """The KV cache has too few free blocks for the moment."""


def run_to_end[T](runner: ModelRunner, passes: Passes[T]) -> T:
    """Runs a pass to its end, without a step in between. Raises `NoRoomError`."""
    while True:
        try:
            pause = next(passes)
        except StopIteration as end:
            return end.value
        if pause == "room":
            passes.close()
            raise NoRoomError
        if isinstance(pause, StepKey):
            runner.programs.get(pause)


def forward(
    runner: ModelRunner,
    scheduler: Scheduler,
    prompt: Sequence[int],
    want: Literal["logits", "hidden", "classes", "score", "ranked"],
    encoder: Sequence[int] = (),
    *,
    last: bool = False,
) -> Passes[Any]:
    """Logits, hidden states or classes of every token of a decoder's prompt, or its scores.

    A score is the log-probability of a token batch those before it; the first token has none.
    "ranked" gives the scores, the likeliest ids at each position and their log-probabilities.

    Args:
        encoder: token ids that the encoder reads.
        last: only the last token's result, without an axis of tokens.
    """
    scores = want in ("score", "ranked")
    computed = len(prompt) - scores
    tokens = np.array(prompt, np.int32)
    parts: list[Any] = []
    with temporary_tables(scheduler) as block_tables:
        yield from reserve(runner, scheduler, block_tables, prompt, encoder)
        for start, count, size in _chunks(runner, scheduler, computed):
            if parts:
                yield "computed"
            while not scheduler.blocks.reserve(block_tables, start + count):
                yield "room"
            rows = padded([0] * count, size, -1)
            positions = padded(np.arange(start, start + count), size)
            total, encoded = (np.array([len(ids)], np.int32) for ids in (prompt, encoder))
            ids = padded(tokens[start : start + count], size)
            following = [padded(tokens[start + 1 : start + 1 + count], size)]
            key = (
                StepKey("score", size, rows=1)
                if want == "score" or want == "ranked"
                else StepKey("forward", size, rows=1, want=want)
            )
            program = yield from compiled_program(runner, key)
            tables = runner.block_tables(1, [(0, block_tables)])
            batch = FlatBatch(*cast("Any", (ids, rows, positions, total, encoded, tables)))
            more = following if scores else []
            cache, out = program(runner.leaves, runner.cache, batch, *more)
            runner.set_cache(cache)
            out = out[0] if want == "score" else out
            if last:
                parts = [jax.tree.map(lambda part, at=count - 1: np.asarray(part)[at].copy(), out)]
            else:
                parts.append(jax.tree.map(lambda part, count=count: np.asarray(part)[:count], out))
            scheduler.blocks.slide_window(block_tables, start + count)
    return parts[0] if last else jax.tree.map(lambda *each: np.concatenate(each), *parts)


def compiled_program(runner: ModelRunner, key: StepKey) -> Passes[Program]:
    """A compiled program; yields until it is ready."""
    while not runner.programs.ready(key):
        yield key
    return runner.programs.get(key)


@contextmanager
def temporary_tables(scheduler: Scheduler) -> Iterator[BlockTables]:
    """Block tables of a sequence without a slot, empty at first."""
    blocks = scheduler.blocks
    block_tables, _, _ = blocks.share_prefix((), reuse=False)
    scheduler.slotless += 1
    try:
        yield block_tables
    finally:
        scheduler.slotless -= 1
        blocks.free(block_tables)


def reserve(
    runner: ModelRunner,
    scheduler: Scheduler,
    block_tables: BlockTables,
    prompt: Sequence[int],
    encoder: Sequence[int],
) -> Passes[None]:
    """Allocates the blocks of a whole sequence at once: partial ones could deadlock."""
    blocks = scheduler.blocks
    while not blocks.reserve_all(block_tables, len(prompt), 0):
        yield "room"
    if encoder:
        while not blocks.reserve_encoder(block_tables, encoder):
            yield "room"
        if not block_tables.encoder_filled:
            runner.fill_encoder_blocks(block_tables, tuple(encoder))
            blocks.register_encoder(block_tables, encoder)


def _chunks(
    runner: ModelRunner, scheduler: Scheduler, tokens: int
) -> Iterator[tuple[int, int, int]]:
    """(first token, tokens, padded size) of each chunk of a prompt: small while requests run."""
    start = 0
    while start < tokens:
        most = scheduler.mixed if scheduler.running else scheduler.chunk
        count = scheduler.fit_batch(min(most, tokens - start))
        # Programs of few tokens are compiled for decoding only.
        yield start, count, max(scheduler.batch_size(count), min(SIZES[0], scheduler.sizes[-1]))
        start += count


def encode(
    runner: ModelRunner,
    texts: Sequence[Sequence[int]],
    types: Sequence[Sequence[int]],
    want: Want,
) -> Passes[list[Float[np.ndarray, ...]]]:
    """The encoder's result for each text: [tokens, width]; [width] for "pooled" and "classes".

    Args:
        types: token types, one list per text.
        want: which result.
    """
    longest = max(map(len, texts))
    # Not beyond the context, where a table of learned positions ends.
    size = max(longest, min(padded_length(longest), runner.programs.sizes.context))
    rows = runner.padded_rows(len(texts))
    results: list[Any] = []
    for begin in range(0, len(texts), rows):
        if results:
            yield "computed"
        batch = list(texts[begin : begin + rows])
        empty: list[Sequence[int]] = [[0]] * (rows - len(batch))
        tokens, lengths = padded_texts([*batch, *empty], size)
        token_types, _ = padded_texts([*types[begin : begin + rows], *empty], size)
        program = yield from compiled_program(runner, StepKey("encode", size, rows=rows, want=want))
        out = np.asarray(program(runner.leaves, {}, tokens, token_types, lengths))
        results += [
            out[i] if want in ("pooled", "classes") else out[i, : len(text)]
            for i, text in enumerate(batch)
        ]
    return results


def padded_texts(rows: Sequence[Sequence[int]], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids padded with zeros to `size`, and their lengths."""
    lengths = np.array([len(row) for row in rows], np.int32)
    return np.stack([padded(row, size) for row in rows]), lengths
