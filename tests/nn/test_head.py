"""The projection onto the vocabulary: what is chosen from is float32, whatever computes it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jinfer.modelspec import blocks
from jinfer.nn.projections import Head
from tests.arrays import on_device


def test_logits_of_bfloat16_are_not_rounded() -> None:
    """Two logits that bfloat16 cannot tell apart keep their order."""
    head: Any = Head(blocks.HeadSpec(kind="head", inputs=64, outputs=300), jnp.bfloat16)
    rng = np.random.default_rng(0)
    weight = on_device(rng.normal(size=(300, 64)), jnp.bfloat16)
    x = on_device(rng.normal(size=(5, 64)), jnp.bfloat16)
    definition: Any
    state: Any
    definition, state = nnx.split(head)
    state["weight"].set_value(weight)
    logits = jax.jit(lambda state, x: nnx.merge(definition, state)(x))(state, x)
    assert logits.dtype == jnp.float32
    wanted = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(np.asarray(logits), wanted, atol=1e-4)
    assert np.abs(np.asarray(wanted.astype(jnp.bfloat16), np.float64) - wanted).max() > 1e-2
