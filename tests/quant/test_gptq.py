"""GPTQ, against a plain implementation and against searching alone."""

from typing import Any

import numpy as np
import pytest

from jinfer.quant import parse_format
from jinfer.quant.gptq import DAMPING, quantize_gptq
from jinfer.quant.quantize_matrix import quantize
from jinfer.quant.round_to_nearest import dequantize
from tests.quant.reference import quantize_gptq_reference

OUTPUTS, INPUTS = 48, 200  # the last block is not whole
WAYS = [quantize_gptq, quantize_gptq_reference]


def correlated(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A weight, and inputs that lean towards some directions, on some columns much larger."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(1024, INPUTS)) * np.exp(rng.normal(size=INPUTS))
    x = x @ rng.normal(size=(INPUTS, INPUTS)) / np.sqrt(INPUTS) * np.exp(rng.normal(size=INPUTS))
    return rng.normal(size=(OUTPUTS, INPUTS)).astype(np.float32), x.astype(np.float32)


def output_error(x: np.ndarray, weight: np.ndarray, other: np.ndarray) -> float:
    """Relative, of x @ weight.T."""
    return float(np.linalg.norm(x @ (weight - other).T) / np.linalg.norm(x @ weight.T))


@pytest.mark.parametrize("name", ["q2", "q3.5", "q4_sym", "q4_b128", "q3_b64_nl"])
def test_gptq_lowers_the_error_of_outputs(name: str) -> None:
    (weight, x), format = correlated(), parse_format(name)
    products = x.T @ x
    searched = quantize(weight, format, method="mse", importance=np.diag(products))
    fed = quantize(weight, format, method="gptq", hessian=products)
    assert fed.shape == weight.shape
    before, after = (output_error(x, weight, np.asarray(t.dequantize())) for t in (searched, fed))
    assert after < 0.6 * before


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["q3", pytest.param("q3.5_sym", marks=pytest.mark.soak)])
def test_every_column_follows_the_gptq_equation(name: str, way: Any) -> None:
    """The update of every column by itself, with the inverse of H shrinking as columns are done."""
    (weight, x), format = correlated(1), parse_format(name)
    H = (x.T @ x).astype(np.float64)
    codes, scale, base, moved = way(weight, H, format)
    full = dequantize(codes, scale, base, format).reshape(OUTPUTS, -1)[:, :INPUTS]

    # Blocks by falling importance, columns within a block likewise.
    means = [np.diag(H)[k : k + 32].sum() / 32 for k in range(0, INPUTS, 32)]
    order = [
        k
        for block in np.argsort(means)[::-1]
        for k in 32 * block + np.argsort(-np.diag(H)[32 * block : 32 * block + 32])
    ]
    H += DAMPING * np.diag(H).mean() * np.eye(INPUTS)
    left, w = list(order), weight.astype(np.float64)
    for column in order:
        inverse = np.linalg.inv(H[np.ix_(left, left)])
        np.testing.assert_allclose(moved[:, column], w[:, column], rtol=0, atol=2e-4)
        error = w[:, column] - full[:, column]
        w[:, left] -= np.outer(error, inverse[0] / inverse[0, 0])
        left = left[1:]


@pytest.mark.parametrize("way", WAYS)
def test_exact_weights_make_no_error(way: Any) -> None:
    (weight, x), format = correlated(2), parse_format("q3")
    exact = np.random.default_rng(0).random(weight.shape) < 0.05
    codes, scale, base, moved = way(weight, x.T @ x, format, exact=exact)
    full = dequantize(codes, scale, base, format).reshape(OUTPUTS, -1)[:, :INPUTS]
    codes, scale, base, _ = way(weight, x.T @ x, format)
    before = dequantize(codes, scale, base, format).reshape(OUTPUTS, -1)[:, :INPUTS]
    mixed = output_error(x, weight, np.where(exact, moved, full))
    assert mixed < 0.97 * output_error(x, weight, before)


@pytest.mark.parametrize("name", ["q2", "q4", "q3.5_sym", "q8_b128", "q4_nl"])
@pytest.mark.parametrize("share", [0.0, 0.05])
def test_result_equals_the_reference(name: str, share: float) -> None:
    (weight, x), format = correlated(5), parse_format(name)
    H = (x.T @ x).astype(np.float64)
    exact = np.random.default_rng(0).random(weight.shape) < share if share else None
    ours, expected = (way(weight, H, format, exact=exact) for way in WAYS)
    # A weight between two codes may go either way, and others in its row with it.
    same = (ours[0] == expected[0]).all(axis=(1, 2))
    assert same.mean() > 0.8
    for a, b in zip(ours[1:], expected[1:], strict=True):
        if a is not None and b is not None:
            np.testing.assert_allclose(a[same], b[same], rtol=1e-2, atol=2e-3)

    def error(codes: np.ndarray, scale: np.ndarray, base: np.ndarray | None, _: Any) -> float:
        full = dequantize(codes, scale, base, format).reshape(OUTPUTS, -1)[:, :INPUTS]
        return output_error(x, weight, full)

    assert error(*ours) == pytest.approx(error(*expected), rel=0.01)


def test_stacks_have_their_own_inputs() -> None:
    format = parse_format("q4")
    pairs = [correlated(seed) for seed in range(2)]
    weights = np.stack([weight for weight, _ in pairs])
    products = np.stack([x.T @ x for _, x in pairs])
    whole = quantize(weights, format, method="gptq", hessian=products)
    for e in range(2):
        one = quantize(weights[e], format, method="gptq", hessian=products[e])
        np.testing.assert_array_equal(whole[e].words, one.words)


@pytest.mark.parametrize(
    ("products", "message"),
    [
        (None, "needs the products of the layer's inputs; calibrate"),
        (np.eye(3), r"are \[3, 3\], not \[64, 64\]; collect them from the layer"),
        (np.zeros((64, 64)), "not finite or all 0; calibrate with another text"),
        (np.full((64, 64), np.nan), "not finite or all 0"),
        (np.eye(64) - 2 * np.eye(64)[0] * np.eye(64)[:, :1], "not positive definite"),
    ],
)
def test_invalid_hessians_are_errors(products: np.ndarray | None, message: str) -> None:
    weight = np.random.default_rng(0).normal(size=(4, 64))
    with pytest.raises(ValueError, match=message) as caught:
        quantize(weight, parse_format("q4"), method="gptq", hessian=products)
    assert "\n" not in str(caught.value)
