"""Rows through their experts: loop, calls, kernels, the plain reference and NumPy agree."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array
from numpy.testing import assert_allclose

from jinfer.ops import moe
from jinfer.ops.backend import target_platform
from jinfer.ops.matmul.lora import Stacks, sorted_by_slot
from jinfer.ops.moe import (
    ExpertProjection,
    ExpertWeights,
    _feed_forward,
    mixture_of_experts,
)
from jinfer.quant.quantize_matrix import quantize
from jinfer.quant_format import FLOAT_DTYPES, parse_format
from tests.arrays import on_device
from tests.reference import numpy_moe
from tests.reference.numpy_blocks import Floats, linear, relu, silu

HIDDEN, WIDTH = 6, 5


def mixture_of_experts_reference(
    x: Array, chosen: Array, weights: Array, experts: ExpertWeights
) -> Array:
    """`mixture_of_experts` with every expert applied to every row."""
    numbers, every = jnp.arange(experts.up.weight.shape[0]), jnp.ones(len(x), bool)
    each = jax.lax.map(lambda expert: _feed_forward(x, experts, expert, every), numbers)
    is_chosen = chosen[:, :, None] == numbers[None, None]
    share = jnp.sum(jnp.where(is_chosen, weights[:, :, None], 0.0), axis=1)
    exact = jax.lax.Precision.HIGHEST
    total = jnp.einsum("re,erh->rh", share, each.astype(jnp.float32), precision=exact)
    return total.astype(x.dtype)


BOTH = pytest.mark.parametrize("function", [mixture_of_experts_reference, mixture_of_experts])


def silu_gated(gate: Array | None, up: Array) -> Array:
    assert gate is not None
    return jax.nn.silu(gate) * up


def plain(gate: Array | None, up: Array) -> Array:
    assert gate is None
    return jax.nn.relu(up)


def made_up(count: int, gated: bool, biased: bool) -> ExpertWeights:
    rng = np.random.default_rng(count)

    def projection(outputs: int, inputs: int) -> ExpertProjection:
        weight, bias = rng.normal(size=(count, outputs, inputs)), rng.normal(size=(count, outputs))
        return ExpertProjection(
            on_device(weight, jnp.float32), on_device(bias, jnp.float32) if biased else None
        )

    gate = projection(WIDTH, HIDDEN) if gated else None
    activation = silu_gated if gated else plain
    return ExpertWeights(gate, projection(WIDTH, HIDDEN), projection(HIDDEN, WIDTH), activation)


def numpy_mixture(
    x: Array, chosen: np.ndarray, weights: np.ndarray, experts: ExpertWeights
) -> Floats:
    def project(projection: ExpertProjection, e: int, row: Floats) -> Floats:
        weight, bias, _ = projection
        return linear(row, np.asarray(weight[e]), None if bias is None else bias[e])

    def expert(e: int, row: Floats) -> Floats:
        up = project(experts.up, e, row)
        if experts.gate is None:
            return project(experts.down, e, relu(up))
        return project(experts.down, e, silu(project(experts.gate, e, row)) * up)

    routed = [dict(zip(c, w, strict=True)) for c, w in zip(chosen, weights, strict=True)]
    return numpy_moe.mixture(np.asarray(x, np.float64), routed, expert)


@partial(jax.jit, static_argnames=("function", "activation"))
def run(function: Any, x: Array, chosen: Array, weights: Array, parts: Any, activation: Any) -> Any:
    gate, up, down = parts
    return function(x, chosen, weights, ExpertWeights(gate, up, down, activation))


# Experts, those of a row, rows, gated, biased: few, because each is a program of its own.
SHAPES = [
    *((1, 1, 1, True, False), (2, 1, 9, True, True), (2, 2, 40, False, True)),
    *((5, 1, 40, True, False), (5, 3, 2, True, True), (5, 5, 9, False, True)),
]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, bool, bool]:
    count = draw(st.sampled_from([1, 2, 5]))
    top_k, rows = draw(st.integers(1, count)), draw(st.sampled_from([1, 2, 9, 40]))
    return count, top_k, rows, *draw(st.sampled_from([(True, False), (True, True), (False, True)]))


@pytest.mark.parametrize(
    "any_shape", [st.sampled_from(SHAPES), pytest.param(shapes(), marks=pytest.mark.soak)]
)
@settings(max_examples=40)
@given(data=st.data())
def test_any_choice(any_shape: st.SearchStrategy[Any], data: st.DataObject) -> None:
    """Rows from 1 on, so that blocks have 1, 8 and 16 rows, are full, cut, or not there at all."""
    count, top_k, rows, gated, biased = data.draw(any_shape, "shape")
    favourites = data.draw(st.integers(top_k, count), "experts that are chosen at all")
    rng = np.random.default_rng(data.draw(st.integers(0, 99), "seed"))
    chosen = np.stack([rng.permutation(favourites)[:top_k] for _ in range(rows)])
    weights = rng.normal(size=(rows, top_k)).astype(np.float32)
    x = on_device(rng.normal(size=(rows, HIDDEN)), jnp.float32)
    experts = made_up(count, gated, biased)
    expected = numpy_mixture(x, chosen, weights, experts)
    for function in (mixture_of_experts_reference, mixture_of_experts):
        given = on_device(chosen, jnp.int32), on_device(weights)
        got = run(function, x, *given, experts[:3], experts.activation)
        assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("grouped", [True, False])
def test_adapters_of_experts(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row as with its adapter's terms in all weights; those without keep their bits."""
    if not grouped:
        monkeypatch.setattr(moe, "supports_grouped", lambda weight: False)
    rng, experts, (slots, rank) = np.random.default_rng(5), made_up(4, True, True), (3, 2)

    def beside(one: ExpertProjection) -> tuple[ExpertProjection, Floats]:
        count, outputs, inputs = one.weight.shape
        a = rng.normal(size=(slots, count, rank, inputs)).astype(np.float32)
        b = rng.normal(size=(slots, count, rank, outputs)).astype(np.float32)
        terms = np.einsum("sero,seri->seoi", b, a)
        return one._replace(stacks=Stacks(jnp.asarray(a), jnp.asarray(b))), terms

    assert experts.gate is not None
    plain_parts = experts.gate, experts.up, experts.down
    (gate, up, down), terms = zip(*map(beside, plain_parts), strict=True)
    own = np.array([2, 0, 1, 2, 0, 3, 1], np.int32)
    scales = rng.normal(size=len(own)).astype(np.float32)
    at = sorted_by_slot(jnp.asarray(own), jnp.asarray(scales))
    x = on_device(rng.normal(size=(len(own), HIDDEN)), jnp.float32)
    chosen = np.stack([rng.permutation(4)[:2] for _ in own])
    weights = rng.normal(size=chosen.shape).astype(np.float32)
    given = jnp.asarray(chosen, jnp.int32), jnp.asarray(weights)
    with_terms = ExpertWeights(gate, up, down, experts.activation)
    got = np.asarray(mixture_of_experts(x, *given, with_terms, at))
    plain = np.asarray(mixture_of_experts(x, *given, experts))
    for i, slot in enumerate(own):
        if not slot:
            assert got[i].tobytes() == plain[i].tobytes()
            continue
        g, u, d = (
            ExpertProjection(jnp.asarray(one.weight) + scales[i] * term[slot - 1], one.bias)
            for one, term in zip(plain_parts, terms, strict=True)
        )
        row = slice(i, i + 1)
        merged = ExpertWeights(g, u, d, experts.activation)
        expected = numpy_mixture(x[row], chosen[row], weights[row], merged)
        assert_allclose(got[row], expected, rtol=1e-4, atol=1e-3)


