"""The norm's custom call gives what its definition in XLA's operations gives."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfer.cpu import norm as cpu
from jinfer.ops.norm import rms_norm, rms_norm_reference


@pytest.mark.skipif(not cpu.available(), reason="no C++ compiler here")
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 70), st.integers(1, 600), st.sampled_from([0.0, 1.0]), st.integers(0, 9))
def test_the_call_agrees_with_the_definition(
    rows: int, size: int, offset: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((rows, size), np.float32) * 3)
    weight = jnp.asarray(rng.standard_normal(size, np.float32))
    wanted = rms_norm_reference(x, weight, 1e-5, offset)
    given = cpu.rms_norm(x, weight, 1e-5, offset)
    np.testing.assert_allclose(given, wanted, rtol=2e-5, atol=1e-6)


def test_leading_axes_and_types_stay() -> None:
    x = jnp.ones((2, 3, 40), jnp.bfloat16)
    y = rms_norm(x, jnp.full(40, 2.0), 1e-6)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    np.testing.assert_allclose(y.astype(jnp.float32), 2.0)


def test_nothing_in_nothing_out() -> None:
    assert rms_norm(jnp.ones((0, 8)), jnp.ones(8), 1e-6).shape == (0, 8)
