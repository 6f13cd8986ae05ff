"""Every rule by which experts are chosen and weighed, against NumPy."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from jinfer.modelspec.feed_forward_blocks import MoESpec
from jinfer.nn.feed_forward import Router
from jinfer.ops.moe import route
from tests.arrays import on_device
from tests.reference import numpy_moe
from tests.reference.numpy_blocks import Floats, sigmoid, softmax
from tests.reference.numpy_moe import Routed

EXPERTS, ROWS = 12, 50
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(ROWS, EXPERTS)) * 2
CORRECTION = RNG.normal(size=EXPERTS)


def block(**changes: Any) -> MoESpec:
    made = {"experts": EXPERTS, "top_k": 3, "inputs": 4, "width": 5} | changes
    made_up = MoESpec(kind="moe", **made)
    assert made_up.check() is None
    return made_up


def check(rule: Callable[[Floats], Routed], correction: Any = None, **changes: Any) -> None:
    """Routing agrees with `rule` on each row."""
    bias = None if correction is None else on_device(correction, jnp.float32)
    chosen, weights = route(on_device(LOGITS, jnp.float32), bias, block(**changes))
    assert (chosen.dtype, weights.dtype) == (jnp.int32, jnp.float32)
    for row, experts, shares in zip(LOGITS, np.asarray(chosen), np.asarray(weights), strict=True):
        wanted = rule(row)
        assert experts.tolist() == list(wanted)
        assert_allclose(shares, list(wanted.values()), rtol=1e-5)


def test_softmax_then_top_k() -> None:
    check(lambda row: numpy_moe.softmax_then_top_k(row, 3))


def test_renormalized() -> None:
    check(lambda row: numpy_moe.softmax_then_top_k(row, 3, renormalize=True), renormalize=True)


def test_top_k_then_softmax_is_renormalized_softmax() -> None:
    check(lambda row: numpy_moe.top_k_then_softmax(row, 3), renormalize=True)


def test_every_expert() -> None:
    check(lambda row: numpy_moe.softmax_then_top_k(row, EXPERTS), top_k=EXPERTS)


def test_scaled() -> None:
    shares = numpy_moe.softmax_then_top_k
    check(lambda row: {e: 2.5 * s for e, s in shares(row, 3).items()}, scale=2.5)


def test_sigmoid() -> None:
    def rule(row: Floats) -> Routed:
        return {e: sigmoid(row)[e] for e in numpy_moe.best(row, 3)}

    check(rule, scoring="sigmoid")


@pytest.mark.parametrize("top_k_groups", [1, 2, 3])
def test_groups_are_ranked_by_their_best_expert(top_k_groups: int) -> None:
    """DeepSeek-V2's group-limited choice."""

    def rule(row: Floats) -> Routed:
        shares = softmax(row)
        left = numpy_moe.grouped(shares, 4, top_k_groups, np.max)
        return {e: shares[e] for e in numpy_moe.best(left, 3)}

    check(rule, groups=4, top_k_groups=top_k_groups)


def test_correction_groups_and_scale_together() -> None:
    """DeepSeek-V3's choice, by groups' two best."""
    check(
        lambda row: numpy_moe.deepseek_v3(row, CORRECTION, 4, groups=3, kept=2, scale=2.5),
        CORRECTION,
        scoring="sigmoid",
        renormalize=True,
        scale=2.5,
        top_k=4,
        correction_bias=True,
        groups=3,
        top_k_groups=2,
        group_score="top_2",
    )


def test_masked_expert_is_not_chosen_over_a_negative_score() -> None:
    logits, correction = jnp.zeros((1, EXPERTS), jnp.float32), np.full(EXPERTS, -9.0)
    correction[:4] = -1.0, -8.0, -8.0, -8.0
    made = block(scoring="sigmoid", correction_bias=True, groups=3, top_k=4)
    chosen, _ = route(logits, on_device(correction, jnp.float32), made)
    assert sorted(chosen[0].tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("jitter_eps", [0.01, 0.2])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_sparsemixer(jitter_eps: float, top_k: int) -> None:
    check(
        lambda row: numpy_moe.sparsemixer(row, top_k, jitter_eps),
        scoring="sparsemixer",
        top_k=top_k,
        jitter_eps=jitter_eps,
    )


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sparsemixer"])
def test_ties_choose_the_lower_index(scoring: str) -> None:
    zeros = jnp.zeros((2, EXPERTS), jnp.float32)
    chosen, weights = route(zeros, None, block(scoring=scoring, renormalize=True))
    assert chosen.tolist() == [[0, 1, 2]] * 2
    if scoring != "sparsemixer":
        assert_allclose(weights, 1 / 3, rtol=1e-6)


def test_scores_that_are_all_zero() -> None:
    """Sigmoids that underflow leave weights of 0, not of nothing by nothing."""
    far = jnp.full((1, EXPERTS), -1000.0, jnp.float32)
    _, weights = route(far, None, block(scoring="sigmoid", renormalize=True))
    assert weights.tolist() == [[0.0] * 3]


def test_router_in_float32() -> None:
    """Logits of bfloat16 rows are not rounded to bfloat16, or near ties would be ties."""
    router = Router(block(router_bias=True, renormalize=True))
    weight, bias = RNG.normal(size=(EXPERTS, 4)), RNG.normal(size=EXPERTS)
    router.weight.set_value(on_device(weight, jnp.float32))
    assert router.bias is not None
    router.bias.set_value(on_device(bias, jnp.float32))
    x = on_device(RNG.normal(size=(ROWS, 4)), jnp.bfloat16)
    chosen, weights = router(x)
    logits = np.asarray(x, np.float64) @ weight.T + bias
    for row, experts, shares in zip(logits, np.asarray(chosen), np.asarray(weights), strict=True):
        wanted = numpy_moe.top_k_then_softmax(row, 3)
        assert experts.tolist() == list(wanted)
        assert_allclose(shares, list(wanted.values()), rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"gated": False, "activation": "clamped_swiglu"}, "activation"),
        ({"activation": "clamped_silu", "alpha": 1.0}, "alpha"),
        ({"limit": 6.0}, "limit"),
        ({"activation": "gelu", "alpha": 1.0}, "alpha"),
        ({"groups": 5}, "groups"),
        ({"groups": 2, "top_k_groups": 3}, "top_k_groups"),
        ({"top_k": 13}, "top_k"),
        ({"groups": 6, "top_k_groups": 1}, "top_k"),
        ({"groups": 12, "top_k_groups": 12, "group_score": "top_2"}, "group_score"),
        ({"scoring": "sparsemixer", "correction_bias": True}, "scoring"),
        ({"scoring": "sparsemixer", "groups": 2, "top_k_groups": 2}, "scoring"),
    ],
)
def test_invalid_fields_are_errors(changes: dict[str, Any], field: str) -> None:
    made = {"experts": EXPERTS, "top_k": 3, "inputs": 4, "width": 5} | changes
    wrong = MoESpec(kind="moe", **made).check()
    assert wrong is not None
    assert wrong[0] == field
