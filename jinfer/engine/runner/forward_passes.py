"""Passes that choose no tokens: logits, hidden states, scores, results of encoders.

They come in pieces of about a step's size, between which whoever drives them lets steps run.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jinfer.engine.engine_core import EngineCore
from jinfer.engine.requests import RequestError
from jinfer.engine.runner.compiled_programs import Program, Shape
from jinfer.engine.runner.model_runner import SIZES, padded_length
from jinfer.engine.scheduling.block_manager import Held
from jinfer.nn.abstract_model import Want
from jinfer.ops.attention.kv_cache import BLOCK
from jinfer.xla import trees

if TYPE_CHECKING:
    from jaxtyping import Float

# Why it pauses: a piece is computed; other requests hold the blocks that it needs; or it has to
# wait for a program.
type Pause = Literal["computed", "room"] | Shape
type Passes[T] = Generator[Pause, None, T]


class NoRoomError(Exception):
    """The cache has too few free blocks for the moment."""


def at_once[T](engine: EngineCore, passes: Passes[T]) -> T:
    """The result, without a step between. Raises `NoRoomError`."""
    while True:
        try:
            pause = next(passes)
        except StopIteration as end:
            return end.value
        if pause == "room":
            passes.close()
            raise NoRoomError
        if isinstance(pause, Shape):
            engine.programs.get(pause)


def forward(
    engine: EngineCore,
    prompt: Sequence[int],
    want: Literal["logits", "hidden", "score", "ranked"],
    encoder: Sequence[int] = (),
    *,
    last: bool = False,
) -> Passes[Any]:
    """Logits or last hidden states of every token of a decoder's prompt, or its scores.

    A score is the log-probability of a token given those before it; the first has none. "ranked"
    are the scores, and the likeliest ids at each place and theirs.

    Args:
        last: only what the last token has, without an axis of tokens.
    """
    scores = want in ("score", "ranked")
    computed = len(prompt) - scores
    tokens = np.array(prompt, np.int32)
    parts: list[Any] = []
    with _own(engine, prompt) as held:
        yield from _room(engine, held, prompt, encoder)
        for start, count, size in _pieces(engine, computed):
            if parts:
                yield "computed"
            while not engine.scheduler.blocks.reserve(held, start + count):
                yield "room"
            rows = np.full(size, -1, np.int32)
            rows[:count] = 0
            positions = np.zeros(size, np.int32)
            positions[:count] = np.arange(start, start + count)
            total, encoded = (np.array([len(ids)], np.int32) for ids in (prompt, encoder))
            given = [_padded(tokens[start : start + count], size), rows, positions, total]
            following = [_padded(tokens[start + 1 : start + 1 + count], size)]
            shape = (
                Shape("score", size, rows=1)
                if want == "score" or want == "ranked"
                else Shape("forward", size, rows=1, want=want)
            )
            program = yield from _program(engine, shape)
            tables = engine.tables_of(1, [(0, held)])
            cache, out = program(
                engine.leaves,
                engine.cache,
                *given,
                tables,
                encoded,
                *(following if scores else []),
            )
            engine.keep_cache(cache)
            out = out[0] if want == "score" else out
            if last:
                parts = [trees.map(lambda part, at=count - 1: np.asarray(part)[at].copy(), out)]
            else:
                parts.append(trees.map(lambda part, count=count: np.asarray(part)[:count], out))
            engine.scheduler.blocks.slide(held, start + count)
    return parts[0] if last else trees.map(lambda *each: np.concatenate(each), *parts)


def _program(engine: EngineCore, shape: Shape) -> Passes[Program]:
    while not engine.programs.ready(shape):
        yield shape
    return engine.programs.get(shape)


@contextmanager
def _own(engine: EngineCore, prompt: Sequence[int]) -> Iterator[Held]:
    """A sequence that has no slot, and no blocks yet."""
    blocks, scheduler = engine.scheduler.blocks, engine.scheduler
    held, _, _ = blocks.start(prompt, reuse=False)
    scheduler.apart += 1
    try:
        yield held
    finally:
        scheduler.apart -= 1
        blocks.free(held)


def _room(
    engine: EngineCore, held: Held, prompt: Sequence[int], encoder: Sequence[int]
) -> Passes[None]:
    """Takes the blocks of a sequence, all at once: halves of several would wait for each other."""
    blocks = engine.scheduler.blocks
    while not blocks.reserve_all(held, len(prompt), 0):
        yield "room"
    if encoder:
        while not blocks.take_encoder(held, encoder):
            yield "room"
        if not held.filled:
            engine.fill(held, tuple(encoder))
            blocks.describe_encoder(held, encoder)


def _pieces(engine: EngineCore, tokens: int) -> Iterator[tuple[int, int, int]]:
    """(first token, tokens, padded size) of each piece of a prompt: small while somebody runs."""
    scheduler, start = engine.scheduler, 0
    while start < tokens:
        most = scheduler.mixed if scheduler.running else scheduler.chunk
        count = scheduler.filling(min(most, tokens - start))
        # Programs of few tokens are made for decoding alone.
        yield start, count, max(engine.size_of(count), min(SIZES[0], scheduler.sizes[-1]))
        start += count


def _padded(ids: np.ndarray, size: int) -> np.ndarray:
    padded = np.zeros(size, np.int32)
    padded[: len(ids)] = ids
    return padded


def encode(
    engine: EngineCore,
    texts: Sequence[Sequence[int]],
    types: Sequence[Sequence[int]],
    want: Want,
) -> Passes[list[Float[np.ndarray, ...]]]:
    """A result of the encoder for each text: [tokens, width], or [width] for "pooled".

    Args:
        types: token types, one list per text.
    """
    longest = max(map(len, texts))
    # Not beyond the context: a learned table of positions ends there.
    size = max(longest, min(padded_length(longest), engine.programs.sizes.context))
    rows = engine.row_count(len(texts))
    results: list[Any] = []
    for begin in range(0, len(texts), rows):
        if results:
            yield "computed"
        batch = list(texts[begin : begin + rows])
        empty: list[Sequence[int]] = [[0]] * (rows - len(batch))
        tokens, lengths = padded([*batch, *empty], size)
        token_types, _ = padded([*types[begin : begin + rows], *empty], size)
        program = yield from _program(engine, Shape("encode", size, rows=rows, want=want))
        out = np.asarray(program(engine.leaves, {}, tokens, token_types, lengths))
        results += [
            out[i] if want == "pooled" else out[i, : len(text)] for i, text in enumerate(batch)
        ]
    return results


def padded(rows: Sequence[Sequence[int]], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids padded with zeros to `size`, and their lengths."""
    padded = np.zeros((len(rows), size), np.int32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded, np.array([len(row) for row in rows], np.int32)


def check_room(engine: EngineCore, tokens: int, sequences: int = 1) -> None:
    """Raises `RequestError` where the cache could never hold some sequences of so many tokens."""
    for name, pool in engine.scheduler.blocks.pools.items():
        needed = sequences * -(-tokens // BLOCK)
        if pool.window is None and needed > pool.count:
            raise RequestError(
                f"{sequences * tokens} tokens do not fit into a cache of "
                f"{pool.count * BLOCK} ({name}); set engine.kv_tokens, or ask for fewer"
            )
