"""Batches over paged caches, and attention over them by definition, for the kernels' tests."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.attention.kv_layout import TOKENS, PackedKV
from kernels_pallas.attention.paged_attention import QueryBatch, ScoreModifiers, attend
from tests.arrays import on_device
from tests.kernels_pallas.helpers import kept

PADDING = -1
RUNS = ((1, 289, 1), (PADDING, 7, 2), (0, 8, 1))  # row of the tables, first position, tokens
MIXED = ((1, 289, 1), (2, 0, 70), (PADDING, 0, 3), (0, 100, 9), (PADDING, 0, 1))


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
    scores = ScoreModifiers(**dict(rules), **arrays)
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

    def queries(self, only: int | None = None) -> QueryBatch:
        """As the kernel takes it; `only` one of the tokens."""
        tokens = slice(None) if only is None else slice(only, only + 1)
        each = (self.rows, self.positions, self.low, self.last)
        taken = [part[tokens] for part in each] + [self.tables]
        return QueryBatch._make(on_device(part, jnp.int32) for part in taken)


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


decoded = jax.jit(PackedKV.dequantized)


def spoilt(part: PackedKV, needed: np.ndarray) -> PackedKV:
    """All that is not needed [blocks, TOKENS] made NaN, and codes random."""
    rng = np.random.default_rng(3)

    def spoil(array: Any) -> jax.Array:
        array = np.asarray(array)
        if array.dtype == np.uint32:
            bad = rng.integers(0, 1 << 32, array.shape).astype(np.uint32)
        else:
            bad = np.full(array.shape, np.nan, array.dtype)
        return on_device(np.where(needed[:, None, :, None], array, bad))

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
        self.k, self.v = (np.asarray(decoded(each), np.float64) for each in (keys, values))
        self.keys = spoilt(keys, needed)
        self.values = None if kinds[1] is None else spoilt(values, needed)
        self.q = on_device(normal((count, heads[0], dims[0])), dtype)
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
        arrays = {name: on_device(each, jnp.float32) for name, each in self.arrays.items()}
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
        reference = expected(exact, self.k, self.v, self.batch, **changes)
        got = self.run(backend, interpret=interpret)
        assert got.shape == reference.shape
        bound = self.tolerance
        np.testing.assert_allclose(got.astype(np.float64), reference, atol=bound, rtol=bound)
        assert not got[self.batch.rows == PADDING].any()

    def check_alone(self, backend: str = "triton", interpret: bool = True, every: int = 1) -> None:
        """Holds the results of tokens to the bits that they have without the others."""
        together = self.run(backend, interpret=interpret)
        for token in np.flatnonzero(self.batch.rows != PADDING)[::every]:
            (alone,) = self.run(backend, token, interpret)
            assert alone.tobytes() == together[token].tobytes(), token
