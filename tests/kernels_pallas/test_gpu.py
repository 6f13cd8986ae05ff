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

from jinfer.ops.attention import _route, attend_reference, extend
from jinfer.ops.cache import CacheShape, LayerCache, empty
from jinfer.ops.score_rules import ScoreRules
from jinfer.quant.format import QuantFormat
from jinfer.quant.kind import parse_kind
from kernels_pallas.experts import expert_matmul
from kernels_pallas.matmul import matmul
from tests.kernels_pallas.helpers import KINDS, WIDTHS, assert_near, random_matrix, random_rows
from tests.kernels_pallas.test_attention import check as check_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no GPU"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]
run = functools.partial(jax.jit, static_argnames=("backend", "gated"))(matmul)
run_experts = functools.partial(jax.jit, static_argnames=("backend", "gated"))(expert_matmul)
check = functools.partial(check_attention, interpret=False)
LONG: dict[str, Any] = {"length": 3000, "ends": (3000, 17, 1234)}
FORMATS = [QuantFormat(w, b, s) for w, b, s in product(WIDTHS, (32, 64, 128), (False, True))]


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_every_format_and_number_of_rows(format: QuantFormat) -> None:
    matrix, values = random_matrix(format, (2, 1000, 3000))
    for rows in (1, 5, 17, 64, 300):
        x = random_rows(rows, 3000)
        (y,) = run(jnp.asarray(x), [matrix], index=jnp.asarray([1], jnp.int32))
        assert_near(y, x, values[1])


@pytest.mark.parametrize("width", WIDTHS)
def test_mosaic(width: str) -> None:
    matrix, values = random_matrix(QuantFormat(width), (2, 1000, 3000))  # type: ignore[arg-type]
    for rows in (1, 17, 64):
        x = random_rows(rows, 3000)
        index = jnp.asarray([1], jnp.int32)
        (y,) = run(jnp.asarray(x), [matrix], index=index, backend="mosaic")
        assert_near(y, x, values[1])


@pytest.mark.parametrize("outputs", [(20, 70, 300), (4096, 1024, 1024)])
def test_several(outputs: tuple[int, ...]) -> None:
    formats = QuantFormat("4"), QuantFormat("8", symmetric=True), QuantFormat("3.5")
    built = [random_matrix(f, (n, 4096), n) for f, n in zip(formats, outputs, strict=True)]
    x = random_rows(3, 4096)
    for y, (_, values) in zip(run(jnp.asarray(x), [m for m, _ in built]), built, strict=True):
        assert_near(y, x, values)


@pytest.mark.parametrize("outputs", [200, 20000])
def test_gate_and_up(outputs: int) -> None:
    gate, g = random_matrix(QuantFormat("4"), (outputs, 1024), 1)
    up, u = random_matrix(QuantFormat("4"), (outputs, 1024), 2)
    x = random_rows(2, 1024) / 1e4
    (y,) = run(jnp.asarray(x), [gate, up], gated=True)
    a, b = x @ g.T, x @ u.T
    np.testing.assert_allclose(np.asarray(y), a / (1 + np.exp(-a)) * b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("tokens", [1, 40, 600])
def test_experts(tokens: int) -> None:
    matrix, values = random_matrix(QuantFormat("4"), (8, 500, 1024))
    x = random_rows(tokens, 1024)
    experts = np.random.default_rng(2).integers(-1, 8, tokens * 2).astype(np.int32)
    (y,) = run_experts(jnp.asarray(x), jnp.asarray(experts), [matrix])
    for row, expert in enumerate(experts):
        chosen = values[expert] if expert >= 0 else np.zeros((500, 1024))
        assert_near(y[row : row + 1], x[row // 2 : row // 2 + 1], chosen)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [64, 80, 128, 192])
@pytest.mark.parametrize("tokens", [1, 5])
def test_attention(kind: str, dim: int, tokens: int) -> None:
    shape = {"dims": (dim, dim), "tokens": tokens, "heads": (14, 2), **LONG}
    check((kind, kind), **shape)
    everything: dict[str, Any] = {"window": 500, "softcap": 30.0, "alibi": True, "sinks": True}
    check((kind, kind), **shape, **everything, tree=True)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_of_a_prompt(kind: str) -> None:
    check((kind, kind), dims=(128, 128), tokens=300, heads=(4, 1), length=900, ends=(900, 300))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "f32"])
def test_latent_attention(kind: str) -> None:
    check((kind, None), dims=(576, 576), tokens=2, heads=(128, 1), **LONG)


@pytest.mark.parametrize("kinds", [("f16", "q8"), ("q3.5", "bf16"), ("q2", "q6")])
def test_attention_over_other_values(kinds: tuple[str, str]) -> None:
    check(kinds, dims=(192, 128), tokens=3, heads=(12, 3), **LONG)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_in_jinfer(kind: str) -> None:
    """New tokens written by XLA are what the kernel reads."""
    rng = np.random.default_rng(0)
    shape = CacheShape(2, 64, 64)
    cache = empty({"a": shape}, 3, 500, 0, parse_kind(kind))["a"]
    q, k, v = (
        jnp.asarray(rng.standard_normal((2, 400, heads, 64)), jnp.float32) for heads in (8, 2, 2)
    )
    at = jnp.broadcast_to(jnp.arange(400, dtype=jnp.int32), (2, 400))
    slot, rules = jnp.int32(1), ScoreRules(0.125)
    assert _route(q, cache.keys, cache.values, rules) == "gpu"

    @jax.jit
    def step(q: Array, k: Array, v: Array, cache: LayerCache) -> tuple[Array, LayerCache]:
        return extend(q, k, v, cache, at, slot, rules)

    got, cache = step(q, k, v, cache)
    with jax.default_matmul_precision("highest"):
        wanted = attend_reference(q, cache.keys, cache.values, at, at, slot, rules)
    np.testing.assert_allclose(got, wanted, atol=2e-2 if kind == "bf16" else 5e-3)
