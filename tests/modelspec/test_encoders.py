"""Encoders, and decoders beside an encoder: what their formulas are given and may call."""

from typing import Any

import pytest

from jinfer.modelspec.attention_blocks import CrossAttentionSpec
from jinfer.modelspec.blocks import PoolSpec
from jinfer.modelspec.layer_spec import StackSpec
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.toml_tables import merge, nested

from .helpers import error_of, model, resolved

ENCODER = {
    "stem": "norm(embed(tokens) + types(token_types) + position(positions))",
    "layer": "x = norm(x + attn(x))",
    "head": "hidden = x\npooled = pooler(first(x))\nlogits(norm(x))",
    "modules": {
        "norm": {"kind": "layer"},
        "attn": {"kind": "attention", "window": 8},
        "types": {"kind": "embedding", "size": 2},
        "position": {"kind": "learned_positions"},
        "first": {"kind": "pool"},
        "pooler": {"kind": "linear"},
    },
}
BESIDE = {
    "stem": "embed(tokens)",
    "layer": "x + attn(x)",
    "head": "x",
    "modules": {"attn": {"kind": "attention"}},
}


def encoder(**changes: Any) -> dict[str, Any]:
    """The tables of an encoder."""
    table = model()
    del table["decoder"]
    return model_over(table | {"encoder": ENCODER}, changes)


def seq2seq(**changes: Any) -> dict[str, Any]:
    """The tables of a decoder beside an encoder."""
    table = model(
        decoder__layer="x = x + attn(norm(x))\nx = x + cross(norm(x), encoded)",
        decoder__modules__cross={"kind": "cross_attention"},
    )
    return model_over(table | {"encoder": BESIDE}, changes)


