"""The kernels on a GPU, where there is one: what interpret mode and lowering cannot show."""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jinfer.loader.weights.gguf_blocks import REPACKED_FORMATS as GGUF
from jinfer.ops.attention.kv_cache import AttentionMetadata, LayerCache
from jinfer.ops.attention.mask_rules import ScoreRules
from jinfer.ops.attention.paged_attention import _route, extend
from jinfer.quant_format import FLOAT_DTYPES, QuantFormat, Width
from jinfer.sampling.truncation import top_mass
from kernels_pallas.matmul.grouped import grouped_dense_matmul, grouped_quantized_matmul
from kernels_pallas.matmul.prologue import PrologueOperand, identity, prepare_rows
from kernels_pallas.matmul.quantized import matmul, matmul_partials
from kernels_pallas.matmul.weight_layout import PackedMatrix
from tests.arrays import on_device
from tests.kernels_pallas.attention_cases import MIXED, Case
from tests.kernels_pallas.helpers import (
    KINDS,
    WIDTHS,
    assert_near,
    random_blocks,
    random_matrix,
    random_rows,
)
from tests.ops.paged import Run, filled, placed, random, sequences, tables_of
from tests.ops.paged import expected as expected_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no GPU"),
]
run = functools.partial(jax.jit, static_argnames=("backend", "gated"))(matmul)
run_experts = functools.partial(jax.jit, static_argnames=("backend", "gated"))(
    grouped_quantized_matmul
)
LONG: dict[str, Any] = {"length": 3008, "blocks": 200}
DECODING = ((0, 2999, 1), (2, 16, 1), (1, 1233, 1))
SEVERAL = ((0, 2995, 5), (2, 12, 5), (-1, 0, 2), (1, 1229, 5))
PROMPTS = ((1, 600, 300), (0, 2999, 1), (-1, 0, 3), (2, 0, 300), (3, 100, 4))
FORMATS = [QuantFormat(w, b, s) for w, b, s in product(WIDTHS, (32, 64, 128), (False, True))]


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_every_format_and_number_of_rows(format: QuantFormat) -> None:
    matrix, values = random_matrix(format, (2, 1000, 3000))
    for rows in (1, 5, 17, 64, 300):
        x = random_rows(rows, 3000)
        (y,) = run(on_device(x), [matrix], index=on_device([1], jnp.int32))
        assert_near(y, x, values[1])


@pytest.mark.parametrize("width", WIDTHS)
def test_long_rows_are_prepared_in_superblocks(width: Width) -> None:
    matrix, values = random_matrix(QuantFormat(width), (1, 1000, 9000))

    @jax.jit
    def product_of(x: Array, matrix: PackedMatrix) -> Array:
        given, _ = prepare_rows(
            [PrologueOperand(x, "full")], identity, x.shape[0], matrix, apart=True
        )
        return jnp.sum(matmul_partials(given, [matrix])[0], axis=0)

    for rows in (1, 5, 16):
        x = random_rows(rows, 9000)
        assert_near(product_of(on_device(x), matrix), x, values[0])


@pytest.mark.parametrize("rows", [1, 16])
def test_thresholds_of_a_vocabulary(rows: int) -> None:
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, 128_256)).astype(np.float32) * 5
    weights = rng.integers(0, 8, x.shape).astype(np.float32)
    mass = np.floor(weights.sum(axis=1) * 0.3)
    kept = jax.jit(lambda *given: top_mass(*given))(*map(on_device, (x, weights, mass)))
    for row in range(rows):
        descending = np.argsort(-x[row], kind="stable")
        last = np.searchsorted(np.cumsum(weights[row, descending]), mass[row])
        assert np.array_equal(kept[row], x[row] >= x[row, descending[last]])


@pytest.mark.parametrize("name", GGUF)
def test_every_format_of_gguf(name: str) -> None:
    matrix, values = random_blocks(GGUF[name], (2, 1000, 3000))
    for rows in (1, 5, 17, 64, 300):
        x = random_rows(rows, 3000)
        (y,) = run(on_device(x), [matrix], index=on_device([1], jnp.int32))
        assert_near(y, x, values[1])


@pytest.mark.parametrize("outputs", [(20, 70, 300), (4096, 1024, 1024)])
def test_several(outputs: tuple[int, ...]) -> None:
    formats = QuantFormat("4"), QuantFormat("8", symmetric=True), QuantFormat("3.5")
    built = [random_matrix(f, (n, 4096), n) for f, n in zip(formats, outputs, strict=True)]
    x = random_rows(3, 4096)
    for y, (_, values) in zip(run(on_device(x), [m for m, _ in built]), built, strict=True):
        assert_near(y, x, values)


def test_several_of_gguf() -> None:
    sizes = {"Q4_K": 4096, "IQ4_XS": 1024, "Q6_K": 1024}
    built = [random_blocks(GGUF[name], (n, 4096), n) for name, n in sizes.items()]
    x = random_rows(3, 4096)
    for y, (_, values) in zip(run(on_device(x), [m for m, _ in built]), built, strict=True):
        assert_near(y, x, values)


