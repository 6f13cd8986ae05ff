"""What attention sees and how its scores are changed: caps, sinks, looking ahead."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from numpy.testing import assert_allclose

from jinfer.ops.attention import BLOCK, attend, attend_reference, attend_xla
from jinfer.ops.score_rules import ScoreRules
from tests.reference.numpy_blocks import Floats

HEAD_DIM, SCALE = 8, 0.4
FORMS = pytest.mark.parametrize("form", [attend, attend_xla, attend_reference])


def random(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).normal(size=shape)


def run(
    form: Callable[..., Array],
    q: Floats,
    keys: Floats,
    values: Floats,
    start: int,
    last: Floats | None = None,
    **rules: Any,
) -> Floats:
    """Attention of q [batch, tokens, heads, dim] from position `start` on."""
    positions = np.broadcast_to(start + np.arange(q.shape[1], dtype=np.int32), q.shape[:2])
    arrays = (jnp.asarray(x, jnp.float32) for x in (q, keys, values))
    seen = np.broadcast_to(positions if last is None else last, positions.shape)
    at = (jnp.asarray(positions), jnp.asarray(seen, jnp.int32), jnp.int32(0))
    return np.asarray(form(*arrays, *at, ScoreRules(SCALE, **rules)), np.float64)


@FORMS
def test_softcap_and_sinks(form: Callable[..., Array]) -> None:
    """Against the definitions: a cap on the scores, a score in the softmax without a value."""
    q = random(19, 1, 2, 4, HEAD_DIM)
    keys, values = random(20, 2, 1, 2, BLOCK + 9, HEAD_DIM)
    sinks = np.array([0.5, -1.0, 3.0, 0.0])
    got = run(form, q, keys, values, BLOCK, softcap=1.5, sinks=jnp.asarray(sinks, jnp.float32))
    for head in range(4):
        for t in range(2):
            k, v = keys[0, head // 2, : BLOCK + t + 1], values[0, head // 2, : BLOCK + t + 1]
            weights = np.exp(1.5 * np.tanh(SCALE * k @ q[0, t, head] / 1.5))
            wanted = weights @ v / (weights.sum() + np.exp(sinks[head]))
            assert_allclose(got[0, t, head], wanted, atol=2e-6)


@FORMS
def test_looking_ahead(form: Callable[..., Array]) -> None:
    """Whole texts of different lengths, each token seeing as far ahead as back."""
    q = random(21, 2, 12, 2, HEAD_DIM)
    keys, values = random(22, 2, 2, 2, 12, HEAD_DIM)
    lengths = [12, 7]
    last = np.array(lengths)[:, None] - 1
    got = run(form, q, keys, values, 0, last, window=4, ahead=4)
    for row, length in enumerate(lengths):
        for t in range(length):
            near = slice(max(0, t - 3), min(length, t + 4))
            for head in range(2):
                weights = np.exp(SCALE * keys[row, head, near] @ q[row, t, head])
                wanted = weights @ values[row, head, near] / weights.sum()
                assert_allclose(got[row, t, head], wanted, atol=2e-6)


@FORMS
def test_what_sees_nothing_is_zero(form: Callable[..., Array]) -> None:
    """A token of the padding, with the text out of its window: it must not spoil the others."""
    q = random(27, 1, 12, 2, HEAD_DIM)
    keys, values = random(28, 2, 1, 2, 12, HEAD_DIM)
    got = run(form, q, keys, values, 0, np.array([[6]]), window=4, ahead=4)
    assert_allclose(got[0, 10:], 0)
    assert np.abs(got[0, :10]).min() > 0


@FORMS
def test_values_of_another_width(form: Callable[..., Array]) -> None:
    q = random(23, 1, 3, 4, HEAD_DIM)
    keys, values = random(24, 1, 1, 40, HEAD_DIM), random(25, 1, 1, 40, 3)
    got = run(form, q, keys, values, 20)
    assert got.shape == (1, 3, 4, 3)
    wide = np.concatenate([values, random(26, 1, 1, 40, HEAD_DIM - 3)], axis=-1)
    assert_allclose(got, run(form, q, keys, wide, 20)[..., :3], atol=2e-6)
