"""Attention over paged caches: the kernels in interpret mode, and plain XLA, by NumPy's."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas import attention_pieces as pieces
from kernels_pallas.attention import Queries, Scores, attend
from kernels_pallas.kept import TOKENS, Kept
from tests.kernels_pallas.helpers import KINDS, kept
from tests.reference import numpy_cache

BACKENDS = pytest.mark.parametrize("backend", ["triton", "xla"])
PADDING = -1
RUNS = ((1, 289, 1), (PADDING, 7, 2), (0, 8, 1))  # row of the tables, first position, tokens


@functools.partial(jax.jit, static_argnames=("backend", "interpret", "rules"))
def run(
    q: Any,
    keys: Any,
    values: Any,
    queries: Any,
    arrays: Any,
    rules: Any,
    *,
    backend: str,
    interpret: bool,
) -> jax.Array:
    scores = Scores(**dict(rules), **arrays)
    return attend(q, keys, values, queries, scores, backend=backend, interpret=interpret)  # type: ignore[arg-type]


@dataclass
class Batch:
    """A flat batch, and what its tokens see by definition.

    Attributes:
        rows, positions: of each token.
        low, last: the first and the last key that it sees.
        tables: as far as they are needed; the rest is what other sequences left there.
    """

    rows: np.ndarray
    positions: np.ndarray
    low: np.ndarray
    last: np.ndarray
    tables: np.ndarray

    def sees(self, token: int) -> np.ndarray:
        """The positions of the keys that a token sees."""
        if self.rows[token] < 0:
            return np.zeros(0, np.int64)
        return np.arange(max(0, self.low[token]), self.last[token] + 1)

    def places(self, token: int) -> tuple[np.ndarray, np.ndarray]:
        """(block, offset) of those keys in the pool."""
        sees = self.sees(token)
        return self.tables[self.rows[token], sees // TOKENS], sees % TOKENS

    def queries(self, only: int | None = None) -> Queries:
        """As the kernel takes it; `only` one of the tokens."""
        tokens = slice(None) if only is None else slice(only, only + 1)
        each = (self.rows, self.positions, self.low, self.last)
        taken = [part[tokens] for part in each] + [self.tables]
        return Queries._make(jnp.asarray(part, jnp.int32) for part in taken)


def batch_of(
    runs: tuple[tuple[int, int, int], ...],
    blocks: int,
    *,
    length: int = 320,
    window: int | None = None,
    ahead: int | None = None,
    last: int | None = None,
    shared: int = 0,
    rows: int = 3,
) -> Batch:
    """Runs in blocks anywhere in a pool.

    Args:
        blocks: of the pool.
        last: of all queries, instead of their own positions.
        shared: blocks that all sequences begin with.
    """
    rng = np.random.default_rng(5)
    row = np.concatenate([np.full(count, row) for row, _, count in runs])
    positions = np.concatenate([first + np.arange(count) for _, first, count in runs])
    low = np.zeros_like(positions) if window is None else positions - window + 1
    end = positions if last is None else np.full_like(positions, last)
    if ahead is not None:
        end = np.minimum(end, positions + ahead - 1)
    wide = -(-length // TOKENS)
    tables = rng.permutation(blocks)[: rows * wide].reshape(rows, wide)
    tables[:, :shared] = tables[:1, :shared]
    batch = Batch(row, positions, low, end, tables)
    needed = np.zeros(tables.shape, bool)
    for token in range(len(row)):
        needed[max(row[token], 0), batch.sees(token) // TOKENS] = True
    batch.tables = np.where(needed, tables, rng.integers(0, 1 << 30, tables.shape))
    return batch


def expected(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    batch: Batch,
    *,
    scale: float,
    softcap: float | None = None,
    by_distance: np.ndarray | None = None,
    lowest: int = 0,
    slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Attention by definition, of k and v [blocks, kv_heads, TOKENS, dim], token by token."""
    count, heads, _ = q.shape
    out = np.zeros((count, heads, v.shape[-1]))
    for token in range(count):
        where, distance = batch.places(token), batch.positions[token] - batch.sees(token)
        for head in range(heads):
            of = head * k.shape[1] // heads
            s = k[where[0], of, where[1]] @ q[token, head] * scale
            if softcap is not None:
                s = softcap * np.tanh(s / softcap)
            if by_distance is not None:
                far = np.clip(distance, lowest, lowest + by_distance.shape[1] - 1)
                s = s + by_distance[head, far - lowest]
            if slopes is not None:
                s = s - slopes[head] * distance
            weights = np.exp(s)
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[head]))
            if total > 0:
                out[token, head] = weights @ v[where[0], of, where[1]] / total
    return out


