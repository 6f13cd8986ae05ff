"""Reading tables into dataclasses: types, unions, kinds, bounds, fields that belong together."""

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from jinfer.modelspec import feed_forward_blocks
from jinfer.modelspec.attention_blocks import AttentionSpec, LatentAttentionSpec, QKNormSpec
from jinfer.modelspec.blocks import AnyBlock
from jinfer.modelspec.bounded_types import Count, LayerCount, NotNegative, Positive, Size
from jinfer.modelspec.feed_forward_blocks import MoESpec
from jinfer.modelspec.position_blocks import RelativeBiasSpec, RopeScalingSpec, RopeSpec
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.table_reader import read_value

from .helpers import one_line, values

DIMS = {"hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": "hidden / heads", "context": 64}
DIMS |= {"vocab": 100, "intermediate": 48}
CONFIG = {"act": "gelu_new", "size": 7, "text": "64", "list": [1]}


@dataclass(frozen=True, kw_only=True)
class Plain:
    """No kind, one field that must be given."""

    count: int
    share: float = 0.5


def reading(cls: Any, written: Any) -> Any:
    return read_value(cls, written, values(DIMS, CONFIG), "some.key")


def refusal(cls: Any, written: Any, dims: dict[str, Any] | None = None) -> str:
    with pytest.raises(SpecError) as caught:
        read_value(cls, written, values(DIMS if dims is None else dims, CONFIG), "some.key")
    return one_line(caught.value)


@pytest.mark.parametrize(
    ("cls", "written", "expected"),
    [
        (int, 3, 3),
        (int, 3.0, 3),
        (int, "$size", 7),
        (float, 3, 3.0),
        (float, "hidden / 64", 0.5),
        (bool, True, True),
        (bool, "true", True),
        (bool, "heads > 3", True),
        (str, "a word", "a word"),
        (Literal["silu", "relu"], "silu", "silu"),
        (feed_forward_blocks.Activation, "$act | silu", "gelu_tanh"),
        (feed_forward_blocks.Activation, "swish", "silu"),
        (bool | str, "qkv", "qkv"),
        (bool | str, "false", False),
        (bool | str, "$none | true", True),
        (int | None, "none", None),
        (int | None, 5, 5),
        (float | None, "$missing | none", None),
        (Size, 1, 1),
        (Size | None, "none", None),
        (Count, 0, 0),
        (LayerCount, 10000, 10000),
        (NotNegative, 0, 0.0),
        (Positive, "1e-5", 1e-5),
        (Plain, {"count": "$size"}, Plain(count=7)),
        (Plain | None, {"count": 1, "share": 1}, Plain(count=1, share=1.0)),
        (Plain | None, "$missing | none", None),
    ],
)
def test_read(cls: Any, written: Any, expected: Any) -> None:
    result = reading(cls, written)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("cls", "written", "reason"),
    [
        (int, 3.5, "3.5 is not a whole number"),
        (int, True, "True is not a whole number"),
        (int, "hidden / 5", "6.4 (hidden / 5) is not a whole number"),
        (int, "$text", "'64' ($text) is not a whole number"),
        (int, "$list", "[1] ($list) is not a whole number"),
        (int, {}, "{} is not a whole number"),
        (int, float("inf"), "inf is not a whole number"),
        (int, float("nan"), "nan is not a whole number"),
        (int, None, "None is not a whole number"),
        (float, False, "False is not a number"),
        (float, [1.0], "[1.0] is not a number"),
        (float, float("nan"), "nan is not a number"),
        (float, 10**400, "is not a number"),
        pytest.param(float, 1 << 90000, "a number of too many digits is not a number", id="digits"),
        (bool, 1, "1 is not true or false"),
        (bool, "heads", "4 (heads) is not true or false"),
        (str, 3, "3 is not a text"),
        (bool | str, 3, "3 is not true or false or a text"),
        (int | None, "$text", "is not a whole number or none"),
        (
            feed_forward_blocks.Activation,
            "silo",
            "'silo' is not one of the allowed words; did you mean 'silu'?",
        ),
        (
            feed_forward_blocks.Activation,
            3,
            "3 is not one of the allowed words; allowed: gelu, gelu_tanh",
        ),
        (feed_forward_blocks.Activation, ["silu"], "['silu'] is not one of the allowed words"),
        (feed_forward_blocks.Activation, "clamped_swiglu", "allowed: gelu, gelu_tanh, quick_gelu"),
        (Size, 0, "0 is not a whole number from 1 to 2^31 - 1"),
        (Size, -1, "-1 is not a whole number from 1 to 2^31 - 1"),
        (Size, 2**31, "2147483648 is not a whole number from 1 to 2^31 - 1"),
        (Size, 10**400, "is not a whole number from 1 to 2^31 - 1"),
        (Size, 1.5, "1.5 is not a whole number from 1 to 2^31 - 1"),
        (Size | None, 0, "0 is not a whole number from 1 to 2^31 - 1 or none"),
        (Count, -1, "-1 is not a whole number from 0 to 2^31 - 1"),
        (LayerCount, 10**9, "1000000000 is not a whole number from 1 to 10000"),
        (Positive, 0, "0 is not a number above 0"),
        (NotNegative, -1e-9, "-1e-09 is not a number from 0 on"),
        (Plain, 3, "3 is not a table { ... }"),
        (Plain, {}, "some.key.count: is missing"),
        (Plain, {"count": 1, "shares": 2}, "some.key.shares: unknown key; did you mean 'share'?"),
        (Plain, {"count": "x"}, "some.key.count: unknown name 'x'"),
        (AnyBlock, 3, "some.key: 3 is not a table { ... }"),
        (AnyBlock, [], "some.key: [] is not a table { ... }"),
        (
            AnyBlock,
            {},
            "some.key.kind: is missing; allowed: activation, attention, bias, block_linear",
        ),
        (
            AnyBlock,
            {"kind": "atention"},
            "some.key.kind: unknown kind 'atention'; did you mean 'att",
        ),
        (AnyBlock, {"kind": 3}, "some.key.kind: unknown kind 3; allowed: "),
        (
            AnyBlock,
            {"kind": ["rms"]},
            "some.key.kind: unknown kind ['rms']; did you mean 'rms'? allowed: ",
        ),
        (AnyBlock, {"kind": {}}, "some.key.kind: unknown kind {}; allowed: "),
        (
            AnyBlock,
            {"kind": "rms", "epsilon": 1},
            "some.key.epsilon: unknown key; did you mean 'eps'? allowed: eps, groups, kind",
        ),
        (AnyBlock, {"kind": "rms", "eps": -1}, "some.key.eps: -1 is not a number from 0 on"),
        (AnyBlock, {"kind": "rms", "size": 0}, "some.key.size: 0 is not a whole number from 1"),
    ],
)
def test_read_refused(cls: Any, written: Any, reason: str) -> None:
    assert reason in refusal(cls, written)


