"""LoRA: low-rank terms of several adapters, added to one product."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.cpu import build_library
from jinfer.ops.matmul import lora
from jinfer.ops.matmul.lora import NORM_TERMS, Stacks, add_lora, rescale, row_adapters

RNG = np.random.default_rng(4)
SLOTS, RANK, INPUTS, OUTPUTS = 3, 8, 48, 40
A = RNG.normal(size=(SLOTS, RANK, INPUTS)).astype(np.float32)
B = RNG.normal(size=(SLOTS, RANK, OUTPUTS)).astype(np.float32)
SCALES = np.array([1.0, 0.5, 2.0, 1.0, -1.0], np.float32)
TABLE = np.stack([np.array([2, 0, 1, 0, 2], np.int32), SCALES.view(np.int32)], axis=1)
ROWS = np.array([4, 1, 0, -1, 2, 2, 3, 0, 1], np.int32)


CODES = Stacks(
    jnp.asarray(np.rint(40 * A).clip(-127, 127), jnp.int8),
    jnp.asarray(np.rint(40 * B).clip(-127, 127), jnp.int8),
    jnp.asarray(RNG.uniform(0.01, 0.03, (SLOTS, 2, RANK)), jnp.float32),
)


def added(
    x: np.ndarray, y: np.ndarray, rows: np.ndarray, b: np.ndarray = B, codes: Stacks | None = None
) -> np.ndarray:
    at = row_adapters(jnp.asarray(TABLE), jnp.asarray(rows))
    stacks = codes or Stacks(jnp.asarray(A), jnp.asarray(b))
    other = Stacks(jnp.asarray(A[::-1].copy()), jnp.zeros((SLOTS, RANK, 8)))
    ys = [jnp.asarray(y)[None], jnp.zeros((1, len(rows), 8))]
    first, second = add_lora(ys, jnp.asarray(x)[None], [stacks, other], at)
    assert not second.any()
    return np.asarray(first[0])


def use(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call, grouped products, or products with all slots."""
    if way != "called":
        no_call = SimpleNamespace(reads_16_bit_weights=lambda: False)
        monkeypatch.setattr(lora, "dense", no_call)
    if way == "masked":
        monkeypatch.setattr(lora, "_is_grouped", lambda stacks: False)


@pytest.mark.parametrize("way", ["called", "grouped", "masked"])
def test_each_row_uses_its_own_adapter(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(way, monkeypatch)
    x = RNG.normal(size=(len(ROWS), INPUTS)).astype(np.float32)
    y = np.where(RNG.random((len(ROWS), OUTPUTS)) < 0.5, np.float32(-0.0), np.float32(1.5))
    own = build_library.available() and way != "masked"
    b = B.copy()
    b[2] = np.nan if own else 1e30  # a slot that no row has
    found = added(x, y, ROWS, b)
    for i, row in enumerate(ROWS):
        slot = 0 if row < 0 else TABLE[row, 0]
        if not slot:
            assert found[i].tobytes() == y[i].tobytes()
            continue
        expected = y[i] + SCALES[row] * ((A[slot - 1] @ x[i]) @ B[slot - 1])
        np.testing.assert_allclose(found[i], expected, rtol=1e-4, atol=1e-4)
        if own:
            alone = added(x[i : i + 1], y[i : i + 1], ROWS[i : i + 1], b)
            np.testing.assert_array_equal(alone[0], found[i])


@pytest.mark.parametrize("way", ["called", "grouped", "masked"])
def test_matrices_in_int8(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(way, monkeypatch)
    x = RNG.normal(size=(len(ROWS), INPUTS)).astype(np.float32)
    y = np.full((len(ROWS), OUTPUTS), -0.0, np.float32)
    found = added(x, y, ROWS, codes=CODES)
    assert CODES.factors is not None
    a, b = (np.asarray(codes) * np.asarray(CODES.factors)[:, side, :, None]
            for side, codes in enumerate(CODES[:2]))  # fmt: skip
    for i, row in enumerate(ROWS):
        slot = 0 if row < 0 else TABLE[row, 0]
        if not slot:
            assert found[i].tobytes() == y[i].tobytes()
            continue
        expected = SCALES[row] * ((a[slot - 1] @ x[i]) @ b[slot - 1])
        np.testing.assert_allclose(found[i], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")
def test_the_call_has_the_bits_of_grouped_products(monkeypatch: pytest.MonkeyPatch) -> None:
    x = RNG.normal(size=(len(ROWS), INPUTS)).astype(np.float32)
    y = RNG.normal(size=(len(ROWS), OUTPUTS)).astype(np.float32)
    called = added(x, y, ROWS)
    use("grouped", monkeypatch)
    np.testing.assert_array_equal(added(x, y, ROWS), called)


@pytest.mark.parametrize("biased", [True, False])
def test_rows_with_magnitudes(biased: bool) -> None:
    """DoRA of the first and the third slot: W + c B A with rows of given lengths."""
    x = RNG.normal(size=(len(ROWS), INPUTS)).astype(np.float32)
    weight = RNG.normal(size=(OUTPUTS, INPUTS)).astype(np.float32)
    bias = RNG.normal(size=OUTPUTS).astype(np.float32) if biased else np.zeros(OUTPUTS, np.float32)
    norms = np.zeros((SLOTS, NORM_TERMS, OUTPUTS), np.float32)
    lengths = RNG.normal(size=OUTPUTS)  # of either sign
    for slot in (0, 2):
        term = B[slot].T @ A[slot]
        squares = (weight**2).sum(1), 2 * (weight * term).sum(1), (term**2).sum(1)
        norms[slot] = lengths, *squares
    own = np.where(ROWS < 0, 0, TABLE[ROWS, 0])
    at = row_adapters(jnp.asarray(TABLE), jnp.asarray(ROWS))
    y = added(x, x @ weight.T + bias, ROWS)
    found = rescale(jnp.asarray(y)[None], jnp.asarray(bias), jnp.asarray(norms), at)[0]
    for i, slot in enumerate(own):
        if slot in (1, 3):
            whole = weight + SCALES[ROWS[i]] * (B[slot - 1].T @ A[slot - 1])
            whole *= (lengths / np.linalg.norm(whole, axis=1))[:, None]
            np.testing.assert_allclose(found[i], whole @ x[i] + bias, rtol=1e-3, atol=1e-3)
        else:
            assert np.asarray(found[i]).tobytes() == y[i].tobytes()
