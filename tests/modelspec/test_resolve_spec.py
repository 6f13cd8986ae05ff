"""Whole specifications: top-level keys, dimensions, formats, settings, merging."""

from typing import Any

import pytest

from jinfer.modelspec.model_spec import EngineSpec, PromptSpec
from jinfer.modelspec.resolve_spec import CheckpointFacts, resolve
from jinfer.modelspec.spec_errors import SpecError, nearest_hint, show_value
from jinfer.modelspec.toml_tables import merge

from .helpers import PATH, error_of, model, one_line, resolved


def test_settings_have_defaults() -> None:
    spec = resolved(model())
    assert (spec.path, spec.dtype, spec.generation) == (PATH, "auto", {})
    assert spec.engine == EngineSpec(slots=8, context=None, prefill_chunk=512)
    assert spec.prompt == PromptSpec()
    assert spec.dims == {
        "vocab": 64, "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8,
        "context": 128,
    }  # fmt: skip


def test_settings_are_read() -> None:
    spec = resolved(
        model(
            description="any text at all: $x | (",
            weights="some/folder",
            tokenizer="other/folder",
            dtype="bfloat16",
            engine={"slots": 2, "context": "context / 2"},
            prompt={"template": "{bos}$x | {query}", "system": "Be brief."},
            generation={"strategy": "top_p", "top_p": 0.9},
        )
    )
    assert spec.dtype == "bfloat16"
    assert spec.engine == EngineSpec(slots=2, context=64)
    assert spec.prompt == PromptSpec(template="{bos}$x | {query}", system="Be brief.")
    assert spec.generation == {"strategy": "top_p", "top_p": 0.9}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"decodr": {}}, "decodr: unknown key; did you mean 'decoder'? allowed: adapters, "),
        ({"dim": {}}, "dim: unknown key; did you mean 'dims'?"),
        ({"dims": 3}, "dims: 3 is not a table"),
        ({"dims__x": {}}, "dims.x: {} is not a number or the text of an expression"),
        ({"dims__x": [1]}, "dims.x: [1] is not a number or the text of an expression"),
        ({"dims__x": None}, "dims.x: None is not a number or the text of an expression"),
        ({"dims__hiddn": 3}, "dims.hiddn: is used nowhere; did you mean 'hidden'?"),
        ({"dims__spare": "spare + 1"}, "dims.spare: is used nowhere"),
        ({"dims__one": "two", "dims__two": "one"}, "dims.one: is used nowhere"),
        ({"dims__rope_theta": "$rope_theta"}, "dims.rope_theta: is used nowhere"),
        ({"dims__context": "$n_ctx"}, "dims.context: config.json has no 'n_ctx'; set dims.context"),
        ({"dims__hidden": 0}, "dims.hidden: 0 is not a whole number from 1 to 2^31 - 1"),
        ({"dims__hidden": -1}, "dims.hidden: -1 is not a whole number from 1 to 2^31 - 1"),
        ({"dims__hidden": 2**40}, "dims.hidden: 1099511627776 is not a whole number from 1 to"),
        ({"dims__vocab": "0"}, "dims.vocab: 0 (0) is not a whole number"),
        ({"dims__heads": 0}, "dims.heads: 0 is not a whole number from 1 to 2^31 - 1"),
        ({"dims__kv_heads": 3}, "decoder.modules.attn.kv_heads: 3 does not divide heads = 4"),
        ({"dims__head_dim": 7}, "decoder.modules.attn.position.dim: 7 is odd"),
        ({"decoder__modules__attn__window": 0}, "decoder.modules.attn.window: 0 is not a whole"),
        ({"decoder__modules__attn__position__dim": 12}, "decoder.modules.attn.position.dim: 12 is "
         "more than head_dim = 8"),
        ({"dtype": "float8"}, "dtype: 'float8' is not one of the allowed words; did"),
        ({"dtype": 3}, "dtype: 3 is not one of the allowed words; allowed: auto, bfl"),
        ({"engine": 3}, "engine: 3 is not a table"),
        ({"engine__slot": 3}, "engine.slot: unknown key; did you mean 'slots'?"),
        ({"engine__slots": 0}, "engine.slots: 0 is not a whole number from 1 to 2^31 - 1"),
        ({"engine__context": "long"}, "engine.context: unknown name 'long'"),
        ({"prompt": "text"}, "prompt: 'text' is not a table"),
        ({"prompt__templat": "x"}, "prompt.templat: unknown key; did you mean 'template'?"),
        ({"prompt__system": 3}, "prompt.system: 3 is not a text"),
        ({"generation": []}, "generation: [] is not a table"),
        ({"weights": 3}, "weights: 3 is not a text"),
        ({"description": []}, "description: [] is not a text"),
        ({"tokenizer": {}}, "tokenizer: {} is not a text"),
        ({"parameters": 7}, "parameters: 7 is not a text"),
        ({"parameters": "7"}, "parameters: '7' is not a count, such as \"6.7B\" or \"135M\""),
        ({"family": 3}, "family: 3 is not a text"),
        ({"match": []}, "match: [] is not a table"),
        ({"match__arch": []}, "match.arch: unknown key; allowed: architectures, gguf, llama2c"),
        ({"match__architectures": 3}, "match.architectures: 3 is not a text or a list of texts"),
        ({"match__gguf": [3]}, "match.gguf: [3] is not a text or a list of texts"),
        ({"match__llama2c": "x"}, "match.llama2c: 'x' is not true or false"),
        ({"match__when": 3}, "match.when: 3 is not a text"),
        ({"gguf": 3}, "gguf: 3 is not a table"),
        ({"gguf__tensors": {}}, "gguf.tensors: unknown key; allowed: decoder, dims, encoder"),
        ({"gguf__dims": 3}, "gguf.dims: 3 is not a table"),
        ({"gguf__dims__x": []}, "gguf.dims.x: [] is not a number or the text of an expression"),
        ({"gguf__modules": 3}, "gguf.modules: 3 is not a table"),
        ({"llama2c__decoder": []}, "llama2c.decoder: [] is not a table"),
        ({"tensors": 3}, "tensors: 3 is not a table"),
        ({"tensors__a": 3}, "tensors.'a': 3 is not a text or a list of texts"),
        ({"encoder": {}}, "encoder.stem: is missing; write the formula"),
        ({"encoders": {}}, "encoders: unknown key; did you mean 'encoder'?"),
    ],
)  # fmt: skip
def test_specification_refused(changes: dict[str, Any], reason: str) -> None:
    assert error_of(model(**changes)).startswith(reason)


