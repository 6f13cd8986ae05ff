"""Dense projections against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike
from numpy.testing import assert_allclose

from jinfer.ops.linear import linear
from tests.reference.numpy_blocks import linear as numpy_linear

INPUTS, OUTPUTS = 300, 7


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 2**-8), (jnp.float16, 2**-11)]
)
@pytest.mark.parametrize("rows", [(), (1,), (2, 3)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(dtype: DTypeLike, tolerance: float, rows: tuple[int, ...], biased: bool) -> None:
    """Accumulated in float32: off by no more than the one rounding of the result."""
    rng = np.random.default_rng(0)
    x, weight, bias = (
        jnp.asarray(rng.normal(size=shape), dtype)
        for shape in ((*rows, INPUTS), (OUTPUTS, INPUTS), (OUTPUTS,))
    )
    got = linear(x, weight, bias if biased else None)
    assert got.dtype == dtype
    wide = [np.asarray(each, np.float64) for each in (x, weight, bias)]
    wanted = numpy_linear(wide[0], wide[1], wide[2] if biased else None)
    assert_allclose(np.asarray(got, np.float64), wanted, rtol=tolerance, atol=1e-5)


def test_sums_are_not_rounded_on_the_way() -> None:
    """512 + 1 + ... + 1 is 512 to whoever adds in bfloat16."""
    x = jnp.ones(513, jnp.bfloat16)
    weight = jnp.concatenate([jnp.full(1, 512, jnp.bfloat16), jnp.ones(512, jnp.bfloat16)])
    assert linear(x, weight[None]).item() == 1024
