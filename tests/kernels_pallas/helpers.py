"""Random matrices as the kernels take them, and what a product must be."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jinfer.quant.kv_vectors import quantize_vectors
from jinfer.quant.quantize_matrix import quantize
from jinfer.quant.quantized_tensor import QuantizedTensor, from_codes
from jinfer.quant_format import FLOAT_DTYPES, FORMATS, QuantFormat, Width
from kernels_pallas.attention.kv_layout import PackedKV
from kernels_pallas.matmul.weight_layout import PackedMatrix
from tests.arrays import on_device

WIDTHS: tuple[Width, ...] = ("2", "3", "3.5", "4", "5", "6", "8")
KINDS = [*FLOAT_DTYPES, *FORMATS]  # of a cache
_quantized = jax.jit(quantize_vectors, static_argnums=1)
H200 = jax.sharding.AbstractMesh(
    (), (), abstract_device=jax.sharding.AbstractDevice("NVIDIA H200", 1, "cuda")
)


def packed(tensor: QuantizedTensor) -> PackedMatrix:
    """The same matrix for the kernels."""
    format = tensor.format
    words, scales, steps = jax.tree.map(on_device, (tensor.words, tensor.scales, tensor.steps))
    return PackedMatrix(
        words, scales, format.levels, format.block, tensor.inputs, steps, format.codebook
    )


def random_matrix(
    format: QuantFormat, shape: tuple[int, ...], seed: int = 0
) -> tuple[PackedMatrix, np.ndarray]:
    """A matrix [*stack, outputs, inputs] of N(0, 0.05), and its decoded values in float64."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 0.05
    tensor = quantize(values, format, columns=32 // format.per_code)
    return packed(tensor), np.asarray(tensor.dequantize(), np.float64)


def random_blocks(
    format: QuantFormat, shape: tuple[int, ...], seed: int = 0
) -> tuple[PackedMatrix, np.ndarray]:
    """A matrix of random codes and numbers of blocks, as a GGUF file may have them."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, format.levels, shape, np.uint8)
    lead, (inputs, numbers) = shape[:-1], (shape[-1], format.numbers)
    scales = rng.standard_normal((*lead, -(-inputs // format.block), numbers)) * 0.01
    steps = None
    if format.two_level:  # the range of GGUF's: signed in symmetric blocks, else up to 6 bits
        least, largest = (-128, 128) if format.symmetric else (0, 64)
        scales = rng.integers(least, largest, scales.shape).astype(np.int8)
        steps = rng.standard_normal((*lead, -(-inputs // 256), numbers)) * 1e-3
        steps = steps.astype(np.float16)
    else:
        scales = scales.astype(np.float16)
    tensor = from_codes(codes, scales, format, steps=steps, columns=32)
    return packed(tensor), np.asarray(tensor.dequantize(), np.float64)


def random_rows(rows: int, inputs: int, seed: int = 1) -> np.ndarray:
    """x of N(0, 1), some rows much larger or smaller than others."""
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.integers(-4, 5, (rows, 1))
    return (rng.standard_normal((rows, inputs)) * scale).astype(np.float32)


def assert_near(y: jax.Array, x: np.ndarray, matrix: np.ndarray, tolerance: float = 1e-3) -> None:
    """Holds y to x @ matrix.T with the error that fp16 weights and x allow, row by row."""
    expected = x.astype(np.float64) @ matrix.T
    assert y.shape == expected.shape
    assert y.dtype == jnp.float32
    size = np.linalg.norm(x, axis=1, keepdims=True) * np.linalg.norm(matrix, axis=1)[None]
    error = np.abs(np.asarray(y, np.float64) - expected) / np.maximum(size, 1e-30)
    assert error.max(initial=0) < tolerance, error.max()


def kept(kind: str, values: np.ndarray) -> PackedKV:
    """Keys or values [slots, kv_heads, length, dim] as a cache of this kind has them."""
    if kind in FLOAT_DTYPES:
        return PackedKV(on_device(values, FLOAT_DTYPES[kind]))
    rows = _quantized(on_device(values, jnp.float32), FORMATS[kind])
    return PackedKV(rows.words, rows.scales, rows.format.levels, rows.width)