def model_over(table: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` laid over a table, dots written as two underscores."""
    for key, value in changes.items():
        table = merge(table, nested(key.replace("__", "."), value))
    return table


def stack(spec: ModelSpec, name: str) -> StackSpec:
    return next(stack for stack in spec.stacks if stack.name == name)


def test_an_encoder() -> None:
    spec = resolved(encoder())
    assert [stack.name for stack in spec.stacks] == ["encoder"]
    assert spec.decoder is None
    found = spec.stacks[0]
    assert len(found.layers) == 2
    assert set(found.stem.calls) == {"norm", "embed", "types", "position"}
    assert dict(found.modules)["first"] == PoolSpec(kind="pool", take="first")


def test_the_results_of_a_head_are_what_it_assigns_and_its_value() -> None:
    head = resolved(encoder()).stacks[0].head
    effect = {"norm": 2.0, "first": 3.0, "pooler": 5.0, "logits": 7.0}
    value, assigned = head.run({"x": 1.0}, lambda name, args: effect[name] * args[0])
    assert (value, assigned["hidden"], assigned["pooled"]) == (14.0, 1.0, 15.0)


def test_a_head_may_end_by_assigning_any_name() -> None:
    table = encoder(modules__logits__when=False, encoder__modules__pooler__when=False)
    head = resolved(table).stacks[0].head
    assert head.run({"x": 1.0}, lambda name, args: 0.0) == (1.0, {"hidden": 1.0})


@pytest.mark.parametrize("take", ["first", "last", "mean"])
def test_pools(take: str) -> None:
    spec = resolved(encoder(encoder__modules__first__take=take))
    assert dict(spec.stacks[0].modules)["first"] == PoolSpec(kind="pool", take=take)  # type: ignore[arg-type]


def test_a_decoder_beside_an_encoder() -> None:
    spec = resolved(seq2seq(dims__encoder_layers=3, encoder__layers="encoder_layers"))
    assert [(stack.name, len(stack.layers)) for stack in spec.stacks] == [
        ("encoder", 3), ("decoder", 2),
    ]  # fmt: skip
    for layer in stack(spec, "decoder").layers:
        assert layer.wiring.calls == ("attn", "norm", "cross")
        assert dict(layer.modules)["cross"] == CrossAttentionSpec(
            kind="cross_attention", inputs=32, encoded=32, heads=4, head_dim=8
        )
    assert [name for name, _ in spec.shared] == ["embed", "logits"]


def test_cross_attention_has_its_own_sizes() -> None:
    cross = {"encoded": 48, "heads": 2, "bias": "qv", "scale": 1}
    spec = resolved(seq2seq(decoder__modules__cross=cross))
    block = dict(stack(spec, "decoder").layers[0].modules)["cross"]
    assert isinstance(block, CrossAttentionSpec)
    assert (block.encoded, block.heads, block.scale) == (48, 2, 1.0)
    assert [block.has_bias(letter) for letter in "qkvo"] == [True, False, True, False]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"encoder": 3}, "encoder: 3 is not a table"),
        ({"encoder__layer": None}, "encoder.layer: is missing; write the formula"),
        ({"encoder__stem": "embed(token_type)"}, "encoder.stem: unknown name 'token_type'; did you "
         "mean 'token_types'?"),
        ({"encoder__layer": "norm(attn(x)) + types(token_types)"}, "encoder.layer: unknown name "
         "'token_types'"),
        ({"encoder__layer": "attn(norm(x)) + encoded"}, "encoder.layer: unknown name 'encoded'"),
        ({"encoder__layer": "y = attn(norm(x))"}, "encoder.layer: ends by assigning y"),
        ({"encoder__stem": "y = embed(tokens)"}, "encoder.stem: ends by assigning y"),
        ({"encoder__head": "pooled = 3"}, "encoder.head: has no vectors as its value"),
        ({"encoder__layer": "norm(attn(first(x)))"}, "encoder.layer: calls first, a pool, which "
         "only the head formula of an encoder can"),
        ({"encoder__modules__first__take": "max"}, "encoder.modules.first.take: 'max' is not"),
        ({"encoder__modules__first__take": "means"}, "encoder.modules.first.take: 'means' is not "
         "one of the allowed words; did you mean 'mean'?"),
        ({"encoder__modules__attn": {"kind": "latent_attention", "latent_rank": 8, "nope_dim": 8,
          "rope_dim": 4, "value_dim": 8, "position": {"kind": "rope", "dim": 4}}},
         "encoder.layer: calls attn, a latent attention, which only a decoder can"),
        ({"encoder__modules__attn__position": {"kind": "disentangled", "buckets": 7}},
         "encoder.modules.attn.position.buckets: must be even and below max_distance"),
        ({"encoder__modules__attn__position": {"kind": "disentangled", "buckets": 128}},
         "encoder.modules.attn.position.buckets: must be even and below max_distance"),
        ({"encoder__modules__attn": {"kind": "cross_attention"}}, "encoder.layer: attn takes 2 "
         "arguments, not 1"),
        ({"modules__cross": {"kind": "cross_attention"}}, "modules.cross: belongs to the layers"),
    ],
)  # fmt: skip
def test_encoder_refused(changes: dict[str, Any], reason: str) -> None:
    assert error_of(encoder(**changes)).startswith(reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"decoder__layer": "x + cross(x)"}, "decoder.layer: cross takes 2 arguments, not 1"),
        ({"decoder__layer": "x + cross(encoded, x)"}, "decoder.layer: cross takes vectors such as "
         "x, not encoded"),
        ({"decoder__layer": "x + attn(encoded)"}, "decoder.layer: attn takes vectors such as x, not"
         " encoded"),
        ({"decoder__layer": "x + encoded"}, "decoder.layer: encoded: arithmetic takes vectors and"),
        ({"decoder__layer": "x + attn(cross(norm(cross(x, encoded)), encoded))"},
         "decoder.layer: calls cross, an attention, 2 times"),
        ({"decoder__stem": "embed(tokens) + cross(embed(tokens), encoded)"}, "decoder.stem: unknown"
         " name 'encoded'"),
        ({"decoder__head": "logits(cross(norm(x), encoded))"}, "decoder.head: unknown name 'enc"),
        ({"decoder__head": "logits(pool(norm(x)))", "decoder__modules__pool": {"kind": "pool"}},
         "decoder.head: calls pool, a pool, which only the head formula of an encoder can"),
        ({"decoder__modules__attn__position": {"kind": "disentangled", "buckets": 8}},
         "decoder.layer: calls attn, an attention with disentangled positions, which only an enc"),
        ({"decoder__modules__cross__bias": "x"}, "decoder.modules.cross.bias: 'x' is not true, "
         "false or letters of 'qkvo'"),
        ({"decoder__modules__cross__window": 8}, "decoder.modules.cross.window: unknown key"),
    ],
)  # fmt: skip
def test_decoder_beside_an_encoder_refused(changes: dict[str, Any], reason: str) -> None:
    assert error_of(seq2seq(**changes)).startswith(reason)


def test_a_decoder_alone_is_given_no_encoded() -> None:
    table = seq2seq()
    del table["encoder"]
    assert error_of(table).startswith("decoder.layer: unknown name 'encoded'; allowed: positions")