@pytest.mark.parametrize("outputs", [200, 20000])
def test_gate_and_up(outputs: int) -> None:
    gate, g = random_matrix(QuantFormat("4"), (outputs, 1024), 1)
    up, u = random_matrix(QuantFormat("4"), (outputs, 1024), 2)
    x = random_rows(2, 1024) / 1e4
    (y,) = run(on_device(x), [gate, up], gated=True)
    a, b = x @ g.T, x @ u.T
    np.testing.assert_allclose(np.asarray(y), a / (1 + np.exp(-a)) * b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("rows", [2, 80, 1200])
@pytest.mark.parametrize("block", [32, 128])
def test_experts(rows: int, block: int) -> None:
    matrix, values = random_matrix(QuantFormat("4", block), (8, 504, 1024))
    x = random_rows(rows, 1024)
    experts = np.sort(np.random.default_rng(2).integers(0, 8, rows))
    offsets = np.searchsorted(experts, np.arange(9)).astype(np.int32)
    (y,) = run_experts(on_device(x), on_device(offsets), [matrix])
    for row, expert in enumerate(experts):
        assert_near(y[row : row + 1], x[row : row + 1], values[expert])


@pytest.mark.parametrize("rows", [2, 80, 1200])
@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_plain_experts(rows: int, kind: str) -> None:
    rng = np.random.default_rng(2)
    x, matrices = (
        on_device(rng.standard_normal(shape), FLOAT_DTYPES[kind])
        for shape in ((rows, 768), (8, 500, 768))
    )
    experts = np.sort(rng.integers(0, 8, rows))
    offsets = np.searchsorted(experts, np.arange(9)).astype(np.int32)
    y = jax.jit(grouped_dense_matmul)(x, on_device(offsets), matrices)
    exact = np.asarray(matrices, np.float64)
    for expert in range(8):
        mine = experts == expert
        reference = np.asarray(x, np.float64)[mine] @ exact[expert].T
        np.testing.assert_allclose(np.asarray(y)[mine], reference, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [64, 80, 128, 192])
@pytest.mark.parametrize("runs", [DECODING, SEVERAL], ids=["one", "several"])
def test_attention(kind: str, dim: int, runs: Any) -> None:
    shape: dict[str, Any] = {"dims": (dim, dim), "heads": (14, 2), **LONG}
    Case((kind, kind), runs, **shape).check(interpret=False)
    changes: dict[str, Any] = {"softcap": 30.0, "slopes": True, "sinks": True, "by_distance": -3}
    Case((kind, kind), runs, **shape, **changes, window=500).check(interpret=False)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_of_prompts_and_decoding(kind: str) -> None:
    case = Case((kind, kind), PROMPTS, dims=(128, 128), heads=(4, 1), rows=4, **LONG)
    case.check(interpret=False)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "f32"])
def test_latent_attention(kind: str) -> None:
    case = Case((kind, None), SEVERAL, dims=(576, 576), heads=(128, 1), **LONG)
    case.check(interpret=False)


@pytest.mark.parametrize("kinds", [("f16", "q8"), ("q3.5", "bf16"), ("q2", "q6")])
def test_attention_over_other_values(kinds: tuple[str, str]) -> None:
    Case(kinds, SEVERAL, dims=(192, 128), heads=(12, 3), **LONG).check(interpret=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("runs", [DECODING, MIXED, PROMPTS], ids=["one", "mixed", "prompts"])
@pytest.mark.parametrize("heads", [(4, 1), (32, 8)])
def test_results_are_batch_invariant(kind: str, runs: Any, heads: tuple[int, int]) -> None:
    """By tiles of other sizes, in programs of one split or of all."""
    case = Case((kind, kind), runs, dims=(128, 128), heads=heads, rows=4, **LONG)
    case.check_alone(interpret=False, every=37)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_in_jinfer(kind: str) -> None:
    """New tokens written by XLA are what the kernel reads."""
    runs, tables = [Run(1, 0, 400), Run(-1, 0, 3), Run(0, 499)], tables_of([500, 400])
    keys, values = ([random(s + n, n, 2, 64) for n in (500, 400)] for s in (1, 2))
    cache = filled(kind, keys, values, tables)
    q, k, v = (on_device(random(3, 404, heads, 64), jnp.float32) for heads in (8, 2, 2))
    rules = ScoreRules(0.125)
    assert _route(q, cache.keys, cache.values, rules) == "gpu"

    @jax.jit
    def step(
        q: Array, k: Array, v: Array, cache: LayerCache, at: AttentionMetadata
    ) -> tuple[Array, LayerCache]:
        return extend(q, k, v, cache, at, rules)

    got, cache = step(q, k, v, cache, placed(runs, tables))
    k64, v64 = (sequences(part, tables, [500, 400]) for part in cache)
    reference = expected_attention(np.asarray(q, np.float64), k64, v64, runs, scale=0.125)
    np.testing.assert_allclose(got, reference, atol=2e-2 if kind == "bf16" else 5e-3)
