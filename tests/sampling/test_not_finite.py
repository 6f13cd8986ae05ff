"""Rows of logits with NaN or +inf have no token, and the others the tokens that they have alone."""

import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.sampling.samplers import NOT_FINITE
from tests.arrays import on_device
from tests.sampling.batches import SAMPLE, VOCAB, batch, params

pytestmark = pytest.mark.usefixtures("both_ways")


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "mirostat": 2}]
)
@pytest.mark.parametrize("odd", [np.nan, -np.nan, np.inf])
def test_rows_with_nan_or_infinity(fields: dict[str, float], odd: float) -> None:
    logits = np.random.default_rng(0).normal(0, 2, (4, VOCAB)).astype(np.float32)
    logits[:, 3], logits[3] = -np.inf, -np.inf  # what must not be drawn, and nothing to draw
    wrong = logits.copy()
    wrong[0, 0], wrong[2, -1] = odd, odd
    rows = batch(*[params(**fields)] * 4, vocab=VOCAB)
    tokens, progress = SAMPLE(on_device(wrong, jnp.float32), *rows)
    expected, after = SAMPLE(on_device(logits, jnp.float32), *rows)
    assert tokens.tolist() == [NOT_FINITE, expected[1], NOT_FINITE, expected[3]]
    assert min(expected.tolist()) >= 0
    assert np.isfinite(progress.mu[:3]).all()
    assert progress.mu[1] == after.mu[1]