def test_nothing_to_build() -> None:
    assert error_of({}) == "has neither [encoder] nor [decoder]; name a family or write one"


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({3: {}}, "3: is not a text, so it cannot be a key"),
        ({"dims": {None: 1}}, "None: is not a text, so it cannot be a key"),
        (3, "3 is not a table"),
    ],
)
def test_tables_given_from_python_are_checked(table: Any, reason: str) -> None:
    assert error_of(table) == reason


def test_deep_and_endless_tables_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    endless: dict[str, Any] = {}
    endless["decoder"] = endless
    nested_list: list[Any] = []
    for _ in range(5000):
        nested_list = [nested_list]
    for table in (deep, endless, {"generation": {"x": nested_list}}):
        assert error_of(table) == "has tables and lists in each other more than 16 deep"


def test_dims_may_be_used_by_anything() -> None:
    for changes in (
        {"decoder__layer": "x + size * attn(norm(x))"},
        {"dims__hidden": "size * 16"},
        {"tensors": {"decoder.{i}.attn.{q,k,v}": {"from": "qkv.{i}", "groups": "size"}}},
        {"engine__slots": "size"},
        {"gguf__decoder__modules__attn__window": "size"},
        {"decoder__variants": {"a": {}, "b": {"modules": {"attn": {"window": "size"}}}},
         "decoder__pattern": "a"},
    ):  # fmt: skip
        assert resolved(model(dims__size=2, **changes)).dims["hidden"] == 32


def test_another_block_may_leave_sizes_of_a_family_unused() -> None:
    family = model(dims__theta=5e5, decoder__modules__attn__position__theta="theta")
    sizes = {"latent_rank": 8, "nope_dim": 8, "rope_dim": 4, "value_dim": 8}
    rope = {"kind": "rope", "dim": "rope_dim", "theta": 1e4}
    attn = {"kind": "latent_attention", "position": rope}
    over = {"dims": sizes, "decoder": {"modules": {"attn": attn}}}
    assert (
        not {"theta", "kv_heads"} & resolve([family, over], PATH, CheckpointFacts(), {}).dims.keys()
    )
    for misspelt in ({"thet": 1}, {"latent_rnk": 8}):
        for tables in (
            [merge(family, {"dims": misspelt}), over],
            [family, over, {"dims": misspelt}],
        ):
            with pytest.raises(SpecError, match=r"dims\.(thet|latent_rnk): is used nowhere"):
                resolve(tables, PATH, CheckpointFacts(), {})


