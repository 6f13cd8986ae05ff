"""Sharding rules: heads and columns of each device, and the modules around a recurrence."""

from pathlib import Path
from typing import Any

import pytest

from jinfer.loader.open_model import open_model
from jinfer.modelspec.block import Block
from jinfer.nn.tensor_parallel import ColumnLinearBlock, RowLinearBlock, ShardedRMSBlock
from jinfer.parallel.sharding_rules import (
    AxisSharding,
    ShardingError,
    divided_modules,
    in_elements,
    shard_evenly,
    shard_heads,
)

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


def units(share: AxisSharding) -> list[list[int]]:
    """The units of each part, without padding."""
    pairs = zip(share.starts, share.counts, strict=True)
    return [list(range(start, start + count)) for start, count in pairs]


@pytest.mark.parametrize(
    ("query", "key", "devices", "of_query", "of_key"),
    [
        (4, 4, 2, [[0, 1], [2, 3]], [[0, 1], [2, 3]]),
        (4, 2, 2, [[0, 1], [2, 3]], [[0], [1]]),
        # Fewer key and value heads than devices: some have the same one.
        (4, 2, 4, [[0], [1], [2], [3]], [[0], [0], [1], [1]]),
        (6, 1, 4, [[0, 1], [2, 3], [4, 5], []], [[0], [0], [0], [0]]),
        (10, 2, 4, [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]], [[0], [0], [1], [1]]),
        # A number that does not divide ends in padding.
        (6, 6, 4, [[0, 1], [2, 3], [4, 5], []], [[0, 1], [2, 3], [4, 5], []]),
        (6, 3, 2, [[0, 1, 2, 3], [4, 5]], [[0, 1], [2]]),
    ],
)
def test_every_query_head_finds_its_key_head(
    query: int, key: int, devices: int, of_query: list[list[int]], of_key: list[list[int]]
) -> None:
    queries, keys = shard_heads(query, key, devices)
    assert units(queries) == of_query
    assert units(keys) == of_key
    group = queries.size // keys.size
    for own, held in zip(units(queries), units(keys), strict=True):
        for place, head in enumerate(own):
            assert held[place // group] == head // (query // key)


def test_heads_that_cannot_be_divided() -> None:
    with pytest.raises(ShardingError, match="4 heads cannot be divided among 8 devices"):
        shard_heads(4, 4, 8)
    with pytest.raises(ShardingError, match="2 key and value heads do not divide among 3 devices"):
        shard_heads(6, 2, 3)


def test_columns_stay_in_whole_blocks() -> None:
    share = shard_evenly(112, 4, 32)
    assert (share.size, units(share)) == (
        32,
        [[*range(32)], [*range(32, 64)], [*range(64, 96)], [*range(96, 112)]],
    )
    assert share.padding == 16
    assert shard_evenly(112, 4).size == 28


def test_elements_of_units() -> None:
    share = in_elements(shard_evenly(6, 4), 60)
    assert (share.total, share.size, share.starts) == (60, 20, (0, 20, 40, 60))
    assert share.counts == (20, 20, 20, 0)


def divided(
    name: str, devices: int, unit: int = 1, overrides: dict[str, Any] | None = None
) -> tuple[dict[str, Block], set[str]]:
    """The divided blocks of a golden's first layer, and the names of the others."""
    stack = open_model(GOLDENS / name, overrides or {}).spec.decoder
    assert stack is not None
    found = divided_modules(stack.layers[0], devices, lambda _: unit, stack.carried)
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
