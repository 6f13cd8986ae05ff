"""Recurrences over flat batches: the papers' definitions, any chunks of a prompt, any batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax import Array

from jinfer.cpu import build_library, recurrence_call
from jinfer.ops.attention.kv_cache import AttentionMetadata
from jinfer.ops.recurrence import ragged_scan
from jinfer.ops.recurrence.drafted_scan import accept_drafted
from jinfer.ops.recurrence.sequence_runs import DraftRuns, sequence_runs
from tests.arrays import on_device
from tests.cpu.helpers import isas
from tests.ops.recurrence.cases import CASES, Case, Piece, joined

WITH_CALLS = build_library.available()
ISAS = [*isas()] if WITH_CALLS else []
FORMS = ["tokens", "chunks", *ISAS]
SLOTS = 7

pytestmark = pytest.mark.usefixtures("optimized")


@pytest.fixture
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What computes: XLA by tokens or by chunks, or the custom calls of an instruction set."""
    name = request.param
    if name in ("tokens", "chunks"):
        monkeypatch.setattr(recurrence_call, "available", lambda: False)
        monkeypatch.setattr(ragged_scan, "backend", lambda: "cpu" if name == "tokens" else "gpu")
        yield name
        return
    with build_library.lowered_isa(name):
        yield name


class Player:
    """Computes batches of a case one after the other, as an engine does."""

    def __init__(self, case: Case, sequences: Sequence[dict[str, np.ndarray]]) -> None:
        self.case, self.sequences = case, sequences
        # What a slot holds before its sequence begins is not read.
        self.table = on_device(np.full((SLOTS, *case.state), np.nan, np.float32))
        self.slots = np.array([5, 2, 4, 0, 3], np.int32)[: len(sequences)]
        self.tables = np.zeros((len(sequences), 4), np.int32)
        self.tables[:, 0] = self.slots
        self.results: list[dict[int, np.ndarray]] = [{} for _ in sequences]
        self.run = jax.jit(self._run, donate_argnums=(1,))

    def _run(
        self,
        inputs: dict[str, Array],
        table: Array,
        rows: Array,
        positions: Array,
        tables: Array,
        accepted: Array | None,
    ) -> tuple[Array, Array]:
        at = AttentionMetadata(rows, positions, tables)
        runs = sequence_runs(at, tables)
        if accepted is None:
            return self.case.operation(inputs, table, runs)
        out, drafted = self.case.operation(inputs, table, DraftRuns(*runs))
        return out, accept_drafted({"state": drafted}, runs, accepted)["state"]

    def batch(
        self, pieces: Sequence[Piece], tokens: int, accepted: Sequence[int] | None = None
    ) -> None:
        """One call with `tokens` tokens, padding included; of drafts if some are `accepted`."""
        counts = None if accepted is None else np.array(accepted, np.int32)
        arrays = (*joined(self.sequences, pieces, tokens), self.tables, counts)
        inputs, rows, positions, tables, counts = jax.tree.map(on_device, arrays)
        out, self.table = self.run(inputs, self.table, rows, positions, tables, counts)
        values = np.asarray(out)
        for value, row, position in zip(values, rows, positions, strict=True):
            if row >= 0:
                self.results[int(row)][int(position)] = value

    def outputs(self, sequence: int) -> np.ndarray:
        """All tokens' outputs."""
        found = self.results[sequence]
        return np.stack([found[position] for position in range(len(found))])


def cut(sequence: int, length: int, size: int) -> list[Piece]:
    """A sequence in pieces of a size."""
    return [Piece(sequence, first, min(first + size, length)) for first in range(0, length, size)]