def spoilt(part: Kept, needed: np.ndarray) -> Kept:
    """All that is not needed [blocks, TOKENS] made NaN, and codes random."""
    rng = np.random.default_rng(3)

    def spoil(array: Any) -> jax.Array:
        array = np.asarray(array)
        if array.dtype == np.uint32:
            bad = rng.integers(0, 1 << 32, array.shape).astype(np.uint32)
        else:
            bad = np.full(array.shape, np.nan, array.dtype)
        return jnp.asarray(np.where(needed[:, None, :, None], array, bad))

    return jax.tree.map(spoil, part)


class Case:
    """Random queries, a cache with nothing in it but what they see, and how scores change."""

    def __init__(
        self,
        kinds: tuple[str, str | None],
        runs: tuple[tuple[int, int, int], ...] = RUNS,
        *,
        heads: tuple[int, int] = (4, 2),
        dims: tuple[int, int] = (64, 64),
        softcap: float | None = None,
        by_distance: int | None = None,
        slopes: bool = False,
        sinks: bool = False,
        dtype: Any = jnp.bfloat16,
        blocks: int = 20,
        **placed: Any,
    ) -> None:
        """A case.

        Args:
            kinds: of keys and of values; None: the keys are the values too.
            heads: query heads, and those of keys.
            dims: of keys and of values.
            by_distance: the lowest distance of a table.
            placed: of `batch_of`.
        """
        rng = np.random.default_rng(0)
        normal = rng.standard_normal
        self.batch = batch_of(runs, blocks, **placed)
        count = len(self.batch.rows)
        needed = np.zeros((blocks, TOKENS), bool)
        for token in range(count):
            needed[self.batch.places(token)] = True
        keys = kept(kinds[0], normal((blocks, heads[1], TOKENS, dims[0])) + 0.5)
        values = keys
        if kinds[1] is not None:
            values = kept(kinds[1], normal((blocks, heads[1], TOKENS, dims[1])))
        self.k, self.v = (np.asarray(each.decoded(), np.float64) for each in (keys, values))
        self.keys = spoilt(keys, needed)
        self.values = None if kinds[1] is None else spoilt(values, needed)
        self.q = jnp.asarray(normal((count, heads[0], dims[0])), dtype)
        self.numbers: dict[str, Any] = {
            "scale": 2 * dims[0] ** -0.5,
            "softcap": softcap,
            "lowest": 0,
        }
        self.arrays: dict[str, np.ndarray] = {}
        if by_distance is not None:
            self.numbers["lowest"] = by_distance
            self.arrays["by_distance"] = normal((heads[0], 40))
        if slopes:
            self.arrays["slopes"] = np.abs(normal(heads[0])) / 10
        if sinks:
            self.arrays["sinks"] = normal(heads[0])
        # Of the type in which products are; f16's is that of codes too.
        coarse = dtype == jnp.bfloat16 or "bf16" in kinds
        self.tolerance = 1e-2 if coarse else 1e-5 if set(kinds) <= {"f32", None} else 4e-3

    def run(
        self, backend: str = "triton", only: int | None = None, interpret: bool = True
    ) -> np.ndarray:
        """What the kernel gives."""
        q = self.q if only is None else self.q[only : only + 1]
        arrays = {name: jnp.asarray(each, jnp.float32) for name, each in self.arrays.items()}
        out = run(
            q,
            self.keys,
            self.values,
            self.batch.queries(only),
            arrays,
            tuple(self.numbers.items()),
            backend=backend,
            interpret=interpret,
        )
        assert out.dtype == self.q.dtype
        return np.asarray(out)

    def check(self, backend: str = "triton", interpret: bool = True) -> None:
        """Holds the result to the definition."""
        exact, changes = np.asarray(self.q, np.float64), self.numbers | self.arrays
        wanted = expected(exact, self.k, self.v, self.batch, **changes)
        got = self.run(backend, interpret=interpret)
        assert got.shape == wanted.shape
        bound = self.tolerance
        np.testing.assert_allclose(got.astype(np.float64), wanted, atol=bound, rtol=bound)
        assert not got[self.batch.rows == PADDING].any()

    def check_alone(self, interpret: bool = True, every: int = 1) -> None:
        """Holds the results of tokens to the bits that they have without the others."""
        together = self.run(interpret=interpret)
        for token in np.flatnonzero(self.batch.rows != PADDING)[::every]:
            (alone,) = self.run(only=token, interpret=interpret)
            assert alone.tobytes() == together[token].tobytes(), token