LATENT: Any = {
    "dims": {"latent_rank": 8, "nope_dim": 8, "rope_dim": 4, "value_dim": 8},
    "decoder": {
        "modules": {
            "attn": {"kind": "latent_attention", "position": {"kind": "rope", "dim": "rope_dim"}}
        }
    },
}


@pytest.mark.parametrize(
    ("family", "said", "reason"),
    [
        (
            {"gguf__decoder__modules__attn__position__pairs": "adjacent"},
            {"position": {"pairs": "halves"}},
            "decoder.modules.attn.position.pairs: was 'adjacent', but kind = 'latent_attention' "
            "replaces the module and leaves it behind, so it would be 'halves'; say which it is",
        ),
        (
            {"decoder__modules__attn__position__theta": "100 * context"},
            {"position": {"theta": 5}},
            "decoder.modules.attn.position.theta: was 12800.0, but",
        ),
        ({"decoder__modules__attn__bias": True}, {"bias": False}, "decoder.modules.attn.bias: was"),
        (
            {"decoder__modules__attn__position__scaling": {"rope_type": "linear", "factor": 2}},
            {"position": {"scaling": "none"}},
            "decoder.modules.attn.position.scaling: was RopeScalingSpec(rope_type='linear'",
        ),
    ],
)
def test_a_key_that_another_kind_leaves_behind(
    family: dict[str, Any], said: dict[str, Any], reason: str
) -> None:
    """What a family says of a module is not lost without a word where another kind replaces it."""
    known, base = CheckpointFacts("gguf"), model(**family)
    with pytest.raises(SpecError) as caught:
        resolve([base, LATENT], PATH, known, {})
    assert one_line(caught.value).startswith(reason)
    over = merge(LATENT, {"decoder": {"modules": {"attn": said}}})
    assert resolve([base, over], PATH, known, {}).decoder is not None
    # Also where a third table says it.
    third = {"decoder": {"modules": {"attn": said}}}
    assert resolve([base, LATENT, third], PATH, known, {}).decoder is not None


@pytest.mark.parametrize(
    "family",
    [
        {"decoder__modules__attn__position__pairs": "halves"},
        {"decoder__modules__attn__bias": "$attention_bias | false"},
        {"decoder__modules__attn__position__scaling": {"rope_type": "$type | none"}},
        {"decoder__modules__attn__window": 4},  # which the new kind does not have
        {"llama2c__decoder__modules__attn__position__pairs": "adjacent"},  # another format's
    ],
)
def test_what_is_left_behind_and_changes_nothing(family: dict[str, Any]) -> None:
    assert resolve([model(**family), LATENT], PATH, CheckpointFacts("gguf"), {}).decoder is not None


def test_another_format_overrides_only_itself() -> None:
    table = model(
        gguf__dims__heads=2,
        gguf__decoder__modules__attn__position__pairs="adjacent",
        gguf__modules__logits__tied=True,
    )
    plain, gguf = resolved(table), resolve([table], PATH, CheckpointFacts("gguf"), {})
    assert (plain.dims["heads"], gguf.dims["heads"]) == (4, 2)
    assert "'halves'" in repr(plain.stacks)
    assert "'adjacent'" in repr(gguf.stacks)
    assert "tied=True" in repr(gguf.shared)


def test_order_of_tables() -> None:
    """The format lies over the family's own values, what lies over the family over both."""
    family = model(dims__hidden=32, dims__vocab=1, dims__context=1)
    base = {"dims": {"vocab": 2, "context": 2}}
    family["gguf"] = {"dims": {"context": 3}}
    over = {"dims": {"heads": 8}}
    spec = resolve([family, over], PATH, CheckpointFacts("gguf"), base)
    assert {k: spec.dims[k] for k in ("vocab", "context", "heads")} == {
        "vocab": 2, "context": 3, "heads": 8,
    }  # fmt: skip
    last = {"dims": {"context": 9, "vocab": 9}}
    spec = resolve([family, over, last], PATH, CheckpointFacts("gguf"), base)
    assert (spec.dims["context"], spec.dims["vocab"]) == (9, 9)