def near(got: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def as_float64(inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: x.astype(np.float64) for name, x in inputs.items()}


@pytest.mark.parametrize("form", FORMS, indirect=True)
@pytest.mark.parametrize("name", CASES)
def test_result_equals_the_definition(name: str, form: str) -> None:
    """Prompts, a chunk's remainder and decoding rows in one batch, with padding between."""
    case = CASES[name]
    lengths = (70, 1, 23, 2)
    sequences = [case.draw(length, seed) for seed, length in enumerate(lengths)]
    player = Player(case, sequences)
    player.batch([Piece(2, 0, 5), Piece(-1, 0, 3), Piece(0, 0, 66), Piece(3, 0, 1)], 96)
    player.batch([Piece(1, 0, 1), Piece(0, 66, 67), Piece(3, 1, 2), Piece(2, 5, 23)], 96)
    player.batch([Piece(0, 67, 70)], 96)
    for sequence, inputs in enumerate(sequences):
        near(player.outputs(sequence), case.define(as_float64(inputs)))
    assert np.isnan(np.asarray(player.table)[[1, 3, 6]]).all(), "slots of others are not touched"


@pytest.mark.parametrize("form", FORMS, indirect=True)
@pytest.mark.parametrize("name", CASES)
def test_prompt_chunks_do_not_change_results(name: str, form: str) -> None:
    """A prompt in one pass, in pieces and token by token; to the bit with custom calls."""
    case, length = CASES[name], 96
    inputs = case.draw(length, 3)
    found = []
    for size in (length, 64, 7, 1):
        player = Player(case, [inputs])
        for piece in cut(0, length, size):
            player.batch([piece], length if size > 7 else 8)
        found.append((player.outputs(0), np.asarray(player.table)[player.slots]))
    for outputs, state in found[1:]:
        if form in ISAS:
            np.testing.assert_array_equal(outputs, found[0][0])
            np.testing.assert_array_equal(state, found[0][1])
        else:
            near(outputs, found[0][0])
            near(state, found[0][1])


@pytest.mark.parametrize("form", FORMS, indirect=True)
@pytest.mark.parametrize("name", CASES)
def test_copies_after_whole_blocks(name: str, form: str) -> None:
    """A step copies states that it comes past: those that shorter prompts end with."""
    case = CASES[name]
    lengths = (200, 70)
    sequences = [case.draw(length, seed) for seed, length in enumerate(lengths)]
    player, plain = Player(case, sequences), Player(case, sequences)
    plain.run = player.run
    player.tables[0, 1:] = 1 + 1, 0, 6 + 1  # after 64 and 192 tokens
    player.tables[1, 1] = 4 + 1
    for each in (player, plain):  # the first borders amid a batch, the last by a single token
        each.batch([Piece(0, 0, 130), Piece(-1, 0, 2), Piece(1, 0, 63)], 200)
        each.batch([Piece(1, 63, 64), Piece(0, 130, 200)], 96)
        each.batch([Piece(1, 64, 70)], 8)
    same = np.testing.assert_array_equal if form in ISAS else near
    copied = [np.asarray(player.table)[slot] for slot in (1, 6, 4)]
    for state, (sequence, end) in zip(copied, ((0, 64), (0, 192), (1, 64)), strict=True):
        shorter = Player(case, sequences)
        shorter.run = player.run
        shorter.batch([Piece(sequence, 0, end)], 200)
        same(state, np.asarray(shorter.table)[shorter.slots[sequence]])
        same(player.outputs(sequence), plain.outputs(sequence))
    assert np.isnan(np.asarray(player.table)[[0, 3]]).all(), "slots of others are not touched"


@pytest.mark.parametrize("form", ["tokens", *ISAS], indirect=True)
@pytest.mark.parametrize("name", CASES)
def test_rejected_drafts(name: str, form: str) -> None:
    """Drafted tokens see each other, and the state becomes that of the accepted ones alone."""
    case = CASES[name]
    texts, drafted = ([case.draw(27, seed + i) for i in range(3)] for seed in (1, 11))
    for text, draft, right in zip(texts, drafted, (23, 20, 27), strict=True):
        for key in text:
            draft[key][:right] = text[key][:right]
    player, plain = Player(case, drafted), Player(case, texts)
    begin = [Piece(row, 0, 20) for row in range(3)]
    player.batch(begin, 64)
    player.batch([Piece(row, 20, 27) for row in range(3)], 32, accepted=[3, 0, 7])
    near(player.outputs(0)[:23], case.define(as_float64(texts[0]))[:23])
    plain.batch(begin, 64)
    plain.batch([Piece(0, 20, 23), Piece(2, 20, 27)], 32)
    same = np.testing.assert_array_equal if form in ISAS else near
    same(np.asarray(player.table)[player.slots], np.asarray(plain.table)[plain.slots])
    same(player.outputs(2), plain.outputs(2))
    assert np.isnan(np.asarray(player.table)[[1, 3, 6]]).all(), "slots of others are not touched"


@pytest.mark.parametrize("name", CASES)
def test_results_are_batch_invariant(name: str) -> None:
    """With custom calls a token's bits are the same in any batch of any size."""
    if not WITH_CALLS:
        pytest.skip("no C++ compiler")
    case, rng = CASES[name], np.random.default_rng(5)
    lengths = (40, 33, 61, 12, 20)
    sequences = [case.draw(length, seed) for seed, length in enumerate(lengths)]
    together = Player(case, sequences)
    done = [0] * len(lengths)
    while any(now < length for now, length in zip(done, lengths, strict=True)):
        pieces, left = [], int(rng.choice([8, 33, 64]))
        tokens = left
        for sequence in rng.permutation(len(lengths)):
            rest = lengths[sequence] - done[sequence]
            count = int(min(rest, left, rng.choice([0, 1, 1, 7, 30])))
            if count:
                pieces.append(Piece(int(sequence), done[sequence], done[sequence] + count))
                done[sequence] += count
                left -= count
        together.batch(pieces, tokens)
    for sequence, inputs in enumerate(sequences):
        alone = Player(case, [inputs])
        alone.batch([Piece(0, 0, lengths[sequence])], lengths[sequence])
        np.testing.assert_array_equal(together.outputs(sequence), alone.outputs(0))
        np.testing.assert_array_equal(
            np.asarray(together.table)[together.slots[sequence]],
            np.asarray(alone.table)[alone.slots[0]],
        )
