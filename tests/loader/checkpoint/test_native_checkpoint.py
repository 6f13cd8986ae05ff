"""Native checkpoints: loaded as written, without a copy; damage is an error of one line."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jinfer import LLM
from jinfer.api.user_errors import USER_ERRORS
from jinfer.cli.quantize.quantize_checkpoint import convert
from jinfer.loader.checkpoint import CheckpointError, open_checkpoint
from jinfer.loader.checkpoint.native_checkpoint import ALIGNMENT, NativeCheckpoint
from jinfer.loader.checkpoint.safetensors import open_safetensors
from jinfer.loader.open_model import open_model
from jinfer.loader.weights.load_weights import load
from jinfer.loader.weights.plan_weights import plan_weights
from jinfer.loader.weights.tensor_mapping import LoadError
from jinfer.modelspec.spec_errors import SpecError
from jinfer.nn.abstract_model import build_abstract_model
from jinfer.quant import OutlierTensor, QuantizedTensor
from tests.loader.checkpoint.converting import (
    GOLDENS,
    IDS,
    MODEL,
    SMALL,
    check_equal,
    in_metadata,
    leaves,
)


@pytest.mark.parametrize(
    ("source", "quantization"),
    [
        ("llama2", {"weights": "q3.5", **SMALL}),
        ("llama2", {"weights": "q3", **SMALL, "outliers": 0.01}),
        ("llama2", {"weights": "q3", "threshold": 0, "outliers": 0.01, "method": "gptq"}),
        ("bert", {"weights": "q4", "threshold": 0}),
        ("llama2", {}),
        ("gguf_llama_mixed", {}),  # blocks as they are in the file
        pytest.param("gguf_llama2", {"weights": "q4_b64_sym", **SMALL}, marks=pytest.mark.soak),
        pytest.param("mixtral", {"weights": "q4", **SMALL}, marks=pytest.mark.soak),
        ("llama2c_v0_tied/model.bin", {"weights": "q8", **SMALL}),
        ("t5", {"weights": "q5", **SMALL}),
        ("gpt2", {"weights": "q6", **SMALL}),
        pytest.param("minilm", {"weights": "q4", **SMALL}, marks=pytest.mark.soak),
        ("deepseek_v2", {"weights": "q4", **SMALL}),
    ],
)
def test_converted_checkpoint_equals_its_source(
    source: str, quantization: dict[str, Any], tmp_path: Path
) -> None:
    path, out = GOLDENS / source, tmp_path / "out"
    convert(str(path), out, {"quantization": quantization})
    expected = leaves(path, **quantization)
    check_equal(leaves(out), expected)
    check_equal(leaves(out / "spec.toml"), expected)
    kinds = {type(leaf) for leaf in expected.values()}
    assert kinds & {QuantizedTensor, OutlierTensor} or not quantization


def test_arrays_are_views_of_the_files(tmp_path: Path) -> None:
    convert(str(MODEL), tmp_path / "out", {"quantization": {"weights": "q3.5", **SMALL}})
    checkpoint = open_checkpoint(tmp_path / "out")
    assert isinstance(checkpoint, NativeCheckpoint)
    opened = replace(open_model(tmp_path / "out", {}), checkpoint=checkpoint)
    model = build_abstract_model(opened.spec, "float32")
    plan = plan_weights(model, opened.spec, opened.checkpoint, opened.activations)
    loaded = jax.tree.leaves(load(plan))
    places = {tensor.raw().ctypes.data for tensor in checkpoint.parts.values()}
    assert all(place % ALIGNMENT == 0 for place in places)
    assert {leaf.unsafe_buffer_pointer() for leaf in loaded} == places


@pytest.mark.parametrize("outliers", [0.0, 0.01])
def test_a_gpu_may_want_other_columns(
    outliers: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"weights": "q3.5", **SMALL, "outliers": outliers}
    convert(str(MODEL), tmp_path / "out", {"quantization": settings})
    monkeypatch.setattr("jinfer.loader.weights.storage_plan.columns_here", lambda format: 16)
    monkeypatch.setattr("jinfer.loader.weights.native_parameters.columns_here", lambda format: 16)
    check_equal(leaves(tmp_path / "out"), leaves(MODEL, **settings))


def test_logits_are_the_same(tmp_path: Path) -> None:
    convert(str(MODEL), tmp_path / "out", {"quantization": {"weights": "q3.5", **SMALL}})
    expected = LLM(MODEL, quantization={"weights": "q3.5", **SMALL})
    ours = LLM(tmp_path / "out")
    assert np.array_equal(ours.logits([IDS])[0], expected.logits([IDS])[0])


def test_files_of_a_large_model(tmp_path: Path) -> None:
    tables = {"quantization": {"weights": "q4", **SMALL}}
    convert(str(MODEL), tmp_path / "out", tables, shard_bytes=40_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    check_equal(leaves(tmp_path / "out"), leaves(MODEL, weights="q4", **SMALL))
    for name, reason in ((files[0], "one file of"), (files[-1], "has no tensor")):
        with pytest.raises(CheckpointError, match=reason):
            leaves(write_spec(tmp_path / "out", name))


def write_spec(folder: Path, weights: str) -> Path:
    """A spec for one file of a folder."""
    path = folder / f"{weights}.toml"
    path.write_text(f'family = "llama"\nweights = "{weights}"\n')
    return path


def test_settings_that_no_weight_depends_on_are_free(tmp_path: Path) -> None:
    convert(str(MODEL), tmp_path / "out", {"quantization": {"weights": "q4", **SMALL}})
    loaded = leaves(tmp_path / "out", activations="float", kv_cache="f16", weights="auto")
    assert loaded["decoder.0.attn.q.weight"].activations == "float"
    leaves(tmp_path / "out", weights="q4", threshold=0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weights", "q8"),
        ("weights", "plain"),
        ("embedding", "q4"),
        ("rules", [{"match": "*.attn.q", "weights": "q8"}]),
        ("outliers", 0.01),
    ],
)
def test_weights_are_not_quantized_again(tmp_path: Path, key: str, value: Any) -> None:
    convert(str(MODEL), tmp_path / "out", {"quantization": {"weights": "q4", **SMALL}})
    with pytest.raises(SpecError, match=f"quantization.{key}: .* is converted already") as caught:
        leaves(tmp_path / "out", **{key: value})
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted checkpoint, to be copied."""
    out = tmp_path_factory.mktemp("converted") / "out"
    convert(str(MODEL), out, {"quantization": {"weights": "q4", **SMALL}})
    return out


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes a safetensors file's header; a tensor that goes leaves its bytes to another."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def said(key: str, text: str) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["__metadata__"].update({key: text})


