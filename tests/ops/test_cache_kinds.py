"""Caches of every kind: their contents, and that copies of a cache are complete."""

from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from jinfer.ops.attention.kv_cache import (
    BLOCK,
    AttentionMetadata,
    CacheShape,
    LayerCache,
    nbytes,
    write_cache,
    zero_cache,
)
from jinfer.quant.bit_packing import unpack
from jinfer.quant.kv_vectors import QuantizedVectors, quantize_vectors, zero_vectors
from jinfer.quant_format import FORMATS, QuantFormat, parse_cache_dtype
from tests.arrays import on_device
from tests.reference.numpy_cache import kept

WIDTHS = sorted(FORMATS, key=lambda name: float(name[1:]))
KINDS = ["f32", "bf16", "f16", *WIDTHS]


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@partial(jax.jit, static_argnums=1)
def quantized(x: Any, format: QuantFormat) -> QuantizedVectors:
    return quantize_vectors(x, format)


def plain(rows: Any) -> np.ndarray:
    if isinstance(rows, QuantizedVectors):
        return np.array(jax.jit(QuantizedVectors.dequantize)(rows))
    return np.array(rows.astype(jnp.float32))


def test_names() -> None:
    assert parse_cache_dtype("f16") == jnp.float16
    assert parse_cache_dtype("q3.5") is FORMATS["q3.5"]
    with pytest.raises(ValueError, match=r"no kind of cache 'q7'; there are f32, .*q8"):
        parse_cache_dtype("q7")
    with pytest.raises(ValueError, match="q4_b64"):
        zero_vectors((1, 64), QuantFormat("4", 64))


@pytest.mark.parametrize("kind", WIDTHS)
@settings(max_examples=5)
@given(data=st.data())
def test_vectors_against_the_definition(kind: str, data: st.DataObject) -> None:
    """Of any width, blocks of one number and of tiny and huge ones among them."""
    width = data.draw(st.sampled_from([1, 8, 32, 33, 64, 80]), "width")
    scale = data.draw(st.sampled_from([1e-3, 1.0, 1e4]), "scale")
    x = scale * random(data.draw(st.integers(0, 99), "seed"), 3, 2, width)
    x[0, 0] = data.draw(st.sampled_from([0.0, 1.0, -2.5]), "constant")
    vectors = quantized(x, FORMATS[kind])
    assert vectors.shape == x.shape
    fresh = zero_vectors(x.shape, FORMATS[kind])
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, vectors)
    got, expected = plain(vectors), kept(x.astype(np.float64), kind)
    # A number in the middle between two codes may become either; a base or scale in the middle
    # between two float16 numbers likewise, which moves its whole block by a unit in the last place.
    extreme = np.abs(x).max(axis=-1, keepdims=True)
    step = extreme * 2 / FORMATS[kind].levels * 1.1
    assert (np.abs(got - expected) <= 1.01 * step).all()
    assert np.mean(np.abs(got - expected) > 1e-3 * step + 2**-10 * extreme) < 0.01


@pytest.mark.parametrize("kind", ["q4", "q3.5"])
def test_position_of_a_number_in_the_layout(kind: str) -> None:
    """As QuantizedVectors says."""
    format = FORMATS[kind]
    vectors = quantized(random(1, 5, 128), format)
    whole = plain(vectors)
    columns = np.asarray(vectors.words).reshape(5, -1, format.code_bits)
    codes = unpack(columns, format.code_bits)
    numbers = np.asarray(vectors.scales, np.float32).reshape(5, -1, 2)
    for k in range(128):
        column, half = divmod(k // 32, format.per_code)
        code = codes[:, column, k % 32]
        q = code if format.per_code == 1 else (code // 11, code % 11)[half]
        value = q * numbers[:, k // 32, 0] + numbers[:, k // 32, 1]
        assert_allclose(whole[:, k], value, rtol=1e-6, atol=1e-6)


def test_the_error_falls_with_the_bits() -> None:
    """And below 8 bits blocks with a base are better, most of all where no number is near 0."""
    x = random(2, 1000, 64)

    def error(format: QuantFormat, x: np.ndarray = x) -> float:
        rest = plain(quantized(x, format)) - x
        return float(np.sqrt(np.mean(rest**2)) / np.sqrt(np.mean(x**2)))

    errors = [error(FORMATS[kind]) for kind in WIDTHS]
    assert all(b < 0.87 * a for a, b in pairwise(errors)), errors
    assert errors[-1] < 0.008
    for width in ("2", "3", "4"):
        affine, symmetric = QuantFormat(width), QuantFormat(width, symmetric=True)
        for values in (x, x + 2):
            assert error(affine, values) < error(symmetric, values)


@pytest.mark.parametrize("kind", ["f32", "bf16", "f16", "q8", "q3.5", "q2"])
def test_write_and_move(kind: str) -> None:
    """Tokens go where they belong, and a permutation of rows permutes all parts."""
    shapes = {"a": CacheShape(2, 40, 24), "latent": CacheShape(1, 48, 0)}
    cache = jax.jit(lambda: zero_cache(shapes, 3, parse_cache_dtype(kind)))()
    keys, values = random(3, 4, 2, 40), random(4, 4, 2, 24)
    rows, positions = jnp.zeros(4, jnp.int32), jnp.arange(67, 71, dtype=jnp.int32)
    at = AttentionMetadata(rows, positions, on_device([[0, 1]], jnp.int32))
    layer = jax.jit(write_cache)(cache["a"], on_device(keys), on_device(values), at)
    latents = on_device(random(5, 4, 1, 48))
    latent = jax.jit(write_cache)(cache["latent"], latents, latents[..., :0], at)
    after = {"a": layer, "latent": latent}
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, cache)
    for pool, new in ((layer.keys, keys), (layer.values, values)):
        got = plain(pool)
        name = "f16" if kind == "bf16" else kind
        tolerance = 0.02 if kind == "bf16" else 1e-5
        expected = kept(new.astype(np.float64), name).swapaxes(0, 1)
        assert_allclose(got[1, :, 3:7], expected, atol=tolerance)
        got[1, :, 3:7] = 0
        assert not got.any()
    parents = [1, 1, 0]
    moved = jax.tree.map(lambda rows: rows[parents], jax.device_get(after))
    for old, new in zip(
        (*layer[:2], *latent[:2]), (*moved["a"][:2], *moved["latent"][:2]), strict=True
    ):
        assert np.array_equal(plain(new), plain(old)[[1, 1, 0]])


def test_bytes() -> None:
    """Per token and head of 64 numbers: the codes, and two numbers of 16 bits for each 32."""
    shape = {"a": CacheShape(1, 64, 64)}
    per_vector = {
        name: nbytes(zero_cache(shape, 1, parse_cache_dtype(name))) // 2 // BLOCK for name in KINDS
    }
    bytes_ = {"f32": 256, "bf16": 128, "f16": 128, "q8": 68, "q6": 56, "q5": 48, "q4": 40}
    assert per_vector == bytes_ | {"q3.5": 36, "q3": 32, "q2": 24}


def test_numbers_too_large_for_the_type() -> None:
    cache = LayerCache(*(jnp.zeros((1, 1, 2, 4), jnp.float16),) * 2)
    huge, first = jnp.full((1, 1, 4), 1e6), jnp.zeros(1, jnp.int32)
    after = write_cache(cache, huge, -huge, AttentionMetadata(first, first, first[None]))
    assert np.asarray(after.keys).max() == 65504
    assert np.asarray(after.values).min() == -65504
