"""Low-rank terms of several adapters beside one product."""

import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.ops.matmul import lora
from jinfer.ops.matmul.lora import Stacks, add_lora, row_adapters

RNG = np.random.default_rng(4)
SLOTS, RANK, INPUTS, OUTPUTS = 3, 8, 48, 40
A = RNG.normal(size=(SLOTS, RANK, INPUTS)).astype(np.float32)
B = RNG.normal(size=(SLOTS, OUTPUTS, RANK)).astype(np.float32)
SCALES = np.array([1.0, 0.5, 2.0, 1.0, -1.0], np.float32)
TABLE = np.stack([np.array([2, 0, 1, 0, 2], np.int32), SCALES.view(np.int32)], axis=1)


def added(x: np.ndarray, y: np.ndarray, rows: np.ndarray, b: np.ndarray = B) -> np.ndarray:
    at = row_adapters(jnp.asarray(TABLE), jnp.asarray(rows))
    stacks = Stacks(jnp.asarray(A), jnp.asarray(b))
    other = Stacks(jnp.asarray(A[::-1].copy()), jnp.zeros((SLOTS, 8, RANK)))
    ys = [jnp.asarray(y)[None], jnp.zeros((1, len(rows), 8))]
    first, second = add_lora(ys, jnp.asarray(x)[None], [stacks, other], at)
    assert not second.any()
    return np.asarray(first[0])


@pytest.mark.parametrize("grouped", [True, False])
def test_each_row_has_its_own(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not grouped:
        monkeypatch.setattr(lora, "supports_grouped", lambda weight: False)
    rows = np.array([4, 1, 0, -1, 2, 2, 3, 0, 1], np.int32)
    x = RNG.normal(size=(len(rows), INPUTS)).astype(np.float32)
    y = np.where(RNG.random((len(rows), OUTPUTS)) < 0.5, np.float32(-0.0), np.float32(1.5))
    b = B.copy()
    b[2] = np.nan if grouped else 1e30  # a slot that no row has
    found = added(x, y, rows, b)
    for i, row in enumerate(rows):
        slot = 0 if row < 0 else TABLE[row, 0]
        if not slot:
            assert found[i].tobytes() == y[i].tobytes()
            continue
        wanted = y[i] + SCALES[row] * (B[slot - 1] @ (A[slot - 1] @ x[i]))
        np.testing.assert_allclose(found[i], wanted, rtol=1e-4, atol=1e-4)
        if grouped:
            alone = added(x[i : i + 1], y[i : i + 1], rows[i : i + 1], b)
            np.testing.assert_array_equal(alone[0], found[i])
