"""Tensor maps: patterns, fused tensors, formats, and which table wins."""

from dataclasses import replace
from typing import Any

import pytest

from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.tensor_names import TensorMap, TensorSource, read_tensor_map

from .helpers import one_line, values


def tensor_map(*layers: Any, format: str = "safetensors") -> TensorMap:
    return read_tensor_map(layers, format, values({"heads": 4, "layers": 6}))


def names(tensors: TensorMap, parameter: str) -> tuple[str, ...] | None:
    place = tensors.source_of(parameter)
    return place.names if place else None


def test_modules_and_parameters_are_mapped() -> None:
    tensors = tensor_map(
        {
            "embed": "wte",
            "decoder.{i}.attn.q": "h.{i}.q",
            "decoder.{i}.attn.rope.factors": "rope_freqs.weight",
            "decoder.{i}.ffn.up.bias": ["h.{i}.up_bias", "h.{i}.fc.b"],
            "decoder.{i}.ffn.up": "h.{i}.fc",
        }
    )
    assert names(tensors, "embed.weight") == ("wte.weight",)
    assert names(tensors, "decoder.12.attn.q.bias") == ("h.12.q.bias",)
    assert names(tensors, "decoder.3.attn.rope.factors") == ("rope_freqs.weight",)
    assert names(tensors, "decoder.3.ffn.up.bias") == ("h.3.up_bias", "h.3.fc.b")
    assert names(tensors, "decoder.3.ffn.up.weight") == ("h.3.fc.weight",)
    for unmapped in (
        "decoder.x.attn.q.weight",
        "decoder.3.attn.k.weight",
        "norm.weight",
        "embed.q.weight",
    ):
        assert tensors.source_of(unmapped) is None


def test_dots_are_no_wildcards() -> None:
    assert tensor_map({"a.b": "c"}).source_of("axb.weight") is None


def test_tensors_of_some_layers_are_ignored() -> None:
    """Of layers that an expression has no number for nothing is."""
    tensors = tensor_map({"ignore": ["h.{[1, 4][i]}.*", "h.{$absent[i]}.x", "*.bias", "{layers}"]})
    assert tensors.ignore[:3] == ("h.1.*", "h.4.*", "*.bias")
    assert tensors.ignore[3] == "6"


def test_layers_may_share_tensors() -> None:
    tensors = tensor_map(
        {
            "decoder.{i}.attn.q": "blocks.{i % 2}.{i}.q",
            "decoder.{i}.shared": "memory.{last([1, 4], i, 2)}",
        }
    )
    assert names(tensors, "decoder.5.attn.q.weight") == ("blocks.1.5.q.weight",)
    assert names(tensors, "decoder.4.shared.weight") == ("memory.1.weight",)
    # A layer that there is no number for has no such tensor.
    assert names(tensors, "decoder.3.shared.weight") == ("memory.{last([1, 4], i, 2)}.weight",)


def test_one_tensor_of_all_layers() -> None:
    tensors = tensor_map({"decoder.{i}.own": {"from": "own", "layers": 3, "axis": 1}})
    place = tensors.source_of("decoder.1.own.weight")
    assert place is not None
    assert place.names == ("own.weight",)
    assert place.parts == tuple(f"decoder.{n}.own.weight" for n in range(3))
    assert place.axis == 1


def test_fused_tensors() -> None:
    tensors = tensor_map(
        {
            "decoder.{i}.attn.{q,k,v}": {"from": "h.{i}.qkv", "groups": "heads", "transpose": True},
            "decoder.{i}.ffn.{gate,up}": "h.{i}.gate_up",
        }
    )
    parts = tuple(f"decoder.1.attn.{part}.weight" for part in "qkv")
    for parameter in parts:
        assert tensors.source_of(parameter) == TensorSource(
            ("h.1.qkv.weight",), parts, 4, transpose=True
        )
    place = tensors.source_of("decoder.0.ffn.up.bias")
    parts = ("decoder.0.ffn.gate.bias", "decoder.0.ffn.up.bias")
    assert place == TensorSource(("h.0.gate_up.bias",), parts)
    assert tensors.source_of("decoder.0.attn.o.weight") is None


def test_stacked_tensors() -> None:
    """{e} is left for loading, which knows how many there are."""
    tensors = tensor_map(
        {
            "decoder.{i}.ffn.experts.down": ["h.{i}.experts.{e}.down", "h.{i}.down_exps"],
            "decoder.{i}.ffn.experts.{gate,up}": {"from": "h.{i}.x", "groups": 2, "axis": 1},
        }
    )
    place = tensors.source_of("decoder.2.ffn.experts.down.bias")
    assert place == TensorSource(("h.2.experts.{e}.down.bias", "h.2.down_exps.bias"))
    parts = ("decoder.2.ffn.experts.gate.weight", "decoder.2.ffn.experts.up.weight")
    place = tensors.source_of(parts[0])
    assert place == TensorSource(("h.2.x.weight",), parts, groups=2, axis=1)


