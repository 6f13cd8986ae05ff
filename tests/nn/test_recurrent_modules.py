"""Recurrent modules: what surrounds a recurrence has the same bits for a row in any company."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jinfer.modelspec.recurrent_blocks import BonusSpec
from jinfer.nn.recurrent_modules import Bonus, unit_length

HEADS, DIM = 16, 128
ROWS = np.random.default_rng(3).standard_normal((3, 8, HEADS, DIM)).astype(np.float32)


def bonus(*vectors: jax.Array) -> jax.Array:
    module = Bonus(BonusSpec(kind="bonus", heads=HEADS, key_dim=DIM), "float32")
    module.weight = nnx.Param(jnp.asarray(ROWS[0, 0]))
    return module(*(each.reshape(1, -1, HEADS * DIM) for each in vectors))[0]


@pytest.mark.parametrize(
    ("operation", "inputs"), [(unit_length, 1), (bonus, 3)], ids=["unit_length", "bonus"]
)
@pytest.mark.usefixtures("optimized")
def test_rows_are_batch_invariant(operation: Callable[..., jax.Array], inputs: int) -> None:
    compiled = jax.jit(operation)
    together = np.asarray(compiled(*ROWS[:inputs]))
    for size in (1, 2, 4):
        alone = np.asarray(compiled(*ROWS[:inputs, :size]))
        np.testing.assert_array_equal(alone, together[:size])


def test_unit_length() -> None:
    wanted = ROWS[0] / np.linalg.norm(ROWS[0], axis=-1, keepdims=True)
    np.testing.assert_allclose(unit_length(ROWS[0]), wanted, atol=1e-6)
