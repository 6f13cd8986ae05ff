"""`when`: modules that only some checkpoints have, and the lines of formulas that go with them."""

import tomllib
from typing import Any

import pytest

from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.resolve_spec import CheckpointFacts, resolve

from .helpers import MODEL, PATH, error_of, facts, model, resolved

SPARE = {"kind": "linear", "outputs": "$missing", "when": False}
STEM = "x = embed(tokens)\nx = x + position(positions)\nembed_norm(x)"


def with_stem(config: dict[str, Any]) -> ModelSpec:
    table = model(
        decoder__stem=STEM,
        decoder__modules__position={"kind": "learned_positions", "when": "$learned | false"},
        decoder__modules__embed_norm={"kind": "layer", "when": "$normed"},
    )
    return resolved(table, config)


@pytest.mark.parametrize(
    ("config", "calls"),
    [
        ({"learned": True, "normed": True}, ("embed", "position", "embed_norm")),
        ({"learned": True, "normed": False}, ("embed", "position")),
        ({"normed": True}, ("embed", "embed_norm")),
        ({"normed": False}, ("embed",)),
    ],
)
def test_lines_go_with_their_modules(config: dict[str, Any], calls: tuple[str, ...]) -> None:
    spec = with_stem(config)
    assert spec.decoder is not None
    assert spec.decoder.stem.calls == calls
    assert {name for name, _ in spec.decoder.modules} == {*calls, "norm"} - {"embed"}


def test_what_is_left_of_a_formula_is_computed() -> None:
    spec = with_stem({"normed": False, "learned": True})
    assert spec.decoder is not None
    effect = {"embed": 3.0, "position": 4.0}
    inputs = {"tokens": 0, "positions": 0, "token_types": 0}
    value, _ = spec.decoder.stem.run(inputs, lambda name, arguments: effect[name])
    assert value == 7.0


def test_a_tensor_can_decide() -> None:
    table = model(
        decoder__head="x = norm(x)\nlogits(project(x))\nlogits(x)",
        decoder__modules__project={"kind": "linear", "when": "has('*.project.weight')"},
    )
    for tensors, calls in (((), ("norm", "logits")), (("a.project.weight",), ("project",))):
        spec = resolve([table], PATH, facts({}, tensors), {})
        assert spec.decoder is not None
        assert set(calls) <= set(spec.decoder.head.calls)
        assert ("project" in dict(spec.decoder.modules)) == bool(tensors)


def test_modules_that_only_lost_lines_call_are_left_out() -> None:
    """Of the stack and of the whole model alike: there are no tensors for them."""
    table = model(
        modules__extra={"kind": "linear"},
        decoder__head="x = norm(x)\nx = act(extra(project(x)))\nlogits(x)",
        decoder__modules__project={"kind": "linear", "when": "$project"},
        decoder__modules__act={"kind": "activation"},
    )
    with_all, without = (resolved(table, {"project": value}) for value in (True, False))
    assert [name for name, _ in with_all.shared] == ["embed", "logits", "extra"]
    assert [name for name, _ in without.shared] == ["embed", "logits"]
    for spec, names in ((with_all, {"norm", "project", "act"}), (without, {"norm"})):
        assert spec.decoder is not None
        assert dict(spec.decoder.modules).keys() == names


def test_a_shared_module_can_be_left_out() -> None:
    table = model(modules__logits__when=False, decoder__head="x = norm(x)\nlogits(x)")
    spec = resolved(table)
    assert spec.decoder is not None
    assert [name for name, _ in spec.shared] == ["embed"]
    assert spec.decoder.head.calls == ("norm",)


def test_an_embedding_stays_for_the_head_that_is_tied_to_it() -> None:
    table = model(
        modules__logits__tied=True,
        modules__other={"kind": "embedding"},
        decoder__stem="x = other(tokens)\nx = skipped(embed(tokens))",
        decoder__modules__skipped={"kind": "linear", "when": False},
    )
    assert [name for name, _ in resolved(table).shared] == ["embed", "logits", "other"]


