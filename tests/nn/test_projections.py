"""Block-diagonal projections: their definition, and the same bits in any batch."""

from typing import Any

import jax
import numpy as np
from flax import nnx

from jinfer.modelspec.blocks import BlockLinearSpec
from jinfer.nn.projections import BlockLinear
from jinfer.ops.matmul import dense
from tests.arrays import on_device


def test_block_linear() -> None:
    rng = np.random.default_rng(2)
    x, weight, bias = (
        rng.standard_normal(s).astype(np.float32) for s in ((9, 64), (4, 8, 16), (4, 8))
    )
    block = BlockLinearSpec(kind="block_linear", inputs=64, outputs=32, blocks=4, bias=True)

    definition: Any
    state: Any
    definition, state = nnx.split(BlockLinear(block, np.float32))
    state["weight"].set_value(on_device(weight))
    state["bias"].set_value(on_device(bias))
    compiled = jax.jit(lambda x: nnx.merge(definition, state)(x))

    def run(x: np.ndarray) -> np.ndarray:
        return np.asarray(compiled(on_device(x)))

    y = run(x)
    expected = np.einsum("tbi,boi->tbo", x.reshape(9, 4, 16), weight) + bias
    np.testing.assert_allclose(y, expected.reshape(9, 32), rtol=0, atol=1e-5)
    if dense.reads_16_bit_weights():  # elsewhere XLA's bits vary with the batch
        alone = [run(x[i : i + 1]) for i in range(9)]
        np.testing.assert_array_equal(np.concatenate(alone), y)