def renamed(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    return lambda header: header.update({new: header.pop(old)})


def reshaped(name: str, shape: list[int]) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update({"shape": shape})


Q = "decoder.0.attn.q.weight"
DAMAGE = {
    "version": (said("version", "2"), CheckpointError, "of version '2', and 1 is known; update"),
    "no version": (said("version", ""), CheckpointError, "of version '', and 1 is known; convert"),
    "json": (said("parameters", "{"), CheckpointError, "__metadata__.parameters is not JSON"),
    "deep": (said("same", "[" * 9999), CheckpointError, "__metadata__.same is not JSON"),
    "list": (said("settings", "[]"), CheckpointError, "__metadata__.settings is not a table"),
    "names": (said("same", '{"a": 1}'), CheckpointError, "same is not a table of names"),
    "no source": (
        lambda header: header["__metadata__"].pop("source"),
        CheckpointError, "one file of a converted checkpoint",
    ),
    "source": (
        in_metadata("source", lambda t: t.update(format="onnx")),
        CheckpointError, "names no format that is known",
    ),
    "tensors": (
        in_metadata("source", lambda t: t["tensors"].update({"lm_head.weight": ["F32", "1"]})),
        CheckpointError, "'lm_head.weight' is not a type and a shape",
    ),
    "no tensors": (
        in_metadata("source", lambda t: t.pop("tensors")), CheckpointError, "has no tensors",
    ),
    "columns": (
        in_metadata("parameters", lambda t: t[Q].pop("columns")),
        CheckpointError, f"'{Q}' needs a shape",
    ),
    "outliers": (
        in_metadata("parameters", lambda t: t[Q].update(outliers=-1)),
        CheckpointError, f"'{Q}' needs a shape",
    ),
    "width": (
        in_metadata("parameters", lambda t: t[Q]["format"].update(width="7")),
        CheckpointError, f"{Q} is in a format that is not known: .*; update jinfer",
    ),
    "field": (
        in_metadata("parameters", lambda t: t[Q]["format"].update(ternary=True)),
        CheckpointError, f"{Q} is in a format that is not known",
    ),
    "block": (
        in_metadata("parameters", lambda t: t[Q]["format"].update(block=48)),
        CheckpointError, f"{Q} is in a format that is not known",
    ),
    "codebook": (
        in_metadata("parameters", lambda t: t[Q]["format"].update(codebook=[1, 2])),
        CheckpointError, f"{Q} is in a format that is not known",
    ),
    "odd columns": (
        in_metadata("parameters", lambda t: t[Q].update(columns=3)),
        CheckpointError, f"{Q} is in a format that is not known",
    ),
    "other blocks": (
        in_metadata("parameters", lambda t: t[Q]["format"].update(block=128)),
        CheckpointError, rf"{Q}.words is U32 .* but has to be uint32 .*",
    ),
    "shape": (
        in_metadata("parameters", lambda t: t[Q].update(shape=[64, 128])),
        LoadError, rf"{Q} is \[64, 128\], but the specification says \[64, 64\]",
    ),
    "other format": (
        in_metadata("parameters", lambda t: t[Q]["format"].update(width="5")),
        CheckpointError, f"{Q}.words is U32 .*, but has to be uint32",
    ),
    "missing part": (
        renamed(f"{Q}.scales", f"{Q}.padding"), CheckpointError, f"has no tensor {Q}.scales",
    ),
    "missing parameter": (
        renamed("decoder.norm.weight", "a.padding"),
        CheckpointError, "has no tensor decoder.norm.weight",
    ),
    "one too many": (
        in_metadata(
            "same", lambda t: t.update({"decoder.norm.weight": "decoder.0.attn_norm.weight"})
        ),
        LoadError, "has no place for decoder.norm.weight",
    ),
    "plain shape": (
        reshaped("decoder.norm.weight", [8, 8]),
        LoadError, r"decoder.norm.weight is \[8, 8\], but the specification says \[64\]",
    ),
    "part's shape": (
        lambda header: header[f"{Q}.words"]["shape"].reverse(),
        CheckpointError, f"{Q}.words is U32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_line(kind: str, converted: Path, tmp_path: Path) -> None:
    change, error, words = DAMAGE[kind]
    out = tmp_path / "out"
    shutil.copytree(converted, out)
    rewrite(out / "model.safetensors", change)
    with pytest.raises(error, match=words) as caught:
        leaves(out)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(out))


def test_a_file_that_is_cut_off(converted: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(converted, out)
    path = out / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cut short"):
        leaves(out)


def test_no_byte_of_the_metadata_breaks_the_reader(converted: Path, tmp_path: Path) -> None:
    """Whatever one byte of the header becomes, there is a model, or one of our errors."""
    out = tmp_path / "out"
    shutil.copytree(converted, out)
    path = out / "model.safetensors"
    good = path.read_bytes()
    end = 8 + int.from_bytes(good[:8], "little")
    rng = np.random.default_rng(0)
    for _ in range(150):
        data = bytearray(good)
        data[int(rng.integers(8, end))] = int(rng.integers(32, 127))
        path.unlink()
        path.write_bytes(data)
        with suppress(*USER_ERRORS):
            opened = open_model(out, {})
            plan_weights(
                build_abstract_model(opened.spec, "float32"),
                opened.spec,
                opened.checkpoint,
                opened.activations,
            )


def test_the_sources_tensors_are_known_but_not_there(converted: Path) -> None:
    checkpoint = open_checkpoint(converted)
    assert checkpoint.format == "safetensors"
    source = open_checkpoint(MODEL)
    shapes = {name: (t.type, t.shape) for name, t in source.tensors.items()}
    assert {name: (t.type, t.shape) for name, t in checkpoint.tensors.items()} == shapes
    with pytest.raises(CheckpointError, match=r"has lm_head\.weight converted only"):
        checkpoint.tensors["lm_head.weight"].read()


def test_other_readers_can_open_the_files(converted: Path) -> None:
    from safetensors.numpy import load_file

    tensors = load_file(converted / "model.safetensors")
    ours = open_safetensors(converted / "model.safetensors").tensors
    assert tensors.keys() == ours.keys()
    assert np.array_equal(tensors[f"{Q}.words"], ours[f"{Q}.words"].read())