def test_several_lines_for_one_parameter() -> None:
    """They are tried in turn, but only those of the table that decides."""
    family = {
        "a.up": "up.{e}",
        "a.{gate,up}": "both",
        "a.{gate,up}.weight": {"from": "fused", "axis": 1},
    }
    parts = ("a.gate.weight", "a.up.weight")
    tensors = tensor_map({"a.up.weight": "base"}, family)
    assert list_of(tensors.source_of("a.up.weight")) == [
        TensorSource(("fused",), parts, axis=1),
        TensorSource(("up.{e}.weight",)),
        TensorSource(("both.weight",), parts),
    ]
    assert list_of(tensors.source_of("a.gate.weight")) == [
        TensorSource(("fused",), parts, axis=1),
        TensorSource(("both.weight",), parts),
    ]
    own = tensor_map(family, {"a.up": "own"})
    assert list_of(own.source_of("a.up.weight")) == [TensorSource(("own.weight",))]


def list_of(place: TensorSource | None) -> list[TensorSource]:
    return [replace(each, fallback=None) for each in place.candidates()] if place else []


def test_every_format_has_its_own_table() -> None:
    table = {"embed": "wte", "gguf": {"embed": "token_embd", "ignore": "x.*"}, "prefix": "m."}
    assert names(tensor_map(table), "embed.weight") == ("wte.weight",)
    assert names(tensor_map(table, format="pickle"), "embed.weight") == ("wte.weight",)
    gguf = tensor_map(table, format="gguf")
    assert names(gguf, "embed.weight") == ("token_embd.weight",)
    assert (gguf.prefixes, gguf.ignore) == ((), ("x.*",))
    assert tensor_map(table, format="llama2c").entries == ()
    assert tensor_map(table).prefixes == (("m.", ""),)


def test_prefixes_may_stand_for_others() -> None:
    tensors = tensor_map({"prefix": ["a.", "b."]}, {"prefix": {"b.": "c.", "d.e.": "d."}})
    assert tensors.prefixes == (("a.", ""), ("b.", "c."), ("d.e.", "d."))


