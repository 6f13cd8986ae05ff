"""Batch invariance of products: a row has the same bits alone and in any batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array

from jinfer.cpu import build_library
from jinfer.cpu.matmul_call import Mode
from jinfer.ops.matmul.matmul import gated_linear, linear, linears
from jinfer.ops.moe import ExpertProjection, ExpertWeights, mixture_of_experts
from jinfer.quant.sparse_matrix import OutlierTensor, to_sparse
from jinfer.quant_format import QuantFormat, Width
from tests.arrays import on_device
from tests.cpu.helpers import isas
from tests.cpu.test_quantized_matmul import CODEBOOK, TWO_LEVEL, WIDTHS, matrix

pytestmark = [
    pytest.mark.skipif(not build_library.available(), reason="no C++ compiler"),
    pytest.mark.usefixtures("optimized"),
]

FORMATS = [
    *(QuantFormat(width) for width in WIDTHS),
    *(QuantFormat(width, symmetric=True) for width in WIDTHS),
    *(QuantFormat("4", block) for block in (64, 128)),
    *(QuantFormat("3.5", block, True) for block in (64, 128)),
    *(QuantFormat(width, block, symmetric, True) for width, block, symmetric in TWO_LEVEL),
    QuantFormat("4", 32, True, False, CODEBOOK),
    QuantFormat("4", 32, True, True, CODEBOOK),
]
MANY = (200, 257, 600)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bits(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def check(function: Callable[[Any], Array], x: np.ndarray, counts: list[int], seed: int) -> None:
    """Some rows of random parts of x give what each gives alone."""
    rng, run = np.random.default_rng(seed), jax.jit(function)
    for isa in isas():
        with build_library.lowered_isa(isa):
            alone = np.concatenate([bits(run(row[None])) for row in x[: max(min(counts), 12)]])
            for count in counts:
                places = rng.permutation(count)[: len(alone)]
                mixed = random(count, x.shape[1], seed=seed + count)
                mixed[places] = x[: len(places)]
                got = bits(run(mixed))[places]
                np.testing.assert_array_equal(got, alone[: len(places)], f"{count} rows, {isa}")


counts_of_rows = st.tuples(
    st.lists(st.integers(2, 16), min_size=2, max_size=3),
    st.integers(17, 70),
    st.sampled_from(MANY),
).map(lambda drawn: [*drawn[0], drawn[1], drawn[2]])


@settings(max_examples=10)
@given(
    format=st.sampled_from(FORMATS),
    mode=st.sampled_from(("int8", "int16", "float")),
    gated=st.sampled_from(["none", "silu", "gelu_tanh"]),
    outputs=st.integers(1, 90),
    inputs=st.integers(1, 1200),
    counts=counts_of_rows,
)
def test_quantized_products_are_batch_invariant(
    format: QuantFormat,
    mode: Mode,
    gated: str,
    outputs: int,
    inputs: int,
    counts: list[int],
) -> None:
    weights = [matrix(format, outputs, inputs, seed=seed) for seed in (1, 2)]
    weights = [replace(weight, activations=mode) for weight in weights]

    def function(x: Any) -> Array:
        if gated == "none":
            return jnp.concatenate(linears(x, weights, [None, None]), axis=-1)
        y = gated_linear(x, weights[0], weights[1], gated)
        assert y is not None
        return y

    check(function, random(600, inputs) / 8, counts, seed=inputs)


@settings(max_examples=8)
@given(
    type=st.sampled_from(("float32", "bfloat16", "float16")),
    of=st.sampled_from(("float32", "bfloat16")),
    gated=st.booleans(),
    outputs=st.one_of(st.integers(1, 40), st.integers(60, 200)),
    inputs=st.integers(1, 900),
    counts=counts_of_rows,
)
def test_plain_products_are_batch_invariant(
    type: str, of: str, gated: bool, outputs: int, inputs: int, counts: list[int]
) -> None:
    one, two = (on_device(random(outputs, inputs, seed=seed), type) for seed in (1, 2))

    def function(x: Any) -> Array:
        x = x.astype(of)
        y = gated_linear(x, one, two, "silu") if gated else linear(x, one)
        assert y is not None
        return y.astype(jnp.float32)

    check(function, random(600, inputs), counts, seed=inputs)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_every_format_is_batch_invariant(format: QuantFormat) -> None:
    """Few rows go straight from memory where more are multiplied with panels."""
    weight = matrix(format, 43, 776)
    check(partial(linear, weight=weight), random(600, 776), [*range(2, 13), 17, 200], seed=4)


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param([*range(1, 20), *range(25, 71, 9), 200], id="some"),
        pytest.param([*range(1, 71), *MANY], marks=pytest.mark.soak, id="all"),
    ],
)
def test_every_number_of_rows_is_batch_invariant(counts: list[int]) -> None:
    """From 1 to 70, where kernels for few and for many rows meet."""
    plain = on_device(random(150, 300), jnp.bfloat16)
    for format in (QuantFormat("4", symmetric=True), QuantFormat("5", 32, two_level=True)):
        weight = matrix(format, 70, 2048)
        check(partial(linear, weight=weight), random(600, 2048), counts, seed=3)
    check(partial(linear, weight=plain), random(600, 300), counts, seed=3)


@pytest.mark.parametrize("width", ["4", "8"])
def test_outlier_tensors_are_batch_invariant(width: Width) -> None:
    inputs, outputs = 576, 130
    rounded = matrix(QuantFormat(width, symmetric=True), outputs, inputs)
    where = np.random.default_rng(5).random((outputs, inputs)) < 0.01
    sparse = to_sparse(random(outputs, inputs, seed=6), where, int(where.sum()) + 3)
    weight = jax.tree.map(on_device, OutlierTensor(rounded, sparse))
    check(lambda x: linear(x, weight), random(600, inputs), [2, 3, 8, 9, 64, 600], seed=7)


@pytest.mark.parametrize(
    ("type", "fused"),
    [
        *(("float32", "none"), ("bfloat16", "silu"), ("q4", "silu"), ("q8", "none")),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in (("float32", "silu"), ("bfloat16", "none"), ("q4", "none"), ("q8", "silu"))
        ),
    ],
)
def test_mixture_of_experts_is_batch_invariant(type: str, fused: str) -> None:
    """Which experts other rows go to does not matter either."""
    count, hidden, width, top_k = 5, 96, 160, 3

    def projection(outputs: int, inputs: int, seed: int) -> ExpertProjection:
        if type in ("q4", "q8"):
            format = QuantFormat("4" if type == "q4" else "8", symmetric=True)
            weight: Any = matrix(format, outputs, inputs, stack=(count,), seed=seed)
        else:
            weight = on_device(random(count, outputs, inputs, seed=seed), type)
        bias = None if fused == "silu" else on_device(random(count, outputs, seed=seed + 9))
        return ExpertProjection(jax.tree.map(on_device, weight), bias)

    def silu_gated(gate: Array | None, up: Array) -> Array:
        assert gate is not None
        return jax.nn.silu(gate) * up

    gate, up = projection(width, hidden, 1), projection(width, hidden, 2)
    experts = ExpertWeights(gate, up, projection(hidden, width, 3), silu_gated, fused)

    def function(x: Any) -> Array:
        # Rows say themselves where they go, so that each takes its choice along.
        order = jnp.argsort(x[:, :count], axis=1).astype(jnp.int32)
        share = jax.nn.sigmoid(x[:, count : count + top_k])
        return mixture_of_experts(x / 16, order[:, :top_k], share, experts)

    check(function, random(600, hidden), [2, 3, 8, 40, 150, 600], seed=8)
