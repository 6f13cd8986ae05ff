"""Products with GGUF's blocks: kernels in interpret mode against NumPy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.loader.weights.gguf_blocks import REPACKED_FORMATS as GGUF
from jinfer.quant_format import QuantFormat
from kernels_pallas.matmul import weight_layout
from kernels_pallas.matmul.grouped import grouped_quantized_matmul
from kernels_pallas.matmul.quantized import KERNEL_ROWS, matmul
from tests.arrays import on_device
from tests.kernels_pallas.helpers import assert_near, random_blocks, random_rows

run = functools.partial(jax.jit, static_argnames=("backend", "gated", "interpret"))(matmul)
interpret = functools.partial(run, interpret=True)
run_experts = jax.jit(grouped_quantized_matmul, static_argnames=("backend", "gated", "interpret"))

# Those of another kind than jinfer's own; Q5_K is Q4_K with another width.
NAMES = ["Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"]
TABLE = (-128, -9, 127, 3, 77, 0, 64, 1, -1, 2, 100, -100, 50, 51, -52, 5)


@pytest.mark.parametrize("name", GGUF)
def test_decodes_as_the_reference(name: str) -> None:
    matrix, values = random_blocks(GGUF[name], (2, 3, 1500))
    np.testing.assert_allclose(np.asarray(matrix.dequantize()), values, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_every_format(name: str) -> None:
    matrix, values = random_blocks(GGUF[name], (2, 17, 1500))
    x = random_rows(3, 1500)
    (y,) = interpret(on_device(x), [matrix], index=on_device([1], jnp.int32))
    assert_near(y, x, values[1], 2e-4)


@pytest.mark.soak
@pytest.mark.parametrize("name", GGUF)
@pytest.mark.parametrize("rows", [1, 17, 300])
def test_every_format_and_size(name: str, rows: int) -> None:
    matrix, values = random_blocks(GGUF[name], (130, 3000))
    x = random_rows(rows, 3000)
    (y,) = interpret(on_device(x), [matrix])
    assert_near(y, x, values, 2e-4)


@pytest.mark.parametrize("block", [32, 64, 16])  # the latter are NF4's and NVFP4's
def test_any_values(block: int) -> None:
    format = QuantFormat("4", block, True, two_level=block == 16, codebook=TABLE)
    matrix, values = random_blocks(format, (16, 1024))
    x = random_rows(2, 1024)
    assert_near(interpret(on_device(x), [matrix])[0], x, values, 2e-4)


def test_formats_that_share_x() -> None:
    """As files mix them: values in a finer format than queries and keys."""
    sizes = {"Q4_K": 70, "IQ4_NL": 33, "Q6_K": 33}
    built = [random_blocks(GGUF[name], (3, n, 1024), n) for name, n in sizes.items()]
    x = random_rows(5, 1024)
    results = interpret(on_device(x), [m for m, _ in built], index=on_device([2], jnp.int32))
    for y, (_, values) in zip(results, built, strict=True):
        assert_near(y, x, values[2], 2e-4)


def test_gate_and_up() -> None:
    gate, g = random_blocks(GGUF["Q4_K"], (20, 512), 1)
    up, u = random_blocks(GGUF["IQ4_XS"], (20, 512), 2)
    x = random_rows(2, 512) / 1e4
    (y,) = interpret(on_device(x), [gate, up], gated=True)
    a, b = x @ g.T, x @ u.T
    np.testing.assert_allclose(np.asarray(y), a / (1 + np.exp(-a)) * b, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("backend", ["triton", "xla"])
@pytest.mark.parametrize("name", ["MXFP4", "Q4_K"])
def test_experts(name: str, backend: str) -> None:
    matrix, values = random_blocks(GGUF[name], (3, 20, 300))
    x = random_rows(4, 300)
    offsets = on_device([0, 1, 2, 4], jnp.int32)
    (y,) = run_experts(on_device(x), offsets, [matrix], backend=backend, interpret=True)
    for row, expert in enumerate([0, 1, 2, 2]):
        assert_near(y[row : row + 1], x[row : row + 1], values[expert], 2e-4)


def test_decoded_as_a_whole() -> None:
    """By plain XLA."""
    matrix, values = random_blocks(GGUF["IQ4_XS"], (2, 80, 600))
    x = random_rows(3, 600)
    (y,) = run(on_device(x), [matrix], index=on_device([1], jnp.int32), backend="xla")
    assert_near(y, x, values[1])


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "IQ4_XS"])
def test_many_rows(name: str) -> None:
    """By the kernel that decodes."""
    matrix, values = random_blocks(GGUF[name], (2, 80, 600))
    x = random_rows(KERNEL_ROWS + 1, 600)
    (y,) = interpret(on_device(x), [matrix], index=on_device([1], jnp.int32))
    assert_near(y, x, values[1])


def test_unsupported_layouts_are_errors() -> None:
    words, scales = jnp.zeros((4, 1, 4, 1, 32), jnp.uint32), jnp.zeros((4, 1, 1, 16, 2), jnp.int8)
    steps = jnp.zeros((4, 1, 1, 4, 2), jnp.float16)
    with pytest.raises(ValueError, match=r"in blocks of \(16, 32\)"):
        weight_layout.PackedMatrix(words, scales, 16, 64, 1024, steps)
    with pytest.raises(ValueError, match=r"look up 16 values of blocks without a base"):
        weight_layout.PackedMatrix(words, scales, 16, 32, 1024, steps, TABLE)