@BOTH
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_all_rows_choose_one_expert(function: object, rows: int) -> None:
    """300 rows are more than the largest block."""
    experts = made_up(4, True, False)
    x = on_device(np.random.default_rng(0).normal(size=(rows, HIDDEN)), jnp.float32)
    chosen = np.full((rows, 1), 2)
    expected = numpy_mixture(x, chosen, np.ones((rows, 1)), experts)
    given = on_device(chosen, jnp.int32), jnp.ones((rows, 1), jnp.float32)
    got = run(function, x, *given, experts[:3], experts.activation)
    assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@BOTH
def test_bfloat16_is_summed_in_float32(function: object) -> None:
    """A large and a small weight: the sum of the rounded parts, rounded once."""
    gate, up, down, *_ = made_up(3, True, False)
    matrices = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (gate, up, down))
    x = on_device(np.random.default_rng(1).normal(size=(12, HIDDEN)), jnp.bfloat16)
    chosen = on_device(np.tile([2, 0], (12, 1)), jnp.int32)
    assert callable(function)

    def run(*weights: float) -> Floats:
        given = on_device(np.tile(weights, (12, 1)), jnp.float32)
        got = function(
            x, chosen, given, ExpertWeights(matrices[0], matrices[1], matrices[2], silu_gated)
        )
        assert got.dtype == jnp.bfloat16
        return np.asarray(got, np.float64)

    expected = 1.0 * run(1, 0) + 0.01 * run(0, 1)
    assert_allclose(run(1, 0.01), expected, rtol=2**-8, atol=1e-6)