def test_fields_left_out_are_dimensions_or_defaults() -> None:
    attention = reading(AnyBlock, {"kind": "attention", "position": {"kind": "rope"}})
    assert attention == AttentionSpec(
        kind="attention", inputs=32, outputs=32, heads=4, kv_heads=2, head_dim=8,
        position=RopeSpec(kind="rope", dim=8),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dims", "reason"),
    [
        ({"hidden": 0}, "dims.hidden: 0 is not a whole number from 1 to 2^31 - 1"),
        ({"heads": -4}, "dims.heads: -4 is not a whole number"),
        ({"heads": 5}, "dims.head_dim: 6.4 (hidden / heads) is not a whole number"),
        ({"heads": "many"}, "dims.heads: unknown name 'many'"),
        ({"head_dim": "'a'"}, "dims.head_dim: 'a' ('a') is not a whole number"),
        ({"kv_heads": 3}, "some.key.kv_heads: 3 does not divide heads = 4"),
    ],
)
def test_wrong_dimension_is_named(dims: dict[str, Any], reason: str) -> None:
    table = {"kind": "attention", "position": {"kind": "rope"}}
    assert reason in refusal(AnyBlock, table, DIMS | dims)


def test_missing_dimension_names_who_asks() -> None:
    assert refusal(AnyBlock, {"kind": "rms"}, {}) == (
        "some.key.size: needs dims.hidden, which is not given; set it in [dims]"
    )