def test_merge() -> None:
    base = {"a": {"kind": "rope", "x": 1, "y": {"z": 1}}, "b": 2}
    assert merge(base, {"a": {"x": 3}}) == {"a": {"kind": "rope", "x": 3, "y": {"z": 1}}, "b": 2}
    assert merge(base, {"a": {"kind": "rope", "y": {"w": 2}}})["a"]["y"] == {"z": 1, "w": 2}
    assert merge(base, {"a": {"kind": "alibi"}}) == {"a": {"kind": "alibi"}, "b": 2}
    assert merge(base, {"a": 5, "c": {}}) == {"a": 5, "b": 2, "c": {}}
    assert base == {"a": {"kind": "rope", "x": 1, "y": {"z": 1}}, "b": 2}


def test_nearest() -> None:
    assert (
        nearest_hint("heds", ["heads", "layers"]) == "did you mean 'heads'? allowed: heads, layers"
    )
    assert nearest_hint("xyz", ["heads"]) == "allowed: heads"
    assert nearest_hint("x", []) == "nothing is allowed here"
    assert nearest_hint(None, ["a"]) == "allowed: a"
    assert nearest_hint("x" * 10**6, [f"word{i}" for i in range(100)]).endswith(", ...")


def test_show_is_short() -> None:
    assert show_value("a" * 10**6).startswith("'aaa")
    for value in ("a" * 10**6, list(range(10**5)), [[[[1]]]], 10**5000, "line\nline"):
        assert len(show_value(value)) < 200
        assert "\n" not in show_value(value)


def test_error_is_one_value() -> None:
    error = SpecError(PATH, "a.b", "is wrong")
    assert (error.path, error.key, error.reason) == (PATH, "a.b", "is wrong")
    assert one_line(error) == "a.b: is wrong"
    assert str(SpecError(PATH, "", "is wrong")) == f"{PATH}: is wrong"


@pytest.mark.parametrize(
    ("engine", "context", "length"),
    [({}, 128, 128), ({}, 10**6, 4096), ({"context": 9000}, 10**6, 9000)],
)
def test_scaling_that_depends_on_the_length_served(
    engine: dict[str, int], context: int, length: int
) -> None:
    """The engine's context, or the model's own up to where the engine stops by itself."""
    table = model(
        engine=engine,
        dims__context=context,
        decoder__modules__attn__position__scaling={"rope_type": "longrope", "factor": 2},
    )
    assert f" length={length}," in repr(resolved(table).stacks)
    assert resolved(table).fixed_rope_length is None
    for other, steady in (("yarn", None), ("dynamic", context)):
        table["decoder"]["modules"]["attn"]["position"]["scaling"]["rope_type"] = other
        spec = resolved(table)
        assert " length=None," in repr(spec.stacks)
        assert (spec.fixed_rope_length, spec.dynamic_factor) == (steady, 2.0 if steady else 1.0)


@pytest.mark.parametrize(
    ("factors", "error"),
    [
        ([1.0] * 3, "scaling.short_factor: has 3 numbers for 4 pairs"),
        ([1, 0, 1, 1], "scaling.short_factor: has a number that is not above 0"),
        ([], "scaling.short_factor: [] is not a list of numbers or none"),
        (["a"] * 4, "scaling.short_factor: ['a', 'a', 'a', 'a'] is not a list of numbers or none"),
        (3.0, "scaling.short_factor: 3.0 is not a list of numbers or none"),
    ],
)
def test_lists_of_factors(factors: Any, error: str) -> None:
    scaling = {"rope_type": "longrope", "short_factor": factors}
    table = model(decoder__modules__attn__position__scaling=scaling)
    assert error_of(table) == f"decoder.modules.attn.position.{error}"
    scaling["short_factor"] = [1, 2, 3.5, 4]
    assert "short_factor=(1.0, 2.0, 3.5, 4.0)" in repr(resolved(table).stacks)


def test_a_tied_head_is_not_normalized() -> None:
    error = error_of(model(modules__logits={"kind": "head", "tied": True, "normalize": True}))
    assert error.startswith("modules.logits.normalize: cannot be true of a tied head")