@pytest.fixture
def _on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The way to a GPU's kernels, which are interpreted; the loop over blocks is out of it."""
    monkeypatch.setattr(moe, "_blockwise_feed_forward", None)
    with target_platform("gpu", interpret=True):
        yield


@pytest.mark.usefixtures("_on_gpu")
@pytest.mark.parametrize(
    ("stored", "kind", "rows"),
    [
        *(("q4", "gated", 1), ("q3.5", "gated", 40), ("q8_b64_sym", "biased", 40)),
        *(("bf16", "gated", 40), ("bf16", "plain", 1), ("f32", "biased", 40)),
    ],
)
def test_all_chosen_experts_in_one_call_on_a_gpu(stored: str, kind: str, rows: int) -> None:
    check_on_gpu(stored, kind, rows)


def check_on_gpu(stored: str, kind: str, rows: int) -> None:
    """Against `mixture_of_experts_reference`, with experts rounded as they are stored."""
    gated, biased = kind != "plain", kind == "biased"
    experts = wide(stored, gated, biased)
    rng = np.random.default_rng(2)
    x = on_device(rng.normal(size=(rows, 64)), jnp.bfloat16 if stored == "bf16" else jnp.float32)
    chosen = on_device(np.stack([rng.permutation(5)[:2] for _ in range(rows)]), jnp.int32)
    weights = on_device(rng.normal(size=(rows, 2)), jnp.float32)
    got = jax.jit(partial(mixture_of_experts, experts=experts))(x, chosen, weights)
    expected = jax.jit(partial(mixture_of_experts_reference, experts=decoded(experts)))(
        x, chosen, weights
    )
    bound = {"bf16": 3e-2, "f32": 1e-4}.get(stored, 2e-2)  # codes' weights and x are fp16
    assert_allclose(np.asarray(got, np.float32), np.asarray(expected, np.float32), bound, bound)


def wide(stored: str, gated: bool, biased: bool) -> ExpertWeights:
    """Five experts of 96 x 64 in a form that kernels read."""
    rng = np.random.default_rng(4)

    def projection(outputs: int, inputs: int) -> ExpertProjection:
        values = rng.normal(size=(5, outputs, inputs)).astype(np.float32) / 8
        bias = on_device(rng.normal(size=(5, outputs)), jnp.float32) if biased else None
        if stored in FLOAT_DTYPES:
            return ExpertProjection(on_device(values, FLOAT_DTYPES[stored]), bias)
        format = parse_format(stored)
        weight = quantize(values, format, columns=32 // format.per_code)
        return ExpertProjection(jax.tree.map(on_device, weight), bias)

    gate = projection(96, 64) if gated else None
    fused = "silu" if gated and not biased else "none"
    activation = silu_gated if gated else plain
    return ExpertWeights(gate, projection(96, 64), projection(64, 96), activation, fused)


plain_of = jax.jit(lambda matrices: matrices.dequantize())


def decoded(experts: ExpertWeights) -> ExpertWeights:
    def full(one: ExpertProjection) -> ExpertProjection:
        matrices: Any = one.weight
        return one if isinstance(matrices, Array) else one._replace(weight=plain_of(matrices))

    gate = None if experts.gate is None else full(experts.gate)
    return experts._replace(gate=gate, up=full(experts.up), down=full(experts.down))
