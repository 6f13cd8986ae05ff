"""Layers, variants, patterns, and modules where they belong."""

from typing import Any

import pytest

from jinfer.modelspec.feed_forward_blocks import GatedMLPSpec
from jinfer.modelspec.model_spec import ModelSpec

from .helpers import MODEL, error_of, model, resolved

VARIANTS = {"full": {}, "windowed": {"modules": {"attn": {"window": "$sliding_window"}}}}


def windows(spec: ModelSpec) -> list[int | None]:
    """The window of every layer's attention."""
    assert spec.decoder is not None
    return [dict(layer.modules)["attn"].window for layer in spec.decoder.layers]  # type: ignore[attr-defined]


def with_pattern(pattern: Any, layers: Any = 4) -> dict[str, Any]:
    return model(dims__layers=layers, decoder__variants=VARIANTS, decoder__pattern=pattern)


def test_layers_without_variants_are_equal() -> None:
    spec = resolved(model())
    assert spec.decoder is not None
    first, second = spec.decoder.layers
    assert first == second
    assert [name for name, _ in first.modules] == ["attn", "norm"]
    assert first.wiring.calls == ("attn", "norm")
    assert [name for name, _ in spec.decoder.modules] == ["norm"]
    assert [name for name, _ in spec.shared] == ["embed", "logits"]


@pytest.mark.parametrize(
    ("pattern", "config", "expected"),
    [
        (["full", "windowed"], {}, [None, 8, None, 8]),
        (["windowed", "full", "full"], {}, [8, None, None, 8]),
        (["full"], {}, [None] * 4),
        ("full", {}, [None] * 4),
        ("windowed if i % 2 else full", {}, [None, 8, None, 8]),
        ("full if i == layers - 1 else windowed", {}, [8, 8, 8, None]),
        ("[full, windowed][i % 2]", {}, [None, 8, None, 8]),
        ("$types", {"types": ["windowed", "windowed", "full", "full"]}, [8, 8, None, None]),
        ("$layer_types | [full, windowed]", {}, [None, 8, None, 8]),
        ("windowed if i in $ones else full", {"ones": [1, 3]}, [None, 8, None, 8]),
        ("windowed if i >= $from else full | full", {}, [None] * 4),
        ("windowed if i >= heads / 2 else full", {}, [None, None, 8, 8]),
    ],
)  # fmt: skip
def test_pattern(pattern: Any, config: dict[str, Any], expected: list[int | None]) -> None:
    assert windows(resolved(with_pattern(pattern), {"sliding_window": 8} | config)) == expected


@pytest.mark.parametrize(
    ("window", "config", "expected"),
    [
        ("$sliding_window if i % 2 else none", {}, [None, 8, None, 8]),
        ("none if i == layers - 1 else 8", {}, [8, 8, 8, None]),
        ("$windows[i]", {"windows": [1, 2, 3, 3]}, [1, 2, 3, 3]),
        ("8 if $types[i] == 'local' else none | 4", {"types": ["local", "", "", ""]},
         [8, None, None, None]),
        ("8 if $types[i] == 'local' else none | 4", {}, [4] * 4),
    ],
)  # fmt: skip
def test_values_of_a_layers_modules_may_depend_on_its_number(
    window: str, config: dict[str, Any], expected: list[int | None]
) -> None:
    table = model(dims__layers=4, decoder__modules__attn__window=window)
    spec = resolved(table, {"sliding_window": 8} | config)
    assert windows(spec) == expected
    assert spec.decoder is not None
    assert len({id(layer) for layer in spec.decoder.layers}) == len(set(expected))


def test_a_layers_number_is_known_in_layers_only() -> None:
    table = model(decoder__modules__norm={"kind": "rms", "eps": "1e-6 * (i + 1)"})
    assert "unknown name 'i'" in error_of(table)
    assert "unknown name 'i'" in error_of(
        model(dims__window="i", decoder__modules__attn__window="window")
    )
    table = model(decoder__modules__attn__window="$windows[i]")
    assert "attn.window: '$windows[i]' has no value" in error_of(table, {"windows": [1]})


def test_variants_that_no_layer_is_need_no_values() -> None:
    assert windows(resolved(with_pattern("full"), {})) == [None] * 4


def test_number_of_layers() -> None:
    for table in (model(decoder__layers=3), model(dims__layers="2 + 1"), model(dims__layers=3.0)):
        spec = resolved(table)
        assert spec.decoder is not None
        assert len(spec.decoder.layers) == 3


def test_formulas_of_layers_know_their_number() -> None:
    decoder = resolved(model(decoder__layer="x / (i + 1) + attn(norm(x))")).decoder
    assert decoder is not None
    assert [dict(layer.wiring.constants) for layer in decoder.layers] == [{"i": 0}, {"i": 1}]
    for part in ("stem", "head"):
        text = model()["decoder"][part]
        assert "unknown name 'i'" in error_of(model(**{f"decoder__{part}": f"{text} * i"}))


