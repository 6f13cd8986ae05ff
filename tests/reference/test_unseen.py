"""The invented wiring is a causal model in which every parameter counts."""

import numpy as np
import pytest

from .numpy_unseen import VOCAB, WINDOW, numpy_forward, random_params

TOKENS = np.random.default_rng(0).integers(0, VOCAB, 4 * WINDOW)


def test_later_tokens_change_nothing_before_them() -> None:
    params = random_params(0)
    changed = TOKENS.copy()
    changed[20] = (changed[20] + 1) % VOCAB
    before, after = numpy_forward(params, TOKENS), numpy_forward(params, changed)
    assert np.array_equal(before[:20], after[:20])
    assert (np.abs(before[20:] - after[20:]).max(axis=-1) > 1e-3).all()


@pytest.mark.parametrize("name", random_params(0))
def test_every_parameter_counts(name: str) -> None:
    """So that a spec which leaves one out cannot agree by chance."""
    params = random_params(0)
    before = numpy_forward(params, TOKENS)
    params[name] = params[name][::-1]
    assert np.abs(numpy_forward(params, TOKENS) - before).max() > 0.05
