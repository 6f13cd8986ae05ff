"""Levels of a block: the nearest one of each number, and codes there and back."""

import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.quant import parse_format
from jinfer.quant.round_to_nearest import codes_of, largest_level, levels_of, nearest_levels

NAMES = ["q2_nl", "q3_b64_nl", "q4_nl", "q4", "q3.5_sym", "q4_sym", "q8"]


@pytest.mark.parametrize("name", NAMES)
def test_nearest_levels_and_their_codes(name: str) -> None:
    format = parse_format(name)
    every = levels_of(np.arange(format.levels, dtype=np.uint8), format)
    x = np.random.default_rng(0).uniform(1.3 * every.min() - 2, 1.3 * every.max() + 2, 4000)
    x = x.astype(np.float32)
    expected = np.abs(x[:, None] - every).argmin(axis=1)
    for xp in (np, jnp):
        levels = nearest_levels(xp.asarray(x), format, xp)
        np.testing.assert_array_equal(levels, every[expected])
        np.testing.assert_array_equal(codes_of(levels, format, xp), expected)
    if format.symmetric:
        assert abs(largest_level(format)) == np.abs(every).max()