EVERYTHING: dict[str, Any] = {
    "window": 70,
    "softcap": 5.0,
    "slopes": True,
    "sinks": True,
    "by_distance": -3,
}
MIXED = ((1, 289, 1), (2, 0, 70), (PADDING, 0, 3), (0, 100, 9), (PADDING, 0, 1))


@BACKENDS
@pytest.mark.parametrize(
    "kind",
    [
        # The others are those of tests below, which hold both backends to the same definition.
        pytest.param(kind, marks=() if kind in ("bf16", "q2") else pytest.mark.soak)
        for kind in KINDS
    ],
)
def test_every_kind(kind: str, backend: str) -> None:
    Case((kind, kind)).check(backend)


@BACKENDS
@pytest.mark.parametrize(
    "kind",
    [
        # Scores are changed after codes have become numbers: the kinds differ in nothing here.
        pytest.param(kind, marks=() if kind in ("f32", "q3.5") else pytest.mark.soak)
        for kind in KINDS
    ],
)
def test_everything_of_a_kind(kind: str, backend: str) -> None:
    case = Case((kind, kind), ((0, 298, 3),), heads=(20, 1), dims=(96, 32), **EVERYTHING)
    case.check(backend)


@BACKENDS
@pytest.mark.parametrize(
    "kinds",
    [
        *[("q3.5", "bf16"), ("q8", "q4")],
        *(pytest.param(each, marks=pytest.mark.soak) for each in (("f16", "q8"), ("f32", "q2"))),
    ],
)
def test_keys_and_values_of_other_kinds_and_widths(kinds: tuple[str, str], backend: str) -> None:
    Case(kinds, ((2, 100, 5),), dims=(48, 192)).check(backend)


@BACKENDS
@pytest.mark.parametrize(
    "kind",
    ["q3.5", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("f32", "bf16", "q8"))],
)
def test_keys_that_are_the_values_too(kind: str, backend: str) -> None:
    """As in latent attention; 288 wide, so in several tiles, and heads of a token in two."""
    case = Case((kind, None), ((0, 150, 2),), heads=(20, 1), dims=(288, 288), dtype=jnp.float32)
    case.check(backend)


@BACKENDS
@pytest.mark.parametrize(
    "dim", [80, *(pytest.param(dim, marks=pytest.mark.soak) for dim in (16, 40, 100, 160))]
)
def test_odd_widths_of_codes(dim: int, backend: str) -> None:
    """A last column that is not full, and columns that are no power of two."""
    Case(("q4", "q6"), dims=(dim, dim + 3)).check(backend)


@BACKENDS
@pytest.mark.parametrize(
    ("kind", "window"),
    [
        *(("f32", 40), ("q5", None)),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in (("f32", None), ("q5", 40))),
    ],
)
def test_prompts_and_decoding_together(kind: str, window: int | None, backend: str) -> None:
    """Two launches: small pieces of short runs, large ones of long runs."""
    Case((kind, kind), MIXED, heads=(3, 1), window=window, dtype=jnp.float32).check(backend)


