"""The custom calls of a mixture's routing, bit for bit as NumPy computes in float32."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfer.cpu import build_library, rowwise
from jinfer.cpu import matmul_call as moe_call
from tests.arrays import on_device
from tests.cpu.helpers import isas

pytestmark = pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("count", "top_k"), [(1, 1), (8, 2), (60, 4), (128, 8), (5, 5)])
def test_routes(count: int, top_k: int, scoring: str, corrected: bool, renormalize: bool) -> None:
    """Some logits are equal: the first is taken."""
    logits = on_device(np.round(random(300, count, seed=count), 1)).at[7].set(-200)
    correction = random(count, seed=1) if corrected else None
    for isa in isas():
        with build_library.lowered_isa(isa):
            chosen, weights = moe_call.route(
                logits,
                None if correction is None else on_device(correction),
                top_k,
                softmax=scoring == "softmax",
                renormalize=renormalize,
                scale=2.5,
            )
            softmax = scoring == "softmax"
            scored = rowwise.softmax(logits) if softmax else rowwise.activate(logits, scoring)
            scores = np.asarray(scored)
            np.asarray(weights)
        ranked = scores if correction is None else scores + correction
        expected = np.argsort(-ranked, axis=1, kind="stable")[:, :top_k]
        shares = np.take_along_axis(scores, expected, axis=1)
        if renormalize:
            total = reduce(add, (shares[:, k : k + 1] for k in range(top_k)))
            shares = shares / np.maximum(total, np.float32(1e-20))
        np.testing.assert_array_equal(chosen, expected)
        np.testing.assert_array_equal(weights, shares * np.float32(2.5))


def test_nan_scores_still_choose_top_k_experts() -> None:
    """Each once, so that there are as many pairs as memory is for; the weights tell."""
    logits = random(3, 9)
    logits[1] = np.nan
    rules: dict[str, Any] = {"softmax": True, "renormalize": True, "scale": 1.0}
    chosen, weights = moe_call.route(on_device(logits), None, 4, **rules)
    for row in np.asarray(chosen).tolist():
        assert len(set(row)) == 4
        assert set(row) <= set(range(9))
    assert np.isnan(weights[1]).all()
    assert np.isfinite(np.asarray(weights)[[0, 2]]).all()


@settings(max_examples=40)
@given(of=st.integers(1, 70), count=st.integers(1, 40), seed=st.integers(0, 99), data=st.data())
def test_pairs_are_sorted_by_expert(of: int, count: int, seed: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, count))
    rng = np.random.default_rng(seed)
    chosen = np.stack([rng.permutation(count)[:top_k] for _ in range(of)]).astype(np.int32)
    order = np.argsort(chosen.reshape(-1), stable=True)
    got = moe_call.sort_by_expert(on_device(chosen), count)
    np.testing.assert_array_equal(got.row_of, order // top_k)
    np.testing.assert_array_equal(got.expert_of, chosen.reshape(-1)[order])
    sizes = np.bincount(chosen.reshape(-1), minlength=count)
    np.testing.assert_array_equal(got.offsets, [0, *np.cumsum(sizes)])
    np.testing.assert_array_equal(got.place_of, np.argsort(order))


@pytest.mark.parametrize(
    ("count", "top_k", "size"), [(1, 1, 1), (1, 6, 100), (33, 2, 64), (5, 8, 777)]
)
def test_weighted_sums_of_experts(count: int, top_k: int, size: int) -> None:
    y, weights = random(count * top_k, size), random(count, top_k, seed=1)
    places = np.random.default_rng(2).permutation(count * top_k).astype(np.int32)
    each = y[places].reshape(count, top_k, -1)
    expected = reduce(add, (each[:, k] * weights[:, k : k + 1] for k in range(top_k)))
    for isa in isas():
        with build_library.lowered_isa(isa):
            got = moe_call.combine_experts(on_device(y), on_device(places), on_device(weights))
            np.testing.assert_array_equal(np.asarray(got), expected)


LOGITS = jnp.zeros((2, 4))
REFUSED = {
    "more than there are": ("do not fit", lambda: routed(5)),
    "a correction of another size": ("does not fit", lambda: routed(2, jnp.zeros(3))),
    "no such expert": ("no such expert", lambda: moe_call.sort_by_expert(jnp.full((1, 1), 4), 4)),
    "an expert below": ("no such expert", lambda: moe_call.sort_by_expert(jnp.full((1, 1), -1), 4)),
    "a place beyond": ("no such place", lambda: summed(on_device([0, 2], jnp.int32))),
    "a place too few": ("do not fit", lambda: summed(on_device([0], jnp.int32))),
}


def routed(top_k: int, correction: Any = None) -> Any:
    rules: dict[str, Any] = {"softmax": True, "renormalize": True, "scale": 1.0}
    return moe_call.route(LOGITS, correction, top_k, **rules)


def summed(places: jax.Array) -> jax.Array:
    return moe_call.combine_experts(jnp.zeros((2, 3)), places, jnp.zeros((2, 1)))


@pytest.mark.parametrize("name", REFUSED)
def test_mismatched_operands_are_errors(name: str) -> None:
    what, refused = REFUSED[name]
    with pytest.raises(Exception, match=what):
        jax.block_until_ready(refused())
