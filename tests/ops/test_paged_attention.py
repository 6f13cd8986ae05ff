"""Attention of flat batches over a paged cache: all forms against NumPy's definition."""

from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike
from numpy.testing import assert_allclose

from jinfer.ops.attention import xla
from jinfer.ops.attention.kv_cache import BLOCK
from jinfer.ops.attention.mask_rules import ScoreRules
from jinfer.ops.attention.paged_attention import attend
from jinfer.ops.attention.xla import PartialSoftmax, _partial, attend_xla, merge_softmax
from tests.arrays import on_device
from tests.ops.attention_reference import attend_reference
from tests.ops.paged import SCALE, Run, blocks_of, expected, placed, random, sequences, tables_of
from tests.ops.paged import filled as filled_pool
from tests.reference.numpy_blocks import Floats

pytestmark = pytest.mark.usefixtures("optimized")
HEAD_DIM = 8


def attend_by_sequences(*arguments: Any) -> Any:
    """XLA's other form, which large batches take."""
    before, xla.FEW_TOKENS = xla.FEW_TOKENS, 0
    try:
        return attend_xla(*arguments)
    finally:
        xla.FEW_TOKENS = before


FAST = pytest.mark.parametrize("form", [attend, attend_xla, attend_by_sequences])
FORMS = pytest.mark.parametrize("form", [attend, attend_xla, attend_by_sequences, attend_reference])