@BACKENDS
def test_common_beginnings(backend: str) -> None:
    """Sequences that share blocks, each with its own afterwards."""
    runs = ((0, 200, 1), (1, 130, 4), (2, 127, 1))
    Case(("f16", "f16"), runs, shared=2, dtype=jnp.float32).check(backend)


@BACKENDS
def test_over_an_encoders_tokens(backend: str) -> None:
    """Cross-attention: all queries see the same keys, whatever their positions."""
    Case(("f16", "q8"), ((1, 0, 3), (0, 900, 1)), last=99, dtype=jnp.float32).check(backend)


@BACKENDS
def test_whole_texts(backend: str) -> None:
    """Every token sees as far ahead as back, up to the end of its text."""
    case = Case(("f32", "f32"), ((2, 0, 90),), last=89, window=30, ahead=30, dtype=jnp.float32)
    case.check(backend)


@pytest.mark.parametrize("position", [0, 62, 63, 64, 127, 128, 255, 319])
def test_edges_of_blocks_and_splits(position: int) -> None:
    Case(("f16", "q3"), ((2, position, 1),)).check()
    Case(("f32", "f32"), ((2, position, 1),), window=64, dtype=jnp.float32).check()


@pytest.mark.parametrize("position", [3967, 3968, 3969])
def test_edges_of_the_splits_sizes(position: int) -> None:
    """More than 31 splits of 128 keys become larger ones, in the middle of a run too."""
    runs = ((0, position - 2, 5),)
    shape: dict[str, Any] = {"heads": (2, 1), "dims": (16, 16), "length": 4096, "rows": 1}
    case = Case(("f16", "f16"), runs, blocks=64, **shape)
    case.check()
    case.check_alone()


@pytest.mark.parametrize("low", [0, 1, 63, 100, 127])
def test_as_many_splits_as_there_are(low: int) -> None:
    """Keys that begin and end within a split; the first and the last do not share a place."""
    runs = ((0, low + 3968 - 1, 1),)
    shape: dict[str, Any] = {"length": 4160, "rows": 1, "blocks": 65}
    Case(("f32", "f32"), runs, heads=(1, 1), dims=(16, 16), window=3968, **shape).check()


@pytest.mark.parametrize(
    "kind", ["q8", *(pytest.param(k, marks=pytest.mark.soak) for k in ("f32", "bf16"))]
)
@pytest.mark.parametrize("whole", [False, True])
def test_the_same_bits_in_any_company(
    kind: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone each split is a program's; together one may compute all of them."""
    case = Case((kind, kind), MIXED, heads=(6, 2), dims=(48, 48), dtype=jnp.float32)
    if not whole:
        case.check_alone(every=3 if kind == "q8" else 1)  # each token is a program
        return
    alone = [case.run(only=token) for token in (0, 1, 40, 70, 74)]
    monkeypatch.setattr(pieces, "_PROGRAMS", 1)
    jax.clear_caches()
    together = case.run()
    jax.clear_caches()
    for token, (one,) in zip((0, 1, 40, 70, 74), alone, strict=True):
        assert one.tobytes() == together[token].tobytes()


def test_the_same_bits_wherever_blocks_lie() -> None:
    case = Case(("f16", "f16"), MIXED)
    before = case.run()
    order = np.random.default_rng(1).permutation(20)
    case.keys, case.values = (
        jax.tree.map(lambda part: jnp.asarray(np.asarray(part)[order]), each)
        for each in (case.keys, case.values)
    )
    tables = case.batch.tables
    moved = np.argsort(order)
    case.batch.tables = np.where(tables < 20, moved[np.minimum(tables, 19)], tables)
    assert before.tobytes() == case.run().tobytes()


@pytest.mark.soak  # each example is a program, or two
@settings(max_examples=20)
@given(data=st.data())
def test_anything_together(data: st.DataObject) -> None:
    draw = data.draw
    kinds = draw(st.sampled_from(KINDS), "keys"), draw(st.sampled_from([*KINDS, None]), "values")
    dims = tuple(
        draw(st.integers(1, 8)) * 16
        if kind in ("f32", "bf16", "f16")
        else draw(st.integers(1, 140))
        for kind in (kinds[0], kinds[1] or kinds[0])
    )
    kv_heads = draw(st.integers(1, 2), "heads")
    counts = draw(st.lists(st.sampled_from([1, 1, 2, 7, 80]), min_size=1, max_size=3), "tokens")
    runs = []
    for row, count in enumerate(counts):
        runs.append((row, draw(st.integers(0, 320 - count), "first"), count))
        if draw(st.booleans(), "padding"):
            runs.append((PADDING, 0, draw(st.integers(1, 3))))
    case = Case(
        kinds,
        tuple(draw(st.permutations(runs), "order")),
        heads=(kv_heads * draw(st.integers(1, 9), "group"), kv_heads),
        dims=(dims[0], dims[0] if kinds[1] is None else dims[1]),
        window=draw(st.one_of(st.none(), st.integers(1, 100)), "window"),
        softcap=draw(st.sampled_from([None, 1.5]), "softcap"),
        by_distance=draw(st.sampled_from([None, 0, -20]), "by distance"),
        slopes=draw(st.booleans(), "slopes"),
        sinks=draw(st.booleans(), "sinks"),
        dtype=draw(st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]), "dtype"),
    )
    case.check()


