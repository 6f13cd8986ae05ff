"""Fused layers on a GPU, kernels interpreted, for any wiring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jinfer.ops.attention.kv_cache import AttentionMetadata, LayerCache
from jinfer.ops.attention.paged_attention import write_kv
from jinfer.ops.backend import target_platform
from jinfer.ops.fusion.fuse_gpu import fuse_for_gpu
from jinfer.ops.matmul.matmul import gated_linear, linear, linears
from jinfer.ops.norm import normalize
from jinfer.ops.rope import rotate
from jinfer.quant import QuantizedTensor
from jinfer.quant.quantize_matrix import quantize
from jinfer.quant_format import QuantFormat, Width
from kernels_pallas.matmul import triton
from kernels_pallas.matmul.grid import Tiling
from kernels_pallas.matmul.weight_layout import PackedMatrix
from tests.arrays import on_device

MATMUL, ROWS, PREPARED = map(
    import_module,
    (
        "kernels_pallas.matmul.quantized",
        "kernels_pallas.matmul.prologue",
        "jinfer.ops.fusion.fuse_gpu",
    ),
)
HEADS, KV_HEADS, DIM = 4, 2, 64
SIZE, WIDE = HEADS * DIM, 600


def weight(outputs: int, inputs: int, seed: int, width: Width = "4") -> QuantizedTensor:
    format = QuantFormat(width)
    values = np.random.default_rng(seed).standard_normal((outputs, inputs)).astype(np.float32)
    tensor = quantize(values * 0.05, format, columns=32 // format.per_code)
    return jax.tree.map(on_device, tensor)


def vector(size: int, seed: int) -> Array:
    return on_device(np.random.default_rng(seed).standard_normal(size), jnp.float32)


W: dict[str, Any] = {
    "q": weight(SIZE, SIZE, 0),
    "k": weight(KV_HEADS * DIM, SIZE, 1),
    "v": weight(KV_HEADS * DIM, SIZE, 2),
    "o": weight(SIZE, SIZE, 3),
    "gate": weight(WIDE, SIZE, 4),
    "up": weight(WIDE, SIZE, 5),
    "down": weight(SIZE, WIDE, 6),
    "pairs": weight(SIZE, SIZE, 7, "3.5"),
    "scale": vector(SIZE, 8),
    "bias": vector(SIZE, 9),
}

type Weights = Mapping[str, Any]


def rms(x: Array, w: Weights) -> Array:
    return normalize(x, w["scale"], eps=1e-5)


def layer_norm(x: Array, w: Weights) -> Array:
    return normalize(x, w["scale"], w["bias"], eps=1e-5, centered=True)


def mixed(x: Array, w: Weights) -> Array:
    """Something that needs all rows, as an attention does, between products."""
    q, k, v = linears(x, [w["q"], w["k"], w["v"]], [w["bias"], None, None])
    return linear(jnp.cumsum(q, axis=1) * jnp.concatenate([k, v], axis=-1), w["o"])


def ffn(x: Array, w: Weights, activation: str = "silu") -> Array:
    y = gated_linear(x, w["gate"], w["up"], activation)
    assert y is not None
    return linear(y, w["down"])


def before(x: Array, w: Weights) -> Array:
    x = x + mixed(rms(x, w), w)
    return x + ffn(rms(x, w), w)


def after(x: Array, w: Weights) -> Array:
    x = layer_norm(x + mixed(x, w), w)
    return layer_norm(x + ffn(x, w, "gelu_tanh"), w)


def beside(x: Array, w: Weights) -> Array:
    n = layer_norm(x, w)
    return x + mixed(n, w) + ffn(n, w, "relu")


def around(x: Array, w: Weights) -> Array:
    x = x + 0.3 * rms(mixed(rms(x, w), w), w)
    return x + rms(ffn(rms(x, w), w), w)


def two_orders(x: Array, w: Weights) -> Array:
    """Rows in the order of pairs of codes, and in that of single ones."""
    n = rms(x, w)
    y, z = linears(n, [w["pairs"], w["o"]], [None, None])
    return x + linear(n, w["pairs"]) + y + linear(y * z, w["o"])


# Kernels that prepare rows; others of the layers are products.
LAYERS: dict[Callable[..., Array], int] = {
    before: 4,
    after: 4,
    beside: 3,
    around: 4,
}


def prepare_calls(layer: Callable[..., Array], x: Array) -> int:
    """How many kernels of a layer prepare rows."""
    return str(jax.make_jaxpr(fuse_for_gpu(layer))(x, W)).count("name=prepare_rows\n")


@pytest.fixture
def _plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other products by XLA: those of the kernels, interpreted, take seconds to compile."""
    monkeypatch.setattr(triton, "product", plain_product)


