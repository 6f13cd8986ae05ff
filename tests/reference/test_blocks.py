"""Blocks that no golden file exercises, against values worked out by hand."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.testing import assert_allclose

from .numpy_blocks import (
    Floats,
    attention,
    gelu_erf,
    gelu_quick,
    gelu_tanh,
    mask,
    relu,
    relu_squared,
    sigmoid,
    silu,
    swiglu_clamped,
    tanh,
)
from .numpy_positions import (
    alibi_slopes_ceil,
    alibi_slopes_floor,
    rope,
    rope_frequencies,
    sinusoids_fairseq,
    sinusoids_marian,
    yarn_attention_factor,
    yarn_frequencies,
)
from .numpy_sampling import min_p, probabilities, top_k, top_p


@pytest.mark.parametrize(
    ("activation", "at_one", "at_minus_two"),
    [
        (gelu_erf, 0.8413447461, -0.0455002639),
        (gelu_tanh, 0.8411919906, -0.0454023059),
        (gelu_quick, 0.8457957659, -0.0643413769),
        (silu, 0.7310585786, -0.2384058440),
        (sigmoid, 0.7310585786, 0.1192029220),
        (tanh, 0.7615941560, -0.9640275801),
        (relu, 1.0, 0.0),
        (relu_squared, 1.0, 0.0),
    ],
)
def test_activation(
    activation: Callable[[Floats], Floats], at_one: float, at_minus_two: float
) -> None:
    assert_allclose(activation(np.array([1.0, -2.0])), [at_one, at_minus_two], atol=1e-9)
    assert abs(activation(np.array([-1e4])).item()) <= 1  # and no warning, which is an error here


def test_relu_squared_grows() -> None:
    assert relu_squared(np.array([3.0])).item() == 9.0


def test_clamped_gate() -> None:
    gate, up = np.array([10.0, -10.0, 1.0]), np.array([-9.0, 9.0, 0.5])
    cut = [-6 * 7 / (1 + math.exp(-11.914)), 8 * -10 / (1 + math.exp(17.02)), 1.5 * 0.8457957659]
    assert_allclose(swiglu_clamped(gate, up), cut, atol=1e-9)


def test_mask_of_the_last_queries() -> None:
    expected = [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert np.array_equal(mask(2, 4, window=2), np.array(expected, np.bool))
    assert np.array_equal(mask(2, 2, causal=False), np.ones((2, 2), np.bool))


def test_attention_shares_keys_and_scales() -> None:
    """Two keys with scores 0 and ln 3 are mixed 1 to 3; heads 0 and 1 read the first kv head."""
    q = np.array([math.log(3), 0.0, math.log(3)]).repeat([1, 1, 2]).reshape(1, 4, 1)
    k = np.array([[[0.0], [0.0]], [[1.0], [1.0]]])
    v = np.array([[[0.0], [10.0]], [[1.0], [20.0]]])
    out = attention(q, k, v, scale=1.0, causal=True)
    assert_allclose(out[0, :, 0], [0.75, 0.5, 17.5, 17.5])
    assert_allclose(attention(q, k, v, scale=0.0)[0, :, 0], [0.5, 0.5, 15, 15])


def test_alibi_lowers_the_score_by_distance() -> None:
    out = attention(np.zeros((1, 1, 1)), np.zeros((3, 1, 1)), np.eye(3)[:, None], slopes=[1.0])
    weights = np.exp([-2.0, -1.0, 0.0])
    assert_allclose(out[0, 0], weights / weights.sum())


def test_alibi_slopes() -> None:
    assert_allclose(np.log2(alibi_slopes_floor(8)), [-1, -2, -3, -4, -5, -6, -7, -8])
    assert_allclose(np.log2(alibi_slopes_floor(6)), [-2, -4, -6, -8, -1, -3])
    assert_allclose(np.log2(alibi_slopes_ceil(3, bias_max=4)), [-2, -4, -1])


def test_both_alibi_rules_are_one() -> None:
    for heads in range(1, 130):
        assert_allclose(alibi_slopes_floor(heads), alibi_slopes_ceil(heads), rtol=1e-12)


def test_rope_pairs_differ_by_a_permutation() -> None:
    x = np.random.default_rng(0).normal(size=(5, 2, 10))
    order = [0, 4, 1, 5, 2, 6, 3, 7, 8, 9]  # of the first eight, halves as neighbours
    adjacent = rope(x[..., order], np.arange(5), rotary_dim=8, pairs="adjacent")
    assert_allclose(adjacent, rope(x, np.arange(5), rotary_dim=8)[..., order])
    assert_allclose(rope(np.array([[[1.0, 0.0]]]), [2])[0, 0], [math.cos(2), math.sin(2)])


def test_yarn_blends_between_its_two_bounds() -> None:
    plain = rope_frequencies(64)
    ratio = yarn_frequencies(64, 1e4, factor=8.0, original_context=4096) / plain
    # 32 and 1 turns in 4096 positions fall on pairs 10.46 and 22.51.
    assert_allclose(ratio[:11], 1)
    assert_allclose(ratio[23:], 1 / 8)
    assert_allclose(ratio[15], 1 - 7 / 8 * 5 / 13)
    exact = yarn_frequencies(64, 1e4, factor=8.0, original_context=4096, truncate=False) / plain
    assert_allclose(exact[15], 1 - 7 / 8 * (15 - 10.4619) / (22.5138 - 10.4619), atol=1e-3)
    assert_allclose([yarn_attention_factor(1.0), yarn_attention_factor(math.e)], [1, 1.1])


def test_sinusoids() -> None:
    """At position 1 the first frequency is 1; the last is 1/10000 for fairseq, not for Marian."""
    fairseq, marian = sinusoids_fairseq([0, 1], 8), sinusoids_marian([0, 1], 8)
    assert_allclose(fairseq[0], [0] * 4 + [1] * 4)
    assert_allclose(np.arcsin(fairseq[1, :4]), 10.0 ** (-4 / 3 * np.arange(4)))
    assert_allclose(np.arcsin(marian[1, :4]), [1, 0.1, 0.01, 0.001])
    assert_allclose(marian[1, 4:], np.cos([1, 0.1, 0.01, 0.001]))


def test_samplers_keep_what_they_should() -> None:
    p = np.array([0.1, 0.4, 0.2, 0.3])
    assert_allclose(top_k(p, 2), [0, 4 / 7, 0, 3 / 7])
    assert_allclose(top_p(p, 0.65), [0, 4 / 7, 0, 3 / 7])
    assert_allclose(top_p(p, 0.75), [0, 4 / 9, 2 / 9, 3 / 9])
    assert_allclose(top_p(p, 0.0001), [0, 1, 0, 0])
    assert_allclose(top_p(p, 1.0), p)
    assert_allclose(min_p(p, 0.6), [0, 4 / 7, 0, 3 / 7])
    assert_allclose(top_k(np.full(4, 0.25), 1), [1, 0, 0, 0])


def test_temperature() -> None:
    logits = np.log([0.1, 0.4, 0.2, 0.3])
    assert_allclose(probabilities(logits), [0.1, 0.4, 0.2, 0.3])
    assert_allclose(probabilities(logits, 0.5), np.array([1, 16, 4, 9]) / 30)
    assert_allclose(probabilities(logits, 0), [0, 1, 0, 0])