@BACKENDS
def test_a_query_that_sees_nothing_gets_zeros(backend: str) -> None:
    case = Case(("f16", "f16"), ((0, 5, 1), (1, 5, 2)), last=-1)
    assert not case.run(backend).any()


@BACKENDS
def test_queries_that_fp16_does_not_hold(backend: str) -> None:
    """Rows of queries are scaled to it."""
    for scale in (1e-6, 1e6):
        case = Case(("q8", "q8"), ((0, 63, 1),), heads=(2, 1), dtype=jnp.float32)
        case.q *= jnp.float32(1 / scale)
        case.numbers["scale"] *= scale
        case.check(backend)


@pytest.mark.parametrize("group", [1, 3, 20])
@pytest.mark.parametrize("count", [40, 160])
def test_every_token_is_in_one_piece(group: int, count: int) -> None:
    """Of many batches, however the splits' sizes change in their runs."""
    rng, tables = np.random.default_rng(0), 12
    keys = Kept(jax.ShapeDtypeStruct((8, 2, TOKENS, 64), jnp.bfloat16))
    launches = pieces.launches(pieces.Shape(count, tables, 9088, 2, group), keys, keys, 128)

    @jax.jit
    def cut(rows: jax.Array, last: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        power = pieces.powers(jnp.zeros_like(last), last, 128)
        runs = pieces.runs(rows, power)
        short = runs.length <= launches[0].most
        chosen = [runs.real] if len(launches) == 1 else [short, ~short]
        return power, [pieces.firsts(runs, *each) for each in zip(chosen, launches, strict=True)]

    for _ in range(20):
        rows, last = np.full(count, PADDING, np.int32), np.zeros(count, np.int32)
        place = 0
        for row in range(tables):
            length = min(int(rng.choice([1, 1, 3, 17, 40])), count - place)
            rows[place : place + length] = row
            last[place : place + length] = rng.integers(0, 9000) + np.arange(length)
            place += length + int(rng.integers(0, 2))
            if place >= count:
                break
        power, firsts = (jax.device_get(part) for part in cut(rows, last))
        covered = np.zeros(count, int)
        for launch, begins in zip(launches, firsts, strict=True):
            for first in begins[begins < count]:
                piece = np.arange(first, min(first + launch.most, count))
                same = (rows[piece] == rows[first]) & (power[piece] == power[first])
                covered[piece[same]] += 1
        np.testing.assert_array_equal(covered, rows != PADDING)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("q")])
def test_codes_are_what_the_cache_says(kind: str) -> None:
    """Against the definition; where float32 rounds otherwise, a number is a step off."""
    x = np.random.default_rng(0).standard_normal((2, 1, 50, 100)).astype(np.float32)
    got, wanted = np.asarray(kept(kind, x).decoded()), numpy_cache.kept(x.astype(np.float64), kind)
    assert np.mean(np.abs(got - wanted) > 1e-5) < 2e-3
    np.testing.assert_allclose(got, wanted, atol=2)
