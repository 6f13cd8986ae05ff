"""Numbers of 16 bits as whole numbers: the definition, and what reads them from files."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfer.cpu import build_library, repack_gguf
from jinfer.loader.checkpoint import Tensor
from jinfer.loader.checkpoint.checkpoint_reader import DTYPES
from jinfer.loader.weights.gguf_blocks import repacked_format, repacked_tensor
from jinfer.quant import QuantizedTensor, f16_as_int
from jinfer.quant.f16_as_int import quantize_f16
from jinfer.quant.quantized_tensor import from_codes, to_codes
from jinfer.quant_format import F16_AS_INT, FORMATS


def stored(values: np.ndarray, name: str = "F16") -> Tensor:
    with np.errstate(invalid="ignore"):
        typed = np.ascontiguousarray(values.astype(DTYPES[name]))
    raw = typed.view(np.uint8).reshape(-1)
    return Tensor("w", values.shape, name, raw.size, lambda: typed, lambda: raw)


def kept(tensor: Tensor | list[Tensor], rows: np.ndarray | None = None) -> QuantizedTensor:
    result = repacked_tensor(tensor, rows, halves=True)
    assert result is not None
    assert result.format == repacked_format(tensor, halves=True) == F16_AS_INT
    return result


def any_numbers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random bits: numbers of all magnitudes, a few of them not finite, and some blocks alike."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 16, shape, np.uint16)
    alike = rng.random((*shape[:-1], shape[-1] // F16_AS_INT.block)) < 0.7
    with np.errstate(invalid="ignore"):
        values = bits.view(np.float16).astype(np.float32)
    near = rng.standard_normal(shape).astype(np.float32)
    return np.where(np.repeat(alike, F16_AS_INT.block, axis=-1), near, values)


def test_error_bound_of_numbers() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((200, F16_AS_INT.block)) * np.exp2(rng.integers(-9, 9, (200, 1)))
    values = values.astype(np.float16).astype(np.float32)
    codes, scales = quantize_f16(values)
    assert codes.dtype == np.int16
    largest = np.abs(values).max(axis=1)
    assert np.all((np.abs(codes).max(axis=1) >= 1 << 12) & (np.abs(codes).max(axis=1) <= 1 << 13))
    meant = codes * scales.astype(np.float64)[:, None]
    off = np.abs(meant - values)
    assert np.all(off <= largest[:, None] / (1 << 13))
    large = np.abs(values) * 4 > largest[:, None]
    assert np.all(off[large] == 0)


def test_smallest_float16_number_is_exact() -> None:
    values = np.zeros((2, F16_AS_INT.block), np.float32)
    values[0, 5], values[0, 6] = 2.0**-24, -3 * 2.0**-24
    codes, scales = quantize_f16(values)
    np.testing.assert_array_equal(codes * scales.astype(np.float64)[:, None], values)


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_block_with_a_non_finite_number(number: float) -> None:
    values = np.ones((2, F16_AS_INT.block), np.float32)
    values[1, 7] = number
    meant = np.asarray(kept(stored(values)).dequantize())
    assert np.all(meant[0] == 1)
    assert np.all(np.isnan(meant[1]))


@pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")
@settings(max_examples=25)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 99), st.data())
def test_compiled_code_is_the_definition(
    outputs: int, blocks: int, seed: int, data: st.DataObject
) -> None:
    file = stored(any_numbers((outputs, blocks * F16_AS_INT.block), seed))
    rows = data.draw(st.sampled_from([None, np.arange(outputs)[::-1].copy()]))
    compiled = kept(file, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repack_gguf, "repack", lambda *_: False)
        by_numpy = kept(file, rows)
    for one, other in zip(jax.tree.leaves(compiled), jax.tree.leaves(by_numpy), strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))
    # The layout is that of `from_codes`, padding included.
    codes, scales, _ = to_codes(compiled)
    again = from_codes(codes[:, : compiled.inputs], scales, F16_AS_INT)
    np.testing.assert_array_equal(again.words, compiled.words)
    # And it means what `quantize_f16` says.
    with np.errstate(invalid="ignore"):
        values = file.read().astype(np.float32)[slice(None) if rows is None else rows]
    codes, scales = quantize_f16(values.reshape(outputs, blocks, F16_AS_INT.block))
    meant = (codes * scales.astype(np.float32)[..., None]).reshape(outputs, -1)
    np.testing.assert_array_equal(np.asarray(compiled.dequantize()), meant)


def test_rows_under_jit() -> None:
    file = stored(np.random.default_rng(0).standard_normal((19, 192)))
    ids = np.array([[0, 18, 3], [3, 7, 1]], np.int32)
    tensor = kept(file)
    taken = jax.jit(lambda weight: weight.take(ids, jnp.float32))(jax.device_put(tensor))
    np.testing.assert_array_equal(taken, np.asarray(tensor.dequantize())[ids])
    assert np.abs(np.asarray(taken) - file.read()[ids]).max() < 1e-3


def test_a_stack() -> None:
    rng = np.random.default_rng(0)
    files = [stored(rng.standard_normal((12, 64))) for _ in range(3)]
    for e, file in enumerate(files):
        np.testing.assert_array_equal(kept(files)[e].words, kept(file).words)


def test_unsupported_types_are_decoded() -> None:
    plain = stored(np.ones((8, 64)))
    other = stored(np.ones((8, 64)), "BF16")
    assert repacked_format(plain) is None  # unless it is asked for
    assert repacked_tensor(plain) is None
    assert repacked_format(other, halves=True) is None
    assert repacked_format([plain, other], halves=True) is None
    assert repacked_format(stored(np.ones((8, 96))), halves=True) is None  # no whole blocks
    assert repacked_format(stored(np.ones(64)), halves=True) is None
    assert F16_AS_INT not in FORMATS.values()  # nor can it be asked for in a specification
    assert f16_as_int.BYTES == 128
