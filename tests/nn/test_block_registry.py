"""Every block has a Flax module, whose parameters name the axes that the block names."""

from typing import Any, get_args

import jax.numpy as jnp
import pytest
from flax import nnx

from jinfer.modelspec.block import Block
from jinfer.modelspec.blocks import BLOCKS, AnyBlock
from jinfer.modelspec.eagle_head import HiddenTapSpec
from jinfer.modelspec.table_reader import fields, read_value
from jinfer.nn.block_registry import MODULES, build_module
from tests.modelspec.helpers import values

DIMS = {
    "vocab": 32,
    "hidden": 16,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "context": 64,
    "intermediate": 24,
    "experts": 4,
    "top_k": 2,
    "expert_intermediate": 24,
    "latent_rank": 12,
    "nope_dim": 8,
    "rope_dim": 4,
    "value_dim": 8,
    "ssm_width": 24,
    "ssm_heads": 4,
    "ssm_groups": 2,
    "ssm_states": 8,
    "delta_heads": 4,
    "delta_key_heads": 2,
    "delta_key_dim": 8,
    "delta_value_dim": 8,
    "lru_width": 16,
}
# Keys without a default.
GIVEN: dict[str, dict[str, Any]] = {
    "grid_positions": {"side": 4},
    "latent_attention": {"position": {"kind": "rope", "dim": 4}},
    "merge": {"size": 2},
    "mix": {"inputs": 2, "outputs": 3},
    "repeat": {"times": 2},
    "select": {"indices": [0, 2]},
    "sum": {"parts": 2},
}


def test_every_block_of_the_language_has_a_module() -> None:
    of_language = {cls for cls in MODULES if cls.__module__.startswith("jinfer.modelspec")}
    assert of_language - {HiddenTapSpec} == set(BLOCKS)


@pytest.mark.parametrize("cls", BLOCKS)
def test_axes(cls: Any) -> None:
    (kind,) = get_args(fields(cls)["kind"][1])
    table = {"kind": kind, **GIVEN.get(kind, {})}
    block: Block = read_value(AnyBlock, table, values(DIMS), "some.key")
    assert isinstance(block, cls)
    _, state = nnx.split(build_module(block, jnp.float32))
    axes = [leaf.get_metadata()["axes"] for _, leaf in nnx.to_flat_state(state)]
    named = {axis for one in axes for axis in one}
    assert named & {"heads", "kv_heads", "mlp", "vocab"} == block.axes().keys()
