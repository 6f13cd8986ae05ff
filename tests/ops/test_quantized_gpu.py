"""Products with quantized matrices as a GPU computes them, without one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.loader.weights.gguf_blocks import REPACKED_FORMATS
from jinfer.ops.backend import target_platform
from jinfer.ops.matmul import quantized
from jinfer.ops.matmul.quantized import quantized_matmul
from jinfer.quant import QuantFormat, QuantizedTensor
from jinfer.quant.quantized_tensor import abstract, from_codes
from tests.kernels_pallas.helpers import H200

SWITCH = "JINFER_NO_KERNELS"
OTHERS = {"q4": QuantFormat("4"), "q3.5": QuantFormat("3.5")}
FORMATS = {**REPACKED_FORMATS, **OTHERS}


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(SWITCH, raising=False)
    with target_platform("gpu"):
        yield


def matrix(format: QuantFormat, shape: tuple[int, ...], columns: int = 32) -> QuantizedTensor:
    """Random codes and numbers."""
    rng = np.random.default_rng(len(shape))
    codes = rng.integers(0, format.levels, shape, np.uint8)
    numbers = (*shape[:-1], -(-shape[-1] // format.block), format.numbers)
    if format.two_level:
        scales = rng.integers(-32, 64, numbers).astype(np.int8)
        steps = rng.standard_normal((*shape[:-1], -(-shape[-1] // 256), format.numbers)) / 100
        steps = steps.astype(np.float16)
        return from_codes(codes, scales, format, steps=steps, columns=columns // format.per_code)
    scales = rng.standard_normal(numbers).astype(np.float16)
    return from_codes(codes, scales, format, columns=columns // format.per_code)


def lowered(weights: Any, index: Any = None, rows: int = 1) -> str:
    """What CUDA is given to compute products with weights of these shapes."""
    x = jax.ShapeDtypeStruct((rows, weights[0].inputs), jnp.float32)
    compute = jax.jit(lambda x, weights, index: quantized_matmul(x, weights, index=index))
    with jax.sharding.use_abstract_mesh(H200):
        return compute.trace(x, weights, index).lower(lowering_platforms=("cuda",)).as_text()


def check(weight: QuantizedTensor, activation: str = "none") -> None:
    """Holds products of 3 rows with one of a stack to the definition."""
    x = np.random.default_rng(1).standard_normal((3, weight.inputs)).astype(np.float32)
    weights = [weight] * (1 if activation == "none" else 2)
    run = jax.jit(partial(quantized_matmul, activation=activation))
    (y,) = run(x, weights, index=jnp.int32(1))
    full = np.asarray(weight.dequantize()[1], np.float64)
    expected = x @ full.T
    size = np.linalg.norm(x, axis=1, keepdims=True) * np.linalg.norm(full, axis=1)
    if activation == "relu":
        expected, size = np.maximum(expected, 0) * expected, 2 * size**2
    assert (np.abs(np.asarray(y) - expected) / size).max() < 5e-4


@pytest.mark.parametrize("activation", ["none", "relu"])
def test_the_kernel_gives_the_product(activation: str) -> None:
    with target_platform("gpu", interpret=True):
        check(matrix(FORMATS["Q6_K"], (2, 20, 512)), activation)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_xla_gives_the_product_without_the_kernel(
    name: str, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "experts")
    check(matrix(FORMATS[name], (2, 20, 512)), activation)


def test_xla_gives_the_product_of_unsupported_formats() -> None:
    check(matrix(QuantFormat("4", 64, two_level=True), (2, 20, 512)))
    check(matrix(QuantFormat("3.5", 32, two_level=True), (2, 20, 512)))
    check(matrix(QuantFormat("4"), (2, 20, 512), columns=8))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_a_kernel(name: str) -> None:
    weight = abstract((256, 1024), FORMATS[name], 32 // FORMATS[name].per_code)
    assert quantized._gpu_kernels_support(weight)


def test_choice_of_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    one, stack = (abstract((*lead, 256, 1024), REPACKED_FORMATS["Q4_K"], 32) for lead in ((), (3,)))
    index = jax.ShapeDtypeStruct((), jnp.int32)
    kernel = "xla.gpu.triton"
    assert kernel in lowered([one])
    assert kernel in lowered([stack], index)
    monkeypatch.setenv(SWITCH, "attention,experts")
    assert kernel in lowered([one])
    assert kernel not in lowered([stack], index)
    monkeypatch.setenv(SWITCH, "products")
    assert kernel not in lowered([one])
    assert kernel in lowered([stack], index)


def test_gpu_fallback_has_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix is decoded as a whole, and multiplied by tensor cores."""
    weight = abstract((4096, 1024), REPACKED_FORMATS["Q4_K"], 32)
    for off, rows in (("1", 512), ("", 2048)):
        monkeypatch.setenv(SWITCH, off)
        text = lowered([weight], rows=rows)
        assert "while" not in text
        (product,) = (line for line in text.splitlines() if "dot_general" in line)
        assert "xf16>" in product
        assert product.endswith("xf32>")
