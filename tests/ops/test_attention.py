"""Attention over a cache: all forms against NumPy's, whatever else the cache holds."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.typing import DTypeLike
from numpy.testing import assert_allclose

from jinfer.ops.attention import (
    BLOCK,
    Partial,
    _partial,
    attend,
    attend_reference,
    attend_xla,
    merge,
)
from jinfer.ops.score_rules import ScoreRules
from tests.reference.numpy_blocks import Floats
from tests.reference.numpy_blocks import attention as numpy_attention

SLOTS, HEAD_DIM, SCALE = 3, 8, 0.4
FORMS = pytest.mark.parametrize("form", [attend, attend_xla, attend_reference])


@partial(jax.jit, static_argnames=("form", "window"))
def causal(
    form: Callable[..., Array],
    q: Array,
    keys: Array,
    values: Array,
    positions: Array,
    slot: Array,
    window: int | None,
    slopes: Array | None,
) -> Array:
    """Attention in which a token sees what stands before it, with ALiBi where slopes are given."""

    def alibi(distance: Array) -> Array:
        assert slopes is not None
        return -slopes[None, :, None, None] * distance[:, None].astype(jnp.float32)

    rules = ScoreRules(SCALE, bias=None if slopes is None else alibi, window=window)
    return form(q, keys, values, positions, positions, slot, rules)


def random(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).normal(size=shape)


def run(
    form: Callable[..., Array],
    q: Floats,
    keys: Floats,
    values: Floats,
    starts: list[int],
    slot: int = 0,
    window: int | None = None,
    slopes: Floats | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Floats:
    """Attention of q [batch, tokens, heads, dim], row b standing at starts[b] and after."""
    positions = np.array(starts, np.int32)[:, None] + np.arange(q.shape[1], dtype=np.int32)
    out = causal(
        form,
        *(jnp.asarray(x, dtype) for x in (q, keys, values)),
        jnp.asarray(positions),
        jnp.int32(slot),
        window=window,
        slopes=None if slopes is None else jnp.asarray(slopes, jnp.float32),
    )
    assert out.dtype == dtype
    return np.asarray(out, np.float64)


def expected(
    q: Floats,
    keys: Floats,
    values: Floats,
    starts: list[int],
    slot: int = 0,
    window: int | None = None,
    slopes: Floats | None = None,
) -> Floats:
    """The same by NumPy, which sees of a row of the cache only what its queries may."""
    rows = []
    for b, start in enumerate(starts):
        seen = slice(0, start + q.shape[1])
        k, v = (x[slot + b, :, seen].swapaxes(0, 1) for x in (keys, values))
        rows.append(numpy_attention(q[b], k, v, SCALE, window=window, slopes=slopes))
    return np.stack(rows)


@FORMS
@pytest.mark.parametrize(
    ("length", "tokens", "starts"),
    [
        (7, 7, [0]),  # a cache shorter than a block
        (BLOCK, 1, [BLOCK - 1]),
        (BLOCK, 5, [0, 100]),
        (2 * BLOCK, 1, [BLOCK - 1, BLOCK]),  # a block's last key, and the next one's first
        (2 * BLOCK, 3, [BLOCK - 2]),  # across the edge
        (2 * BLOCK + 44, 2, [2 * BLOCK - 1, 3]),  # a last block that begins early
        (2 * BLOCK + 44, 2, [2 * BLOCK + 42, 0]),
    ],
)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
def test_lengths_and_positions(
    form: Callable[..., Array],
    heads: tuple[int, int],
    length: int,
    tokens: int,
    starts: list[int],
) -> None:
    q = random(1, len(starts), tokens, heads[0], HEAD_DIM)
    keys, values = random(2, 2, SLOTS, heads[1], length, HEAD_DIM)
    slot = SLOTS - len(starts)
    got = run(form, q, keys, values, starts, slot)
    assert_allclose(got, expected(q, keys, values, starts, slot), atol=2e-6)


@FORMS
@pytest.mark.parametrize("window", [1, 2, 50, BLOCK, BLOCK + 1, 10_000])
def test_window(form: Callable[..., Array], window: int) -> None:
    """Rows far apart, so that a window skips blocks for one row that another needs."""
    q = random(3, 2, 3, 2, HEAD_DIM)
    keys, values = random(4, 2, SLOTS, 1, 3 * BLOCK, HEAD_DIM)
    for starts in ([0, 2 * BLOCK + 9], [BLOCK - 1, 2 * BLOCK - 3]):
        got = run(form, q, keys, values, starts, window=window)
        assert_allclose(got, expected(q, keys, values, starts, window=window), atol=2e-6)


@FORMS
@pytest.mark.parametrize("window", [None, 9])
def test_alibi(form: Callable[..., Array], window: int | None) -> None:
    q = random(5, 2, 2, 4, HEAD_DIM)
    keys, values = random(6, 2, SLOTS, 2, BLOCK + 20, HEAD_DIM)
    slopes = np.array([1.0, 0.3, 0.05, 0.001])
    got = run(form, q, keys, values, [3, BLOCK + 2], 1, window, slopes)
    assert_allclose(got, expected(q, keys, values, [3, BLOCK + 2], 1, window, slopes), atol=2e-6)


@FORMS
@pytest.mark.parametrize("window", [None, 30])
def test_whole_texts(form: Callable[..., Array], window: int | None) -> None:
    """Where every token sees every other one, up to the end of its own text."""
    lengths, most = [BLOCK + 5, 40], BLOCK + 5
    q = random(19, 2, most, 2, HEAD_DIM)
    keys, values = random(20, 2, 2, 1, most, HEAD_DIM)
    at = jnp.broadcast_to(jnp.arange(most, dtype=jnp.int32), (2, most))
    last = jnp.broadcast_to(jnp.array(lengths, jnp.int32)[:, None] - 1, at.shape)
    rules = ScoreRules(SCALE, window=window, ahead=window)
    whole = [jnp.asarray(x, jnp.float32) for x in (q, keys, values)]
    got = form(*whole, at, last, jnp.int32(0), rules)
    for b, length in enumerate(lengths):
        k, v = (x[b, :, :length].swapaxes(0, 1) for x in (keys, values))
        wanted = numpy_attention(q[b, :length], k, v, SCALE, causal=False, window=window)
        assert_allclose(got[b, :length], wanted, atol=2e-6)


@FORMS
@pytest.mark.parametrize("garbage", [1e30, -1e30, 3e38])
def test_what_lies_beyond_does_not_matter(form: Callable[..., Array], garbage: float) -> None:
    """What earlier sequences and padding left is finite, for a cache begins as zeros."""
    starts, slot = [BLOCK + 3, 10], 1
    q = random(7, 2, 2, 2, HEAD_DIM)
    keys, values = random(8, 2, SLOTS, 2, 2 * BLOCK, HEAD_DIM)
    clean = run(form, q, keys, values, starts, slot)
    keys[0], values[0] = garbage, garbage  # another sequence's row
    for b, start in enumerate(starts):
        keys[slot + b, :, start + 2 :] = garbage
        values[slot + b, :, start + 2 :] = garbage
    assert np.array_equal(run(form, q, keys, values, starts, slot), clean)


@FORMS
def test_large_scores_do_not_overflow(form: Callable[..., Array]) -> None:
    q = 300 * random(9, 1, 4, 2, HEAD_DIM)
    keys, values = 300 * random(10, 2, 1, 2, BLOCK + 8, HEAD_DIM)
    got = run(form, q, keys, values, [BLOCK])
    assert_allclose(got, expected(q, keys, values, [BLOCK]), rtol=1e-5)


@FORMS
def test_bfloat16(form: Callable[..., Array]) -> None:
    """As good as the type: its relative step is 2^-8, over weights and over the result."""
    shape = (SLOTS, 2, 2 * BLOCK, HEAD_DIM)
    q, keys, values = (
        np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
        for x in (random(11, 2, 3, 4, HEAD_DIM), random(12, *shape), random(13, *shape))
    )
    got = run(form, q, keys, values, [BLOCK - 1, 300], dtype=jnp.bfloat16)
    assert_allclose(got, expected(q, keys, values, [BLOCK - 1, 300]), atol=0.02)


@pytest.mark.parametrize("cuts", [[0, 40], [0, 1, 40], [0, 13, 14, 30, 40]])
@pytest.mark.parametrize("window", [None, 5])
def test_parts_merge_into_the_whole(cuts: list[int], window: int | None) -> None:
    """Wherever the keys are cut, in whatever order the parts come, also where a row sees none."""
    rows = jnp.asarray(random(13, 2, 2, 6, HEAD_DIM), jnp.float32)
    keys, values = jnp.asarray(random(14, 2, 2, 2, 40, HEAD_DIM), jnp.float32)
    positions = jnp.asarray([[7, 8, 9], [37, 38, 39]], jnp.int32)

    def part(first: int, last: int) -> Partial:
        at = jnp.arange(first, last, dtype=jnp.int32)
        k, v = keys[:, :, first:last], values[:, :, first:last]
        fresh = jnp.ones(last - first, jnp.bool_)
        return _partial(
            rows, k, v, positions, positions, at, fresh, ScoreRules(SCALE, window=window)
        )

    whole = part(0, 40)
    parts = [part(first, last) for first, last in pairwise(cuts)]
    for order in (parts, parts[::-1]):
        merged = order[0]
        for other in order[1:]:
            merged = merge(merged, other)
        assert_allclose(merged.highest, whole.highest)
        assert_allclose(merged.total, whole.total, rtol=1e-5)
        assert_allclose(merged.out, whole.out, atol=1e-5)


def test_nothing_merged_with_nothing_is_nothing() -> None:
    nothing = Partial(jnp.zeros((1, 1, 1, 4)), jnp.full((1, 1, 1), -jnp.inf), jnp.zeros((1, 1, 1)))
    merged = merge(nothing, nothing)
    assert np.array_equal(merged.out, nothing.out)
    assert np.array_equal(merged.total, nothing.total)
    assert merged.highest.item() == -np.inf


@pytest.mark.parametrize("form", [attend, attend_xla])
def test_cost_follows_the_tokens_that_are_there(form: Callable[..., Array]) -> None:
    """NaN in every block that nobody needs: neither beyond the last position nor before a window
    is anything read."""
    q = random(15, 1, 1, 1, HEAD_DIM)
    keys, values = random(16, 2, 1, 1, 5 * BLOCK, HEAD_DIM)
    for x in (keys, values):
        x[:, :, : 2 * BLOCK] = np.nan
        x[:, :, 3 * BLOCK :] = np.nan
    got = run(form, q, keys, values, [3 * BLOCK - 1], window=20)
    assert np.isfinite(got).all()


@pytest.mark.parametrize("form", [attend, attend_xla])
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_row_does_not_depend_on_its_neighbours(form: Callable[..., Array], tokens: int) -> None:
    """To the bit, for the same request gives the same tokens whoever shares its batch."""
    q = random(17, 3, tokens, 4, HEAD_DIM)
    keys, values = random(18, 2, SLOTS, 2, 2 * BLOCK, HEAD_DIM)
    step = partial(run, form, keys=keys, values=values)
    together = step(q, starts=[20, 40, 5])  # one block
    neighbours = step(np.stack([q[2], q[1], q[0]]), starts=[400, 40, 300])  # two
    assert np.array_equal(together[1], neighbours[1])
