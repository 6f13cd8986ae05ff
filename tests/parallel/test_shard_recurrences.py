"""Which modules of a layer with a state tensor parallelism divides."""

from pathlib import Path
from typing import Any

import pytest

from jinfer.loader.open_model import open_model
from jinfer.modelspec.block import Block
from jinfer.nn.tensor_parallel import ColumnLinearBlock, RowLinearBlock, ShardedRMSBlock
from jinfer.parallel.shard_recurrences import divided_modules

GOLDENS = Path(__file__).parents[1] / "goldens"
# Modules that stay whole beside norms of the layer's input, feed-forwards and activations.
WHOLE = {
    "lfm2": set(),
    "mamba": set(),
    "granite4_h_tiny": {"in_b", "in_c", "conv_b", "conv_c"},  # of one group, which all heads share
    "nemotron_h": set(),
    "qwen3_5": set(),
    "kimi_linear": {"decay_low", "gate_low"},
    "recurrent_gemma": set(),
    "rwkv4": {
        "time_shift",
        "mix_r",
        "mix_k",
        "mix_v",
        "channel_shift",
        "mix_gate",
        "mix_up",
        "gate",
    },
}


def divided(
    name: str, devices: int, unit: int = 1, overrides: dict[str, Any] | None = None
) -> tuple[dict[str, Block], set[str]]:
    """The divided blocks of a golden's first layer, and the names of the others."""
    stack = open_model(GOLDENS / name, overrides or {}).spec.decoder
    assert stack is not None
    found = divided_modules(stack.layers[0], devices, "t", lambda _: unit, stack.carried)
    rest = {name for name, _ in stack.layers[0].modules if name not in found}
    return {name: block for name, (block, _) in found.items()}, rest


@pytest.mark.parametrize("name", WHOLE)
def test_what_stays_whole(name: str) -> None:
    own, whole = divided(name, 2)
    rest = {n for n in whole if not n.endswith("norm")} - {"act", "sigmoid", "relu2"}
    assert rest - {"ffn", "shared_expert"} == WHOLE[name]
    kinds = [type(block) for block in own.values()]
    assert ColumnLinearBlock in kinds
    assert RowLinearBlock in kinds
    assert (ShardedRMSBlock in kinds) == (name == "granite4_h_tiny")


def test_what_does_not_divide() -> None:
    assert divided("qwen3_5", 3)[0] == {}
    assert divided("recurrent_gemma", 3)[0] == {}
    assert divided("qwen3_5", 2, unit=4096)[0] == {}, "quantization blocks would be split"
    assert divided("minimax", 2)[0] == {}, "a decay of its own for each head"


def test_a_part_of_a_vector_needs_the_whole() -> None:
    layer = """
    n = attn_norm(x)
    x = x + conv_out(conv_c(n) * conv(conv_b(n)[:hidden] * conv_x(n)))
    x = x + ffn(ffn_norm(x))
    """
    overrides = {"decoder": {"variants": {"conv": {"layer": layer}}}}
    assert divided("lfm2", 2, overrides=overrides)[0] == {}