def test_a_variant_has_its_own_wiring_and_modules() -> None:
    layer = "x = x + attn(norm(x))\nx + mix * ffn(norm(x)) / layers"
    table = model(
        dims__mix=0.5,
        dims__intermediate=48,
        decoder__variants={
            "plain": {"modules": {"attn": {"position": {"kind": "alibi"}}}},
            "wide": {"layer": layer, "modules": {"ffn": {"kind": "gated"}}},
        },
        decoder__pattern=["plain", "wide"],
    )
    decoder = resolved(table).decoder
    assert decoder is not None
    plain, wide = decoder.layers
    assert dict(plain.modules).keys() == {"norm", "attn"}
    assert isinstance(dict(wide.modules)["ffn"], GatedMLPSpec)
    assert dict(wide.wiring.constants) == {"mix": 0.5, "layers": 2}
    # another kind replaces the module's table, so the attention's rope is not merged with ALiBi
    assert "Alibi" in repr(plain.modules)
    assert "Rope" in repr(wide.modules)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"decoder": 3}, "decoder: 3 is not a table"),
        ({"decoder": []}, "decoder: [] is not a table"),
        ({"decoder__layer": 5}, "decoder.layer: 5 is no formula"),
        ({"decoder__layer": {}}, "decoder.layer: {} is no formula"),
        ({"decoder__stem": None}, "decoder.stem: is missing; write the formula"),
        ({"decoder__head": ["x"]}, "decoder.head: ['x'] is no formula"),
        ({"decoder__heads": "x"}, "decoder.heads: unknown key; did you mean 'head'?"),
        ({"decoder__modules": []}, "decoder.modules: [] is not a table"),
        ({"decoder__modules__norm": 3}, "decoder.modules.norm: 3 is not a table"),
        ({"decoder__modules__nrm": {"kind": "rms"}}, "decoder.modules.nrm: is called by no "
         "formula; did you mean 'norm'?"),
        ({"decoder__modules__embed": {"kind": "embedding"}}, "decoder.modules.embed: is declared in"
         " [modules] already"),
        ({"modules__extra": {"kind": "rms"}}, "modules.extra: is called by no formula"),
        ({"modules": 3}, "modules: 3 is not a table"),
        ({"modules__value": {"kind": "rms"}}, "modules.value: is a name that modules cannot have"),
        ({"decoder__modules__layers": {}}, "decoder.modules.layers: is a name that modules cannot"),
        ({"decoder__modules": {"_x": {}}}, "decoder.modules._x: is a name that modules cannot"),
        ({"modules__embed": "x"}, "modules.embed: unknown name 'x'"),
        ({"modules__attn": {"kind": "attention"}}, "modules.attn: belongs to the layers of a"),
        ({"decoder__layers": "many"}, "decoder.layers: unknown name 'many'"),
        ({"decoder__layers": 10**9}, "decoder.layers: 1000000000 is not a whole number from 1 to"),
        ({"dims__layers": 0}, "dims.layers: 0 is not a whole number from 1 to 10000"),
        ({"dims__layers": 2.5}, "dims.layers: 2.5 is not a whole number from 1 to 10000"),
        ({"dims__layers": "heads / 3"}, "dims.layers: 1.3333333333333333 (heads / 3) is not"),
        ({"decoder__layer": "x + atn(x)"}, "decoder.layer: calls 'atn'; did you mean 'attn'?"),
        ({"decoder__layer": "x + embed(x)"}, "decoder.layer: embed takes tokens or positions,"
         " not x"),
        ({"decoder__stem": "x"}, "decoder.stem: unknown name 'x'; allowed: positions, token_types"),
        ({"decoder__head": "logits(norm(tokens))"}, "decoder.head: unknown name 'tokens'"),
        ({"decoder__stem": "attn(embed(tokens))"}, "decoder.stem: calls attn, an attention, which "
         "only the formula of a layer can"),
        ({"decoder__layer": "x + attn(norm(attn(x)))"}, "decoder.layer: calls attn, an attention, "
         "2 times, but it has one cache"),
        ({"decoder__layer": "logits(attn(norm(x)))"}, "decoder.layer: calls logits, a vocabulary "
         "head, which only the head formula can"),
        ({"decoder__pattern": ["a"]}, "decoder.pattern: chooses among variants, but [variants] "
         "declares none"),
        ({"decoder__modules__attn__position": {"kind": "disentangled", "buckets": 8}},
         "decoder.layer: calls attn, an attention with disentangled positions, which only an "),
        ({"modules__logits__never": [64]}, "modules.logits.never: [64] has a token outside the vo"),
        ({"decoder__variants": 3}, "decoder.variants: 3 is not a table"),
        ({"decoder__variants": {"a": 3}}, "decoder.variants.a: 3 is not a table"),
        ({"decoder__variants": {"a": {"layers": 3}}}, "decoder.variants.a.layers: unknown key; did "
         "you mean 'layer'?"),
        ({"decoder__variants": {"a": {"modules": 3}}}, "decoder.variants.a.modules: 3 is not a"),
        ({"decoder__variants": {"a": {"layer": "y"}}}, "decoder.variants.a.layer: unknown name"),
        ({"decoder__variants": {"a": {}, "b": {}}}, "decoder.pattern: is missing: which layer is "),
        ({"modules__logits__tied": True, "modules__embed__width": 8}, "modules.logits.tied: embed "
         "is 64 x 8, this 64 x 32"),
    ],
)  # fmt: skip
def test_stack_refused(changes: dict[str, Any], reason: str) -> None:
    assert error_of(model(**changes)).startswith(reason)


