"""The search for scales and bases, against rounding and against a plain search."""

from concurrent.futures import ThreadPoolExecutor

import hypothesis.extra.numpy as nps
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from jinfer.quant import QuantFormat, parse_format
from jinfer.quant.quantize_matrix import quantize
from jinfer.quant.round_to_nearest import (
    dequantize,
    nearest_codes,
    nearest_numbers,
    split_into_blocks,
)
from jinfer.quant.scale_search import search_scales

FORMATS = [parse_format(name) for name in ("q2", "q3.5_b64", "q4_sym", "q3.5_sym", "q8", "q3_nl")]


def losses(
    values: np.ndarray, format: QuantFormat, importance: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Weighted squared errors of each block, searched and rounded to the nearest, in float64."""
    weights = np.ones(values.shape[-1]) if importance is None else importance
    weights = np.pad(weights, (0, -values.shape[-1] % format.block))
    weights = weights.reshape(-1, format.block).astype(np.float64)
    blocks = split_into_blocks(values, format.block)
    numbers = nearest_numbers(blocks, format)
    both = (
        search_scales(values, format, importance),
        (nearest_codes(blocks, *numbers, format), *numbers),
    )
    searched, rounded = (
        (weights * (dequantize(*found, format).astype(np.float64) - blocks) ** 2).sum(axis=-1)
        for found in both
    )
    return searched, rounded


@settings(max_examples=40)
@given(
    st.sampled_from(FORMATS),
    nps.arrays(
        np.float32,
        st.tuples(st.integers(1, 6), st.integers(1, 200)),
        elements=st.floats(-8, 8, width=32) | st.sampled_from([0.0, 1e5, -7e4, 1e-6, -1e-7]),
    ),
    st.booleans(),
)
def test_never_worse_than_rounding(format: QuantFormat, values: np.ndarray, weighted: bool) -> None:
    importance = np.random.default_rng(0).gamma(0.5, size=values.shape[-1:]) + 1e-3
    searched, rounded = losses(values, format, importance if weighted else None)
    # The two are compared in float32, where the values themselves are not exact.
    slack = 1e-6 * (split_into_blocks(values, format.block).astype(np.float64) ** 2).sum(axis=-1)
    assert (searched <= rounded * (1 + 1e-4) + slack * 1e-3).all()


def plain_search(x: np.ndarray, w: np.ndarray, levels: int) -> float:
    """The least weighted error of a block over a fine grid of ranges, each refined until stable."""
    best = np.inf
    low, high = x.min(), x.max()
    for below in np.linspace(-0.05, 0.35, 9):
        for above in np.linspace(-0.05, 0.35, 9):
            base, scale = low + below * (high - low), (1 - below - above) * (high - low)
            scale /= levels - 1
            for _ in range(10):
                q = np.clip(np.rint((x - base) / scale), 0, levels - 1)
                design = np.stack([q, np.ones_like(q)], axis=1) * np.sqrt(w)[:, None]
                (scale, base), *_ = np.linalg.lstsq(design, x * np.sqrt(w))
                if scale == 0:
                    break
                best = min(best, float((w * (scale * q + base - x) ** 2).sum()))
    return best


@pytest.mark.parametrize("name", ["q2", "q3", "q3.5"])
def test_error_is_near_the_optimum(name: str) -> None:
    rng, format = np.random.default_rng(1), parse_format(name)
    values = rng.standard_normal((24, 32)).astype(np.float32)
    importance = rng.gamma(1.0, size=32)
    searched, rounded = losses(values, format, importance)
    best = [plain_search(row.astype(np.float64), importance, format.levels) for row in values]
    assert searched.sum() < 1.05 * sum(best) < 0.85 * rounded.sum()


def test_importance_weighs_errors() -> None:
    rng, format = np.random.default_rng(2), parse_format("q3")
    values = rng.standard_normal((64, 256)).astype(np.float32)
    importance = np.where(np.arange(256) % 8 == 0, 100.0, 1.0)
    weighted, _ = losses(values, format, importance)
    codes, scale, base = search_scales(values, format)
    plain = dequantize(codes, scale, base, format).reshape(values.shape)
    unweighted = (importance * (plain - values) ** 2).sum()
    assert weighted.sum() < 0.7 * unweighted
    # Inputs that never came are still decoded to something near.
    tensor = quantize(values, format, method="mse", importance=importance * 0)
    assert np.abs(np.asarray(tensor.dequantize()) - plain).max() == 0


def test_chunks_threads_and_stacks_make_no_difference() -> None:
    rng, format = np.random.default_rng(3), parse_format("q4")
    values = rng.standard_normal((3, 300, 1000)).astype(np.float32)
    importance = rng.random((3, 1000))
    with ThreadPoolExecutor(3) as pool:
        each = list(pool.map(lambda e: search_scales(values[e], format, importance[e]), range(3)))
    row = search_scales(values[1, 7:8], format, importance[1])
    np.testing.assert_array_equal(row[0][0], each[1][0][7])
    whole = quantize(values, format, method="mse", importance=importance)
    for e, (codes, scale, base) in enumerate(each):
        matrix = dequantize(codes, scale, base, format).reshape(300, -1)[:, :1000]
        np.testing.assert_allclose(whole[e].dequantize(), matrix, rtol=0, atol=1e-6)