def filled(lengths: list[int], heads: int = 2, dim: int = HEAD_DIM, seed: int = 1) -> Any:
    """Keys and values of sequences, each [tokens, heads, dim], and the pool with them in it."""
    keys = [random(seed + 100 + i, n, heads, dim) for i, n in enumerate(lengths)]
    values = [random(seed + 200 + i, n, heads, dim) for i, n in enumerate(lengths)]
    tables = tables_of(lengths, seed, width=max(-(-n // BLOCK) for n in lengths) + 2)
    return keys, values, filled_pool("f32", keys, values, tables), tables


def run(
    form: Any,
    q: Floats,
    cache: Any,
    runs: list[Run],
    tables: np.ndarray,
    last: list[int] | None = None,
    dtype: DTypeLike = jnp.float32,
    **rules: Any,
) -> Floats:
    at = placed(runs, tables)
    seen = at.positions if last is None else on_device(last, jnp.int32)

    @jax.jit
    def step(q: Any, cache: Any, at: Any, seen: Any) -> Any:
        return form(q, *cache[:2], at, seen, ScoreRules(SCALE, **rules))

    out = step(on_device(q, dtype), cache, at, seen)
    assert out.dtype == dtype
    return np.asarray(out, np.float64)


@FORMS
@pytest.mark.parametrize(
    "runs",
    [
        [Run(0, 0, 7)],
        [Run(1, BLOCK - 1)],
        [Run(0, 0, 5), Run(2, 100, 5)],
        [Run(2, BLOCK - 1), Run(1, BLOCK)],  # a block's last key, and the next one's first
        [Run(1, BLOCK - 2, 3)],  # across the edge
        [Run(-1, 3, 2), Run(2, 599), Run(0, 9), Run(-1, 999_999), Run(1, 50, 20), Run(-1, -1)],
    ],
)
@pytest.mark.parametrize(
    "heads",
    [
        pytest.param((4, 4), id="MHA", marks=pytest.mark.soak),
        pytest.param((4, 2), id="GQA"),
        pytest.param((4, 1), id="MQA", marks=pytest.mark.soak),
    ],
)
def test_any_batch(form: Any, heads: tuple[int, int], runs: list[Run]) -> None:
    keys, values, cache, tables = filled([10, 130, 600], heads[1])
    q = random(1, sum(run.length for run in runs), heads[0], HEAD_DIM)
    got = run(form, q, cache, runs, tables)
    assert_allclose(got, expected(q, keys, values, runs), atol=2e-6)


@FORMS
@pytest.mark.parametrize(
    "window",
    [1, 50, *(pytest.param(n, marks=pytest.mark.soak) for n in (2, BLOCK, 10_000)), BLOCK + 1],
)
def test_window(form: Any, window: int) -> None:
    """Sequences far apart, so that a window skips blocks for one token that another needs."""
    keys, values, cache, tables = filled([8, 600], 1)
    for runs in ([Run(0, 0, 3), Run(1, 590, 3)], [Run(0, 5, 2), Run(1, BLOCK - 1, 4)]):
        q = random(3, sum(run.length for run in runs), 2, HEAD_DIM)
        got = run(form, q, cache, runs, tables, window=window)
        assert_allclose(got, expected(q, keys, values, runs, window=window), atol=2e-6)


@FORMS
@pytest.mark.parametrize("window", [None, 9])
def test_alibi(form: Any, window: int | None) -> None:
    keys, values, cache, tables = filled([5, 290], 2)
    runs = [Run(0, 3, 2), Run(1, 257, 2)]
    q, slopes = random(5, 4, 4, HEAD_DIM), on_device([1.0, 0.3, 0.05, 0.001])
    rules: dict[str, Any] = {"slopes": slopes} | ({} if window is None else {"window": window})
    got = run(form, q, cache, runs, tables, **rules)
    assert_allclose(got, expected(q, keys, values, runs, **rules), atol=2e-6)


@FORMS
def test_last_visible_position_limits_keys(form: Any) -> None:
    """As for an encoder's tokens, of which a query at any position sees all."""
    keys, values, cache, tables = filled([3, 150, 64], 2)
    runs = [Run(2, 700, 2), Run(0, 0), Run(1, 5, 3), Run(0, 9)]
    last = [63, 63, 2, 149, 149, 80, -1]
    q = random(6, 7, 4, HEAD_DIM)
    got = run(form, q, cache, runs, tables, last)
    assert_allclose(got, expected(q, keys, values, runs, last), atol=2e-6)
    assert not got[6].any()


@FORMS
def test_sequences_may_share_blocks(form: Any) -> None:
    keys, values, cache, tables = filled([128, 64, 130], 2)
    tables[1, :2] = tables[0, 0], tables[1, 0]
    keys[1] = np.concatenate([keys[0][:BLOCK], keys[1]])
    values[1] = np.concatenate([values[0][:BLOCK], values[1]])
    runs = [Run(1, 120, 8), Run(0, 120, 8), Run(2, 128)]
    q = random(7, 17, 2, HEAD_DIM)
    got = run(form, q, cache, runs, tables)
    assert_allclose(got, expected(q, keys, values, runs), atol=2e-6)


@FAST
def test_freed_blocks_before_the_window_are_not_read(form: Any) -> None:
    """Nothing is read through entries that no token needs, or by whom it is not seen."""
    keys, values, cache, tables = filled([600, 300], 1)
    runs, q = [Run(0, 590, 4), Run(1, 299)], random(8, 5, 2, HEAD_DIM)
    target = run(form, q, cache, runs, tables, window=100)
    nan = jax.tree.map(lambda x: x.at[tables[0, :7]].set(jnp.nan), cache)
    assert np.array_equal(run(form, q, nan, runs, tables, window=100), target)
    tables[0, :7], tables[0, 10:] = 1_000_000, 1_000_000
    assert np.array_equal(run(form, q, cache, runs, tables, window=100), target)
    assert_allclose(target, expected(q, keys, values, runs, window=100), atol=2e-6)


@FORMS
@pytest.mark.parametrize(
    "garbage",
    [3e38, np.nan, *(pytest.param(x, marks=pytest.mark.soak) for x in (1e30, -1e30, np.inf))],
)
def test_keys_after_the_last_position_are_ignored(form: Any, garbage: float) -> None:
    """What other sequences hold, and what was before in the rest of one's own blocks."""
    _, _, cache, tables = filled([300, 100, 100], 2)
    runs, q = [Run(0, 259, 2), Run(2, 10, 2)], random(9, 4, 2, HEAD_DIM)
    clean = run(form, q, cache, runs, tables)

    def spoil(x: Any) -> Any:
        x = x.at[tables[1, :2]].set(garbage)  # another sequence's blocks
        x = x.at[tables[0, 4], :, 5:].set(garbage)
        return x.at[tables[2, 0], :, 12:].set(garbage).at[tables[2, 1]].set(garbage)

    assert np.array_equal(run(form, q, jax.tree.map(spoil, cache), runs, tables), clean)


@FORMS
def test_nan_in_visible_keys_is_seen(form: Any) -> None:
    """A NaN in a query, in a key or in a value makes all that see it NaN, and nothing else."""
    _, _, cache, tables = filled([300, 100], 1)
    runs = [Run(0, 250), Run(1, 20), Run(0, 270), Run(1, 99), Run(-1, 0)]
    q = random(10, 5, 2, HEAD_DIM)
    q[2, 1, 3] = np.nan
    got = np.isnan(run(form, q, cache, runs, tables)).all(axis=2)
    assert got.tolist() == [[False] * 2, [False] * 2, [False, True], [False] * 2, [False] * 2]
    q = random(10, 5, 2, HEAD_DIM)
    for part in (0, 1):
        broken = list(cache)
        broken[part] = broken[part].at[tables[1, 0], 0, 50, 1].set(jnp.nan)
        got = np.isnan(run(form, q, tuple(broken), runs, tables)).any(axis=2)
        assert got.tolist() == [[False] * 2] * 3 + [[True] * 2] + [[False] * 2]
    nothing = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache)
    assert np.isnan(run(form, q, nothing, runs, tables)[:4]).all()


@FORMS
def test_large_scores_do_not_overflow(form: Any) -> None:
    keys, values, cache, tables = filled([264], 2, seed=7)
    keys, values, cache = (jax.tree.map(lambda x: 300 * x, y) for y in (keys, values, cache))
    q, runs = 300 * random(9, 4, 2, HEAD_DIM), [Run(0, 256, 4)]
    assert_allclose(
        run(form, q, cache, runs, tables), expected(q, keys, values, runs), rtol=1e-5, atol=1e-30
    )


@FORMS
def test_bfloat16(form: Any) -> None:
    """As good as the type: its relative step is 2^-8, over weights and over the result."""
    lengths, runs = [64, 310], [Run(0, 61, 3), Run(1, 300, 3)]
    _, _, cache, tables = filled(lengths, 2)
    cache = jax.tree.map(lambda x: x.astype(jnp.bfloat16), cache)
    keys, values = (sequences(part, tables, lengths) for part in cache[:2])
    q = np.asarray(on_device(random(11, 6, 4, HEAD_DIM), jnp.bfloat16), np.float64)
    got = run(form, q, cache, runs, tables, dtype=jnp.bfloat16)
    assert_allclose(got, expected(q, keys, values, runs), atol=0.02)


@FAST
def test_cost_depends_on_the_number_of_tokens(form: Any) -> None:
    """A table for a million tokens costs what one for a few does: nobody walks over it."""
    _, _, cache, tables = filled([70], 1)
    wide = np.full((1, 1 << 14), 1_000_000, np.int32)
    wide[0, :2] = tables[0, :2]
    q = random(12, 1, 2, HEAD_DIM)
    target = run(form, q, cache, [Run(0, 69)], tables)
    assert np.array_equal(run(form, q, cache, [Run(0, 69)], wide), target)


@pytest.mark.parametrize("cuts", [[0, 40], [0, 1, 40], [0, 13, 14, 30, 40]])
@pytest.mark.parametrize("window", [None, 5])
def test_parts_merge_into_the_whole(cuts: list[int], window: int | None) -> None:
    """Any cut of the keys and any order of the parts, also where a row sees no key."""
    q = on_device(random(13, 2, 3, 4, HEAD_DIM), jnp.float32)
    keys, values = on_device(random(14, 2, 2, 2, 40, HEAD_DIM), jnp.float32)
    positions = on_device([[7, 8, 9], [37, 38, 39]], jnp.int32)

    @partial(jax.jit, static_argnums=(0, 1))
    def part(first: int, last: int) -> PartialSoftmax:
        at = jnp.arange(first, last, dtype=jnp.int32)[None]
        k, v = keys[:, :, first:last], values[:, :, first:last]
        rules = ScoreRules(SCALE, window=window)
        return _partial(q, k, v, positions, positions, at, jnp.bool_(True), rules)

    whole = part(0, 40)
    parts = [part(first, last) for first, last in pairwise(cuts)]
    for order in (parts, parts[::-1]):
        merged = order[0]
        for other in order[1:]:
            merged = merge_softmax(merged, other)
        assert_allclose(merged.highest, whole.highest, rtol=1e-5, atol=1e-6)
        assert_allclose(merged.total, whole.total, rtol=1e-5)
        assert_allclose(merged.out, whole.out, atol=1e-5)


def test_merge_of_empty_parts_is_empty() -> None:
    nothing = PartialSoftmax(
        jnp.zeros((1, 1, 1, 4)), jnp.full((1, 1, 1), -jnp.inf), jnp.zeros((1, 1, 1))
    )
    merged = merge_softmax(nothing, nothing)
    assert np.array_equal(merged.out, nothing.out)
    assert np.array_equal(merged.total, nothing.total)
    assert merged.highest.item() == -np.inf


def test_blocks_are_handed_out_once() -> None:
    """Of the helper: a table's needed entries name every block of the pool once."""
    lengths = [3, 0, 200, 64]
    tables = tables_of(lengths, width=9)
    needed = np.concatenate([tables[row, : -(-n // BLOCK)] for row, n in enumerate(lengths)])
    assert sorted(needed) == list(range(blocks_of(lengths)))
