"""The kernels on a GPU, where there is one: what interpret mode and lowering cannot show."""

from __future__ import annotations

import functools
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.quant.format import QuantFormat
from kernels_pallas.attention import attend, with_sinks
from kernels_pallas.experts import expert_matmul
from kernels_pallas.matmul import matmul
from tests.kernels_pallas.helpers import WIDTHS, assert_near, random_matrix, random_rows
from tests.kernels_pallas.test_attention import kept

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no GPU"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]
run = functools.partial(jax.jit, static_argnames=("backend", "gated"))(matmul)
run_experts = functools.partial(jax.jit, static_argnames=("backend", "gated"))(expert_matmul)
run_attend = functools.partial(jax.jit, static_argnames=("backend", "scale", "softcap"))(attend)
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


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "q8", "q4"])
@pytest.mark.parametrize("dim", [64, 128, 192])
@pytest.mark.parametrize("tokens", [1, 5])
def test_attention(kind: str, dim: int, tokens: int) -> None:
    rng = np.random.default_rng(0)
    keys, values = kept(kind, (5, 2, 3000, dim), 1), kept(kind, (5, 2, 3000, dim), 2)
    q = jnp.asarray(rng.standard_normal((3, tokens, 14, dim)), jnp.bfloat16)
    ends = np.asarray([3000, 17, 1234], np.int32)
    positions = jnp.asarray(ends[:, None] - tokens + np.arange(tokens, dtype=np.int32)[None])
    last = jnp.broadcast_to(jnp.asarray(ends)[:, None] - 1, positions.shape)
    tree = jnp.asarray(
        np.tril(rng.integers(0, 2, (3, tokens, tokens)) > 0) | np.eye(tokens, dtype=bool)
    )
    slots = jnp.asarray([4, 0, 2], jnp.int32)
    for low, softcap in ((jnp.zeros_like(last), None), (positions - 500, 30.0)):
        results = [
            run_attend(
                *(q, keys, values, slots, low, last),
                scale=dim**-0.5,
                softcap=softcap,
                tree=tree,
                backend=backend,
            )
            for backend in ("triton", "xla")
        ]
        out, wanted = (np.asarray(with_sinks(part)) for part in results)
        np.testing.assert_allclose(out, wanted, atol=1e-2, rtol=1e-2)