def test_the_most_specific_table_wins_and_lists_add_up() -> None:
    base: dict[str, Any] = {
        "gguf": {"embed": "base", "decoder.{i}.attn.q": "base.{i}", "norm": "base"}
    }
    family: dict[str, Any] = {"gguf": {"decoder.{i}.attn.{q,k,v}": "family.{i}", "ignore": ["a"]}}
    family["gguf"]["copies"] = {"embed.weight": "e", "logits.bias": ["b", "c"]}
    family["gguf"]["suffixes"] = {"gamma": "weight", "beta": "bias"}
    spec = {"gguf": {"embed": ["spec", "other"], "ignore": ["b", "c"], "suffixes": {"b": "bias"}}}
    spec["gguf"]["copies"] = {"embed.weight": ["f"]}
    tensors = tensor_map(base, family, spec, format="gguf")
    assert names(tensors, "embed.weight") == ("spec.weight", "other.weight")
    assert names(tensors, "decoder.0.attn.q.weight") == ("family.0.weight",)
    assert names(tensors, "norm.weight") == ("base.weight",)
    assert tensors.ignore == ("a", "b", "c")
    assert tensors.copies == (("embed.weight", ("f",)), ("logits.bias", ("b", "c")))
    assert tensors.suffixes == (("gamma", "weight"), ("beta", "bias"), ("b", "bias"))


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (3, "tensors: 3 is not a table"),
        ({"gguf": 3}, "tensors.gguf: 3 is not a table"),
        ({"llama2c": "x"}, "tensors.llama2c: 'x' is not a table"),
        ({"embed": 3}, "tensors.'embed': 3 is not a text or a list of texts"),
        ({"embed": [1]}, "tensors.'embed': [1] is not a text or a list of texts"),
        ({"embed": ""}, "tensors.'embed': needs the file's tensor name, or a list of names to try"),
        ({"embed": []}, "tensors.'embed': needs the file's tensor name"),
        ({"embed": {}}, "tensors.'embed': needs the file's tensor name"),
        ({"embed": {"form": "x"}}, "tensors.'embed'.form: unknown key; did you mean 'from'?"),
        (
            {"ggufs": {"embed": "x"}},
            "tensors.'ggufs'.embed: unknown key; allowed: axis, from, groups",
        ),
        ({"a": {"from": "x", "transpose": 1}}, "tensors.'a'.transpose: 1 is not true or false"),
        ({"a": {"from": "x", "groups": 2}}, "tensors.'a'.groups: is for fused tensors"),
        ({"a": {"from": "x", "axis": 1}}, "tensors.'a'.axis: is for fused tensors"),
        ({"{a,b}": {"from": "x", "axis": -1}}, "tensors.'{a,b}'.axis: -1 is not a whole number"),
        ({"a.{e}": "x.{e}"}, "tensors.'a.{e}': has {e}, which only the file's name can have"),
        ({"{a,b}": {"from": "x", "groups": 0}}, "tensors.'{a,b}'.groups: 0 is not a whole number"),
        ({"{a,b}": {"from": "x", "groups": "n"}}, "tensors.'{a,b}'.groups: unknown name 'n'"),
        ({"{a,b}.{c,d}": "x"}, "tensors.'{a,b}.{c,d}': has more than one {a,b,...} group"),
        ({"{i}.{i}": "x"}, "tensors.'{i}.{i}': has {i} more than once"),
        ({"embed": "x.{i}"}, "tensors.'embed': has no {i}, but the file's name has"),
        *(
            ({pattern: "x"}, f"tensors.{pattern!r}: '{strange}' in '{pattern}' is no placeholder")
            for pattern, strange in [
                ("{", "{"),
                ("{}", "{}"),
                ("{a", "{a"),
                ("a}", "}"),
                ("{a,}", "{a,}"),
                ("{i", "{i"),
                ("layers.{i % 2}.attn", "{i % 2}"),
                ("{j}", "{j}"),
            ]
        ),
        (
            {"decoder.{i}.attn.q": ["l.{i}.q", "l.{j%2}.q"]},
            "tensors.'decoder.{i}.attn.q': '{j%2}' in 'l.{j%2}.q' is no placeholder; "
            "in braces there can be {i}, {e} and values of i, as {i % 2}",
        ),
        ({"a.{i}": "l.{i % wide}"}, "tensors.'a.{i}': unknown name 'wide'"),
        ({"a.{i}": "l.{i - 9}"}, "tensors.'a.{i}': {i - 9} is no whole number from 0 on"),
        ({"a": "l.{i % 2}"}, "tensors.'a': has no {i}, but the file's name has"),
        ({"a.{i}": {"from": "l.{i}", "layers": 4}}, "tensors.'a.{i}'.layers: is for one tensor"),
        ({"{a,b}.{i}": {"from": "l", "layers": 4}}, "tensors.'{a,b}.{i}'.layers: is for one"),
        ({"a.{i}": {"from": "l.{i}", "pieces": 0}}, "tensors.'a.{i}'.pieces: 0 is not a whole"),
        ({"a": "x.{b,c}"}, "tensors.'a': '{b,c}' in 'x.{b,c}' is no placeholder"),
        ({"prefix": 3}, "tensors.prefix: 3 is not a text or a list of texts"),
        ({"prefix": {"a": 3}}, "tensors.prefix.a: 3 is not a text"),
        ({"ignore": {}}, "tensors.ignore: {} is not a text or a list of texts"),
        ({"ignore": [3]}, "tensors.ignore: [3] is not a text or a list of texts"),
        ({"suffixes": "gamma"}, "tensors.suffixes: 'gamma' is not a table"),
        ({"suffixes": {"gamma": 3}}, "tensors.suffixes.gamma: 3 is not a text"),
        ({"copies": ["a"]}, "tensors.copies: ['a'] is not a table"),
        ({"copies": {"embed.weight": 3}}, "tensors.copies.embed.weight: 3 is not a text or a list"),
    ],
)
def test_tensors_refused(table: Any, reason: str) -> None:
    with pytest.raises(SpecError) as caught:
        tensor_map(table)
    assert one_line(caught.value).startswith(reason)


def test_an_error_names_the_format() -> None:
    with pytest.raises(SpecError, match=r"tensors\.gguf\.'embed': 3 is not"):
        tensor_map({"gguf": {"embed": 3}}, format="gguf")


@pytest.mark.parametrize("pattern", ["(?P<i>", "[", "*", "\\"])
def test_any_other_pattern_stands_for_itself(pattern: str) -> None:
    assert names(tensor_map({pattern: "x"}), f"{pattern}.weight") == ("x.weight",)
    assert tensor_map({pattern: "x"}).source_of("a.weight") is None


def test_numbers_of_the_config() -> None:
    """A parameter that is no tensor: one value for the model, or one for each layer."""
    table = {
        "decoder.{i}.ffn.alpha_p": {"value": "$alphas[i] / 2"},
        "decoder.scale": {"value": 3},
    }
    known = values({"layers": 2}, {"alphas": [0.5, 2.0]})
    tensors = read_tensor_map([table], "safetensors", known)
    places = [tensors.source_of(f"decoder.{i}.ffn.alpha_p") for i in range(3)]
    assert [place and place.value for place in places] == [0.25, 1.0, None]
    whole = tensors.source_of("decoder.scale")
    assert whole
    assert (whole.value, whole.names) == (3.0, ())
    for wrong in ({"value": "$betas[i]"}, {"value": 1, "from": "x"}, {"value": "$alphas"}):
        with pytest.raises(SpecError, match=r"tensors\.'decoder\.\{i\}\.a'") as caught:
            read_tensor_map([{"decoder.{i}.a": wrong}], "safetensors", known)
        one_line(caught.value)