def test_a_module_of_some_layers() -> None:
    table = model(
        dims__layers=3,
        decoder__layer="n = x\nn = pre(x)\nx + attn(n)",
        decoder__modules__pre={"kind": "rms", "when": "i > 0"},
    )
    decoder = resolved(table).decoder
    assert decoder is not None
    assert [layer.wiring.calls for layer in decoder.layers] == [
        ("attn",), ("pre", "attn"), ("pre", "attn"),
    ]  # fmt: skip
    assert decoder.layers[1] is decoder.layers[2]


def test_variants_differ_in_their_modules() -> None:
    """A module is left out of one variant, and that variant's layer loses the line."""
    table = model(
        dims__intermediate=48,
        decoder__layer="x = x + attn(norm(x))\nx = x + ffn(x)",
        decoder__modules__ffn={"kind": "mlp"},
        decoder__variants={"whole": {}, "half": {"modules": {"ffn": {"when": False}}}},
        decoder__pattern=["half", "whole"],
    )
    decoder = resolved(table).decoder
    assert decoder is not None
    assert [layer.wiring.calls for layer in decoder.layers] == [
        ("attn", "norm"), ("attn", "norm", "ffn"),
    ]  # fmt: skip
    assert [len(layer.modules) for layer in decoder.layers] == [2, 3]


def test_variants_that_no_layer_is_decide_nothing() -> None:
    ffn = {"ffn": {"kind": "mlp", "when": "$missing"}}
    table = model(
        decoder__variants={
            "plain": {},
            "other": {"layer": "x + ffn(attn(norm(x)))", "modules": ffn},
        },
        decoder__pattern="plain",
    )
    assert resolved(table).decoder is not None


def test_an_attention_may_stand_on_two_lines_of_which_one_is_left() -> None:
    lines = "x = x + attn(first(x))\nx = x + attn(second(x))"
    norms = {
        "first": {"kind": "rms", "when": "$old"},
        "second": {"kind": "rms", "when": "not $old"},
    }
    table = model(decoder__layer=lines)
    table["decoder"]["modules"] |= norms
    for old, name in ((True, "first"), (False, "second")):
        decoder = resolved(table, {"old": old}).decoder
        assert decoder is not None
        assert decoder.layers[0].wiring.calls == ("attn", name)


def test_a_module_left_out_needs_no_line_and_no_values() -> None:
    """So a specification can drop a module of its family."""
    assert resolved(model(decoder__modules__spare=SPARE)) == resolved(model())


def test_when_is_no_part_of_a_module() -> None:
    assert resolved(model(decoder__modules__norm__when=True)) == resolved(model())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"decoder__modules__norm__when": "$x"}, "decoder.modules.norm.when: config.json has no"),
        ({"decoder__modules__norm__when": 1}, "decoder.modules.norm.when: 1 is not true or false"),
        ({"modules__logits__when": "heads"}, "modules.logits.when: 4 (heads) is not true or false"),
        ({"decoder__modules__attn__when": False}, "decoder.layer: every line needs one of attn, "
         "left out by when"),
        ({"modules__embed__when": False}, "decoder.stem: every line needs one of embed"),
        ({"decoder__layer": "n = spare(x)\nx + attn(n)", "decoder__modules__spare": SPARE},
         "decoder.layer: unknown name 'n'"),
        ({"decoder__modules__attn__position__when": 1}, "decoder.modules.attn.position.when: 1 is "
         "not true or false"),
        ({"decoder__modules__spare": {"kind": "linear", "when": True}}, "decoder.modules.spare: is "
         "called by no formula"),
    ],
)  # fmt: skip
def test_when_refused(changes: dict[str, Any], reason: str) -> None:
    assert error_of(model(**changes)).startswith(reason)


def test_a_format_may_supply_a_head_that_nothing_calls() -> None:
    text = MODEL.replace("logits = {", "unused = {").replace("logits(norm(x))", "norm(x)")
    table = tomllib.loads(text)
    assert error_of(table).startswith("modules.unused: is called by no formula")
    del table["modules"]["unused"]
    base = {"modules": {"logits": {"kind": "head", "tied": True}}}
    spec = resolve([table], PATH, CheckpointFacts("gguf"), base)
    assert [name for name, _ in spec.shared] == ["embed"]