ROPE = {"kind": "rope"}
ATTENTION = {"kind": "attention"}
RELATIVE = {"kind": "relative"}
EXPERTS = {"kind": "moe", "experts": 8, "top_k": 2, "width": 16}
LATENT = {
    "kind": "latent_attention", "latent_rank": 8, "nope_dim": 8, "rope_dim": 4, "value_dim": 8,
    "position": {"kind": "rope", "dim": 4},
}  # fmt: skip


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (ATTENTION | {"heads": 6, "kv_heads": 4}, "some.key.kv_heads: 4 does not divide heads = 6"),
        (ATTENTION | {"bias": "qkx"}, "some.key.bias: 'qkx' is not true, false or letters of 'qk"),
        (ATTENTION | {"window": 0}, "some.key.window: 0 is not a whole number from 1"),
        (ATTENTION | {"scale": 0}, "some.key.scale: 0 is not a number above 0"),
        (ATTENTION | {"position": ROPE | {"dim": 7}}, "some.key.position.dim: 7 is odd"),
        (ATTENTION | {"position": ROPE | {"dim": 10}}, "position.dim: 10 is more than head_dim"),
        (ATTENTION | {"position": ROPE | {"theta": 0}}, "position.theta: 0 is not a number above"),
        (ATTENTION | {"position": ROPE | {"theta": 1}}, "position.theta: 1.0 is not above 1"),
        (ATTENTION | {"position": ROPE | {"pairs": "half"}}, "did you mean 'halves'?"),
        (ATTENTION | {"position": {"kind": "ropes"}}, "unknown kind 'ropes'; did you mean 'rope'?"),
        (ATTENTION | {"position": "rope"}, "unknown name 'rope'"),
        (ATTENTION | {"position": 3}, "some.key.position: 3 is not a table { ... } or none"),
        ({"kind": "sinusoidal_positions", "width": 7}, "some.key.width: 7 is not an even number"),
        ({"kind": "sinusoidal_positions", "width": 2}, "some.key.width: 2 is not an even number"),
        ({"kind": "learned_positions", "offset": -1}, "some.key.offset: -1 is not a whole number"),
        ({"kind": "mlp", "activation": "clamped_swiglu"}, "some.key.activation: 'clamped_swiglu'"),
        ({"kind": "head", "tied": True, "normalize": True}, "some.key.normalize: cannot be true"),
        (ATTENTION | {"qk_norm": {"kind": "rsm"}}, "qk_norm.kind: unknown kind 'rsm'; did you"),
        (ATTENTION | {"qk_norm": {}}, "some.key.qk_norm.kind: is missing; allowed: l2, layer, rms"),
        (ATTENTION | {"qk_norm": {"kind": "rms", "over": "all"}}, "qk_norm.over: 'all' is not one"),
        (ATTENTION | {"qk_norm": {"kind": "rms", "eps": -1}}, "qk_norm.eps: -1 is not a number"),
        (ATTENTION | {"softcap": 0}, "some.key.softcap: 0 is not a number above 0 or none"),
        (ATTENTION | {"clip": -1}, "some.key.clip: -1 is not a number above 0 or none"),
        (ATTENTION | {"sinks": 1}, "some.key.sinks: 1 is not true or false"),
        (ATTENTION | {"position": RELATIVE | {"buckets": 30}}, "position.buckets: must be a"),
        (ATTENTION | {"position": RELATIVE | {"max_distance": 32}}, "position.buckets: must be a "
         "multiple of 4 below max_distance"),
        (ATTENTION | {"position": {"kind": "alibi", "factor": 0}}, "position.factor: 0 is not"),
        (LATENT | {"position": {"kind": "alibi"}}, "some.key.position.kind: unknown kind 'alibi'"),
        (LATENT | {"position": {"kind": "rope", "dim": 8}}, "position.dim: 8 is not rope_dim = 4"),
        (LATENT | {"query_rank": 0}, "some.key.query_rank: 0 is not a whole number from 1"),
        ({"kind": "latent_attention", "position": ROPE}, "needs dims.latent_rank, which is not"),
        ({"kind": "moe", "experts": 8, "top_k": 2}, "needs dims.expert_intermediate, which is not"),
        (EXPERTS | {"top_k": 9}, "some.key.top_k: 9 is more than the 8 experts to choose from"),
        (EXPERTS | {"groups": 3}, "some.key.groups: 3 does not divide experts = 8"),
        (EXPERTS | {"groups": 4, "top_k": 3}, "some.key.top_k: 3 is more than the 2 experts to ch"),
        (EXPERTS | {"top_k_groups": 2}, "some.key.top_k_groups: 2 is more than groups = 1"),
        (EXPERTS | {"groups": 8, "top_k_groups": 4, "group_score": "top_2"}, "some.key.group_score:"
         " top_2 needs groups of two experts or more"),
        (EXPERTS | {"scoring": "sparsemixer", "correction_bias": True}, "some.key.scoring: sparse"),
        (EXPERTS | {"gated": False, "activation": "clamped_swiglu"}, "some.key.activation: clam"),
    ],
)  # fmt: skip
def test_fields_that_do_not_fit_each_other(table: dict[str, Any], reason: str) -> None:
    assert reason in refusal(AnyBlock, table)