def plain_product(
    x: Array,
    factors: Array,
    which: Array | None,
    matrices: Sequence[PackedMatrix],
    tiling: Tiling,
    *,
    interpret: bool,
) -> tuple[Array, ...]:
    """In place of `kernels_pallas.matmul.triton.product`: words as they are, as if weights."""
    assert interpret
    assert which is None
    x = x.reshape(x.shape[0], -1).astype(jnp.float32)

    def product(matrix: PackedMatrix) -> Array:
        numbers = matrix.half_words()[0].reshape(matrix.outputs, -1).astype(jnp.float32)
        weights = jnp.tile(numbers / 2.0**20 - 2.0**-5, (1, -(-x.shape[1] // numbers.shape[1])))
        # A power of two of its own has at most the only superblock.
        return x @ weights[:, : x.shape[1]].T * factors.reshape(x.shape[0], 1)

    y = [product(matrix) for matrix in matrices]
    share = jnp.arange(1, tiling.split + 1, dtype=jnp.float32)
    share = (share / jnp.sum(share))[:, None, None]
    return tuple(each[None] * share for each in y)


@pytest.mark.usefixtures("_plain_products")
@pytest.mark.parametrize("layer", [*LAYERS, two_orders], ids=lambda layer: layer.__name__)
def test_layers(layer: Callable[..., Array], monkeypatch: pytest.MonkeyPatch) -> None:
    rows, dtype = (1, jnp.bfloat16) if layer in (before, after) else (5, jnp.float32)
    check_layer(layer, rows, dtype, monkeypatch)


@pytest.mark.usefixtures("_plain_products")
def test_rows_without_reductions_are_prepared_by_superblock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PREPARED, "_LONG_ROW", 1)  # superblocks
    monkeypatch.setattr(ROWS, "prepare_rows", noting := Noting(ROWS.prepare_rows))
    check_layer(before, 5, jnp.float32, monkeypatch)
    assert noting.apart == [False, True, False, True] * (len(noting.apart) // 4)


class Noting:
    """A function that is called, and how."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.apart = function, list[bool]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.apart.append(kwargs["apart"])
        return self.function(*args, **kwargs)


@pytest.mark.soak
@pytest.mark.parametrize("layer", [*LAYERS, two_orders], ids=lambda layer: layer.__name__)
def test_layers_with_products(layer: Callable[..., Array], monkeypatch: pytest.MonkeyPatch) -> None:
    check_layer(layer, 3, jnp.float32, monkeypatch)


def check_layer(
    layer: Callable[..., Array], rows: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds what the kernels compute to what the layer computes as it is."""
    x = on_device(np.random.default_rng(1).standard_normal((1, rows, SIZE)), dtype)
    with target_platform("gpu", interpret=True):
        found = jax.jit(fuse_for_gpu(layer))(x, W)
        assert layer not in LAYERS or prepare_calls(layer, x) == LAYERS[layer]
        monkeypatch.setattr(MATMUL, "fits", lambda width: False)  # rows are rounded by XLA
        plain = jax.jit(layer)(x, W)
    assert found.dtype == dtype
    size = float(jnp.max(jnp.abs(plain)))
    tolerance = 2e-3 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(
        found.astype(jnp.float32), plain.astype(jnp.float32), rtol=0, atol=tolerance * size
    )


def entered(
    x: Array, w: Weights, cache: LayerCache, at: AttentionMetadata, pairs: int, adjacent: bool
) -> tuple[Array, LayerCache]:
    """Attention before it looks at the keys."""
    q, k, v = linears(x, [w["q"], w["k"], w["v"]], [w["bias"], None, None])
    frequencies = jnp.linspace(1.0, 0.1, pairs)
    angles = at.positions.astype(jnp.float32)[None, :, None] * frequencies[None, None]
    turn = jnp.cos(angles), jnp.sin(angles)
    q, k = (rotate(part, *turn, size=DIM, adjacent=adjacent) for part in (q, k))
    q, k, v = (part.reshape(-1, part.shape[-1] // DIM, DIM) for part in (q, k, v))
    return write_kv(q, k, v, cache, at)


@pytest.mark.usefixtures("_plain_products")
@pytest.mark.parametrize(
    ("pairs", "adjacent", "kind"),
    [(32, False, jnp.bfloat16), (32, True, jnp.float16), (8, False, jnp.float32)],
)
def test_new_tokens_in_a_cache(pairs: int, adjacent: bool, kind: Any) -> None:
    """Padding, and what has no block here, is not written."""
    rng = np.random.default_rng(1)
    x = on_device(rng.standard_normal((1, 6, SIZE)), jnp.float32)
    pools = (on_device(rng.standard_normal((5, KV_HEADS, 64, DIM)), kind) for _ in range(2))
    cache = LayerCache(*pools)
    rows, positions = on_device([0, 0, -1, 1, 2, 9]), on_device([63, 64, 0, 3, 70, 2])
    at = AttentionMetadata(rows, positions, on_device([[2, 0], [3, 1], [4, -1]]))

    def run(x: Array, w: Weights, cache: LayerCache) -> tuple[Array, LayerCache]:
        return entered(x, w, cache, at, pairs, adjacent)

    with target_platform("gpu", interpret=True):
        assert "name=enter_cache" in str(jax.make_jaxpr(fuse_for_gpu(run))(x, W, cache))
        found, kept = jax.jit(fuse_for_gpu(run))(x, W, cache)
        plain, expected = jax.jit(run)(x, W, cache)
    leaves = map(jax.tree.leaves, (kept, expected, cache))
    np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-5)
    step = 2 ** -(jnp.finfo(kind).nmant)
    for one, other, old in zip(*leaves, strict=True):
        one, other, old = (part.astype(jnp.float32) for part in (one, other, old))
        np.testing.assert_allclose(one, other, rtol=step, atol=1e-5)
        assert int(jnp.sum(jnp.any(one != old, axis=(1, 3)))) == 3


def test_other_operations_are_unchanged() -> None:
    """What needs other rows, or is of no product, is computed as it says."""

    def function(x: Array) -> tuple[Array, Array]:
        y = jnp.sum(x, axis=1, keepdims=True) * 2
        return y + x, jnp.cumsum(y * x, axis=0)

    x = on_device(np.random.default_rng(1).standard_normal((5, 7)), jnp.float32)
    with target_platform("gpu", interpret=True):
        for found, expected in zip(fuse_for_gpu(function)(x), function(x), strict=True):
            np.testing.assert_array_equal(found, expected)
