"""Coordinate descent after GPTQ: the loss falls, and nothing moves that must not."""

from typing import Any

import numpy as np
import pytest

from jinfer.quant import parse_format
from jinfer.quant.gptq import DAMPING, descend, quantize_gptq
from jinfer.quant.quantize_matrix import quantize
from jinfer.quant.round_to_nearest import (
    dequantize,
    nearest_codes,
    nearest_numbers,
    split_into_blocks,
)
from tests.quant.reference import descend_reference
from tests.quant.test_gptq import INPUTS, correlated

WAYS = [descend, descend_reference]


def loss(values: np.ndarray, whole: np.ndarray, H: np.ndarray) -> float:
    """With the damping that both minimize."""
    H = H / np.diag(H).mean() + DAMPING * np.eye(len(H))
    error = (whole.reshape(len(values), -1)[:, : values.shape[1]] - values).astype(np.float64)
    return float(np.einsum("oi,ij,oj->", error, H, error))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["q2", "q3", "q3.5", "q4_sym", "q3.5_sym", "q4_b128"])
@pytest.mark.parametrize("from_nearest", [True, False])
def test_the_loss_falls(name: str, from_nearest: bool, way: Any) -> None:
    (weight, x), format = correlated(), parse_format(name)
    H = (x.T @ x).astype(np.float64)
    given = H.copy()
    if from_nearest:
        blocks = split_into_blocks(weight, format.block)
        numbers = nearest_numbers(blocks, format)
        start = (nearest_codes(blocks, *numbers, format), *numbers)
    else:
        start = quantize_gptq(weight, H, format)[:3]
    before = loss(weight, dequantize(*start, format), H)
    codes, scale, base = way(weight, H, *start, format)
    after = loss(weight, dequantize(codes, scale, base, format), H)
    assert after < (0.7 if from_nearest else 0.97) * before
    assert codes.shape == start[0].shape
    assert codes.max() < format.levels
    assert (base is None) == format.symmetric
    np.testing.assert_array_equal(H, given)


@pytest.mark.parametrize("name", ["q2", "q4", "q3.5_sym", "q4_b128"])
@pytest.mark.parametrize("share", [0.0, 0.05])
def test_result_equals_the_reference(name: str, share: float) -> None:
    (weight, x), format = correlated(5), parse_format(name)
    H = (x.T @ x).astype(np.float64)
    exact = np.random.default_rng(0).random(weight.shape) < share
    codes, scale, base, moved = quantize_gptq(weight, H, format, exact=exact)
    kept = np.where(exact, moved, np.float32(np.nan)) if share else None
    start = (weight, H, codes, scale, base, format)
    ours, expected = (way(*start, outliers=kept) for way in WAYS)

    def left(codes: np.ndarray, scale: np.ndarray, base: np.ndarray | None) -> float:
        whole = dequantize(codes, scale, base, format).reshape(len(weight), -1)[:, :INPUTS]
        return loss(weight, np.where(exact, moved, whole), H)

    assert left(*ours) == pytest.approx(left(*expected), rel=0.01)
    # A weight between two codes may go either way, and others in its row with it.
    same = (ours[0] == expected[0]).all(axis=(1, 2))
    assert same.mean() > 0.9
    for a, b in zip(ours[1:], expected[1:], strict=True):
        if a is not None and b is not None:
            np.testing.assert_array_equal(a[same], b[same])


def test_no_single_code_could_be_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jinfer.quant.gptq.ROUNDS", 30)
    (weight, x), format = correlated(3), parse_format("q3")
    weight, H = weight[:4, :64], (x.T @ x)[:64, :64].astype(np.float64)
    start = quantize_gptq(weight, H, format)[:3]
    codes, scale, base = descend(weight, H, *start, format)
    least = loss(weight, dequantize(codes, scale, base, format), H)
    for row in range(4):
        for column in range(64):
            for change in (-1, 1):
                other = codes.astype(np.int64)
                other[row, column // 32, column % 32] += change
                if 0 <= other[row, column // 32, column % 32] < format.levels:
                    changed = dequantize(other.astype(np.uint8), scale, base, format)
                    assert loss(weight, changed, H) > least * (1 - 1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_exact_outliers_are_unchanged(way: Any) -> None:
    (weight, x), format = correlated(2), parse_format("q3")
    H = (x.T @ x).astype(np.float64)
    exact = np.random.default_rng(0).random(weight.shape) < 0.05
    codes, scale, base, moved = quantize_gptq(weight, H, format, exact=exact)
    kept = np.where(exact, moved, np.float32(np.nan))

    def error(codes: np.ndarray, scale: np.ndarray, base: np.ndarray | None) -> float:
        whole = dequantize(codes, scale, base, format).reshape(len(weight), -1)[:, :INPUTS]
        return loss(weight, np.where(exact, moved, whole), H)

    better = way(weight, H, codes, scale, base, format, outliers=kept)
    assert error(*better) < 0.97 * error(codes, scale, base)


@pytest.mark.parametrize("way", WAYS)
def test_constant_weights_stay(way: Any) -> None:
    """Blocks of one value have a step of 0."""
    format = parse_format("q4")
    weight = np.full((3, 64), 0.25, np.float32)
    blocks = split_into_blocks(weight, 32)
    numbers = nearest_numbers(blocks, format)
    start = (nearest_codes(blocks, *numbers, format), *numbers)
    codes, scale, base = way(weight, np.eye(64) + 0.1, *start, format)
    np.testing.assert_array_equal(dequantize(codes, scale, base, format), blocks)


def test_rows_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    (weight, x), format = correlated(4), parse_format("q4")
    H = (x.T @ x).astype(np.float64)
    whole = quantize(weight, format, method="gptq", hessian=H)
    monkeypatch.setattr("jinfer.quant.gptq._ROWS", 32)
    monkeypatch.setattr("jinfer.quant.gptq._EVEN", 8)
    parts = quantize(weight, format, method="gptq", hessian=H)
    np.testing.assert_array_equal(whole.words, parts.words)
    np.testing.assert_array_equal(whole.scales, parts.scales)
