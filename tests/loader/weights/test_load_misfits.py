"""Loading what does not fit the specification: every error names the tensor and the parameter."""

from dataclasses import replace

import numpy as np
import pytest

from jinfer.loader.checkpoint import Checkpoint, CheckpointError
from jinfer.loader.weights.tensor_mapping import LoadError
from jinfer.modelspec.spec_values import SpecValues
from jinfer.modelspec.tensor_names import TensorMap, read_tensor_map

from .loading import GROUPED, checkpoint, error_of, good, lazy, load_file, model


def test_missing_tensor_error_names_the_nearest_tensor() -> None:
    file = good()
    file["layers.1.nrom.weight"] = file.pop("layers.1.norm.weight")
    assert error_of(file).startswith(
        "no tensor layers.1.norm.weight, which decoder.1.norm.weight is to be loaded from; "
        "did you mean 'layers.1.nrom.weight'?"
    )


def test_a_missing_tensor_with_alternatives() -> None:
    file = good()
    del file["norm.weight"]
    assert error_of(file).startswith("no tensor final_norm.weight or norm.weight, which decoder.")


def test_parameter_without_a_name_in_the_specification() -> None:
    abstract, names = model()
    entries = tuple(entry for entry in names.entries if entry[0] != "logits")
    with pytest.raises(LoadError, match=r"^made-up: .*\[tensors\] has no name for logits.weight"):
        load_file(abstract, checkpoint(good()), TensorMap(entries, names.prefixes, names.ignore))


@pytest.mark.parametrize(
    "name", ["layers.0.gate.weight", "layers.2.norm.weight", "model.norm.weight", "rotary"]
)
def test_a_tensor_without_a_parameter(name: str) -> None:
    """Also one that is there twice, with the prefix and without."""
    text = error_of(good() | {name: np.zeros(3)})
    assert text.startswith(f"the specification has no place for {name}; map them in [tensors]")


def test_many_tensors_without_a_parameter_are_counted() -> None:
    text = error_of(good() | {f"other.{i}": np.zeros(3) for i in range(9)})
    assert "no place for other.0, other.1, other.2, other.3, other.4 and 4 more;" in text


def test_a_tensor_of_a_gguf_file_is_ignored_in_its_own_table() -> None:
    names = read_tensor_map([{"gguf": {}}], "gguf", SpecValues("", {}, str, bool))
    abstract, own = model()
    extra = checkpoint(good() | {"rotary": np.zeros(3)})
    with pytest.raises(LoadError, match=r"in \[tensors.gguf\], or .* under tensors.gguf.ignore$"):
        load_file(abstract, extra, replace(own, table=names.table))


def test_a_tensor_that_cannot_be_read_matters_where_it_is_used() -> None:
    def packed(name: str) -> Checkpoint:
        file = checkpoint(good() | {"scales": np.zeros(3)})
        tensors = {
            key: replace(each, unreadable="dtype F4 packs several" if key == name else "")
            for key, each in file.tensors.items()
        }
        return replace(file, tensors=tensors)

    abstract, names = model()
    load_file(abstract, packed("scales"), replace(names, ignore=(*names.ignore, "scales")))
    with pytest.raises(LoadError, match=r"norm\.weight, which decoder.norm.weight is to be loaded"):
        load_file(abstract, packed("norm.weight"), replace(names, ignore=("scales",)))


def test_a_condition_that_leaves_out_what_the_file_has_is_named() -> None:
    """As in a family's table of which only the names of tensors are replaced."""
    lines = {"head": "x = norm(x)\nx = more(x)\nlogits(x)", "layer": "x = norm(x)\nx + attn(x)"}
    more = {"kind": "linear", "when": "has('cls.more.bias')"}
    names = {"decoder.more": "cls.other", "decoder.{i}.extra": "layers.{i}.extra"}
    modules = {"more": more, "extra": {"kind": "linear", "when": "has('none')"}}
    lines["layer"] = "x = norm(x)\nx = extra(x)\nx + attn(x)"
    over = {"decoder": lines | {"modules": modules}, "tensors": names}
    found = {"cls.other.weight": np.zeros((8, 8)), "layers.1.extra.weight": np.zeros((8, 8))}
    text = error_of(good() | found, **over)
    assert text.endswith(
        """; left out by decoder.modules.more.when = "has('cls.more.bias')" """
        """and decoder.modules.extra.when = "has('none')\""""
    )
    assert "left out" not in error_of(good() | {"rotary": np.zeros(3)}, **over)


def test_a_tied_head_stored_under_an_unknown_name() -> None:
    file = good()
    file["head.weight"] = file.pop("lm_head.weight")
    text = error_of(file, modules={"logits": {"kind": "head", "tied": True}})
    assert text.startswith("the specification has no place for head.weight;")


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("embed_tokens.weight", (12, 9), "is [12, 9] for embed.weight, but the specification says"),
        ("norm.weight", (9, 1), "is [9, 1] for decoder.norm.weight, but the specification says"),
        ("norm.weight", (), "is [] for decoder.norm.weight, but the specification says [8]"),
        ("layers.0.o.weight", (8, 7), "is [7, 8] for decoder.0.attn.o.weight"),
        ("layers.1.qkv.weight", (16, 4), "is [4, 4] for decoder.1.attn.k.weight"),
    ],
)
def test_a_wrong_shape(name: str, shape: tuple[int, ...], expected: str) -> None:
    assert f"{name} {expected}" in error_of(good() | {name: np.zeros(shape, np.float32)})


@pytest.mark.parametrize("shape", [(15, 8), (17, 8), ()])
def test_fused_rows_that_do_not_add_up(shape: tuple[int, ...]) -> None:
    text = error_of(good() | {"layers.0.qkv.weight": np.zeros(shape, np.float32)})
    assert text == (
        f"layers.0.qkv.weight is {list(shape)}, which does not split into 8 + 4 + 4 for "
        "decoder.0.attn.q.weight, decoder.0.attn.k.weight, decoder.0.attn.v.weight in 1 group(s)"
    )


def test_fused_rows_that_do_not_divide_into_groups() -> None:
    """16 rows are 8 groups of 2, but 4 rows of k are not 8 groups of anything."""
    text = error_of(good(), tensors={"decoder.{i}.attn.{q,k,v}": GROUPED | {"groups": 8}})
    assert text.startswith("layers.0.qkv.")
    assert text.endswith("in 8 group(s)")


def test_an_error_of_the_file_passes_through() -> None:
    def read() -> np.ndarray:
        raise CheckpointError("made-up", "is cut short", 7)

    abstract, names = model()
    file = checkpoint(good())
    broken = dict(file.tensors) | {"norm.weight": lazy("norm.weight", (8,), read)}
    with pytest.raises(CheckpointError, match="made-up, byte 7: is cut short"):
        load_file(abstract, Checkpoint(file.path, file.format, broken, {}), names)