def test_norms_of_queries_and_keys() -> None:
    norm = {"kind": "layer", "over": "heads", "eps": 1e-5, "bias": True}
    attention: AttentionSpec = reading(AnyBlock, ATTENTION | {"qk_norm": norm})
    assert attention.qk_norm == QKNormSpec(kind="layer", over="heads", eps=1e-5, bias=True)
    rms = reading(AnyBlock, ATTENTION | {"qk_norm": {"kind": "rms"}})
    assert rms.qk_norm == QKNormSpec(kind="rms", over="head", eps=1e-6)
    assert reading(AnyBlock, ATTENTION | {"qk_norm": "none"}).qk_norm is None


def test_relative_positions_have_defaults() -> None:
    attention: AttentionSpec = reading(AnyBlock, ATTENTION | {"position": RELATIVE})
    assert attention.position == RelativeBiasSpec(kind="relative", buckets=32, max_distance=128)


def test_a_latent_attention_takes_its_sizes_from_the_dimensions() -> None:
    dims = DIMS | {"latent_rank": 24, "nope_dim": 12, "rope_dim": 4, "value_dim": 16}
    table = {"kind": "latent_attention", "position": {"kind": "rope", "dim": "rope_dim"}}
    block = read_value(AnyBlock, table, values(dims), "some.key")
    assert block == LatentAttentionSpec(
        kind="latent_attention", inputs=32, heads=4, latent_rank=24, query_rank=None, nope_dim=12,
        rope_dim=4, value_dim=16, position=RopeSpec(kind="rope", dim=4),
    )  # fmt: skip
    assert (
        read_value(AnyBlock, table | {"query_rank": 20}, values(dims), "some.key").query_rank == 20
    )


def test_a_mixture_of_experts_takes_its_sizes_from_the_dimensions() -> None:
    dims = DIMS | {"experts": 8, "top_k": 2, "expert_intermediate": 16}
    block = read_value(AnyBlock, {"kind": "moe"}, values(dims), "some.key")
    assert block == MoESpec(kind="moe", inputs=32, experts=8, top_k=2, width=16)


def scaled(scaling: Any) -> RopeScalingSpec | None:
    rope: RopeSpec = reading(RopeSpec, {"kind": "rope", "scaling": scaling})
    return rope.scaling


def test_scaling_is_read_from_a_config_table_whole() -> None:
    table = {"type": "linear", "rope_type": "linear", "factor": 4, "rope_theta": 5e5}
    assert scaled(table) == RopeScalingSpec(
        rope_type="linear", factor=4.0, original_max_position_embeddings=64
    )
    assert scaled({"rope_type": "default", "rope_theta": 1e4}) is None
    assert scaled({}) is scaled({"rope_theta": 1e4}) is scaled({"rope_type": "default"}) is None
    both = scaled({"type": "yarn", "rope_type": "linear", "factor": 4})
    assert both is not None
    assert both.rope_type == "linear"
    assert scaled({"type": "none"}) is None
    assert scaled("none") is None


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"factor": 2.0}, "some.key.scaling.rope_type: is missing"),
        ({"type": "longropes"}, "some.key.scaling.rope_type: 'longropes' is not one of"),
        ({"type": "longrope", "short_factor": [1.0, 2.0]}, "scaling.short_factor: has 2 numbers for"
         " 4 pairs"),
        ({"type": "longrope", "long_factor": [1, 1, 0, 1]}, "scaling.long_factor: has a number that"
         " is not above 0"),
        ({"type": "longrope", "long_factor": []}, "scaling.long_factor: [] is not a list of"),
        ({"type": "linear", "factor": 0}, "some.key.scaling.factor: 0 is not a number above 0"),
        *(
            ({"type": kind}, f"scaling.factor: is missing, which {kind} needs")
            for kind in ("linear", "llama3", "yarn", "dynamic")
        ),
        ({"type": "linear", "factr": 2}, "scaling.factr: unknown key; did you mean 'factor'?"),
        (
            {"type": "llama3", "low_freq_factor": 4, "factor": 2},
            "some.key.scaling.high_freq_factor: must be above low_freq_factor",
        ),
    ],
)  # fmt: skip
def test_scaling_refused(table: dict[str, Any], reason: str) -> None:
    assert reason in refusal(RopeSpec, {"kind": "rope", "scaling": table})


def test_bias_by_letter() -> None:
    def biased(bias: Any) -> str:
        attention: AttentionSpec = reading(AnyBlock, {"kind": "attention", "bias": bias})
        return "".join(letter for letter in "qkvo" if attention.has_bias(letter))

    assert [biased(b) for b in (True, False, "qkv", "o")] == ["qkvo", "", "qkv", "o"]