def test_an_empty_table_laid_over_a_module_changes_nothing() -> None:
    assert resolved(model(decoder__modules__norm={})) == resolved(model())


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("windowd", "unknown name 'windowd'; did you mean 'windowed'?"),
        ("i", "layer 0 would be 0; allowed: full, windowed"),
        ("'fool'", "layer 0 would be 'fool'; allowed: full, windowed"),
        (["full", "windowd"], "layer 1 would be 'windowd'; did you mean 'windowed'?"),
        ([], "layer 0 would be []; allowed: full, windowed"),
        ([[]], "layer 0 would be []; allowed: full, windowed"),
        ([{}], "layer 0 would be {}"),
        ({}, "layer 0 would be {}"),
        (3, "layer 0 would be 3"),
        ("$layer_types", "config.json has no 'layer_types'"),
        ("[full][i]", "'[full][i]' has no value: list index out of range"),
        ("windowed if i > 1 else none", "layer 0 would be None"),
        ("full if x else windowed", "unknown name 'x'"),
        (
            "global if i % 2 else full",
            "cannot be read as an expression: 'global if i % 2 else full'"
            "; 'global' can only stand in quotes",
        ),
    ],
)
def test_pattern_refused(pattern: Any, reason: str) -> None:
    text = error_of(with_pattern(pattern), {"sliding_window": 8})
    assert text.startswith(f"decoder.pattern: {reason}")


def test_a_missing_layer_formula() -> None:
    text = MODEL.replace('layer = "x + attn(norm(x))"\n', "")
    assert error_of(model(text)) == "decoder.layer: is missing; write the formula"


def test_missing_number_of_layers() -> None:
    text = MODEL.replace("layers = 2\n", "")
    assert error_of(model(text)) == "decoder.layers: is missing; set it, or dims.layers"


def test_a_head_gives_a_logit_for_each_token() -> None:
    reason = error_of(model(modules__logits__outputs=8))
    assert reason.startswith("modules.logits.outputs: 8 logits are not those of dims.vocab = ")


def test_a_tied_head_needs_an_embedding() -> None:
    tied = resolved(model(modules__logits__tied=True))
    assert dict(tied.shared)["logits"].tied  # type: ignore[attr-defined]
    text = MODEL.replace("embed =", "table =").replace("embed(", "table(")
    reason = "modules.logits.tied: needs an embedding called embed in [modules]"
    assert error_of(model(text, modules__logits__tied=True)) == reason


def test_values_of_earlier_formulas() -> None:
    first = {"layer": "a = attn(norm(x))\nx = x + a"}
    later = {"layer": "x = x + attn(norm(x)) + 0.5 * a - e"}
    spec = resolved(
        model(
            dims__layers=3,
            decoder__stem="e = embed(tokens)\nx = e",
            decoder__head="logits(norm(x + e))",
            decoder__variants={"first": first, "later": later},
            decoder__pattern="first if i == 0 else later",
        )
    ).decoder
    assert spec is not None
    assert spec.carried == {"a", "e"}
    assert [spec.values_before(i) for i in range(4)] == [("e",), ("a", "e"), ("a", "e"), ("e",)]
    assert spec.layers[1] is spec.layers[2]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"decoder__layer": "x + attn(e)"}, "decoder.layer: unknown name 'e'; allowed: positions"),
        (
            {"decoder__modules__attn__kv_layer": "i - 1 if i else none", "dims__layers": 3},
            "decoder.modules.attn.kv_layer: layer 2 takes the keys of layer 1, which has none",
        ),
        (
            {"decoder__modules__attn__kv_layer": "i + 1"},
            "decoder.modules.attn.kv_layer: layer 0 takes the keys of layer 1, which has none",
        ),
        (
            {"decoder__modules__attn": {"kv_layer": "0 if i else none", "window": "4 + i"}},
            "decoder.modules.attn.kv_layer: layer 1 has not the kv_heads, head_dim, value_dim, win",
        ),
        (
            {"decoder__modules__attn": {"kv_layer": 0, "tied_values": True}},
            "decoder.modules.attn.tied_values: needs keys of its own, as wide as the values",
        ),
    ],
)
def test_values_that_there_are_none_of(changes: dict[str, Any], error: str) -> None:
    assert error_of(model(**changes)).startswith(error)
