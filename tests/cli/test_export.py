"""jinfer quantize --layout: what other engines read, by their own definitions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import load_file

from jinfer import LLM
from jinfer.cli.quantize.quantize_checkpoint import convert, main
from jinfer.cli.quantize.write_gguf import GGUFWriter, StoredTensor, uint32
from jinfer.loader.checkpoint import CheckpointError, open_checkpoint
from jinfer.loader.checkpoint.gguf import raw_metadata

GOLDENS = Path(__file__).parents[1] / "goldens"
IDS = [[1, 5, 9, 40, 3, 7]]


def _tables(format: str, **more: Any) -> dict[str, Any]:
    quantization = {"weights": format, "threshold": 0, "method": "rtn", **more}
    return {"quantization": quantization}


@pytest.mark.parametrize(
    ("layout", "model", "format"),
    [
        ("gptq", "qwen3", "q4_b32_sym"),
        ("gptq", "phi3_mini_4k", "q8_b32"),
        ("gptq", "llama2", "q3_b32_sym"),
        ("compressed-tensors", "mixtral", "q4_b32_sym"),
        ("compressed-tensors", "phi3_mini_4k", "q8"),
    ],
)
def test_folders(layout: str, model: str, format: str, tmp_path: Path) -> None:
    """What is read again is what a native checkpoint has."""
    out = tmp_path / "out"
    convert(str(GOLDENS / model), out, _tables(format), layout=layout)
    assert (out / "config.json").is_file()
    convert(str(GOLDENS / model), tmp_path / "native", _tables(format))
    ours, native = (LLM(item, dtype="float32").weights for item in (out, tmp_path / "native"))
    plain, exported = LLM(GOLDENS / model, dtype="float32").weights, 0
    for name in ours:
        values = ours[name].values
        if not np.array_equal(values, plain[name].values):
            assert np.array_equal(values, native[name].values), name
            exported += 1
    assert exported >= 8


def test_gptq_by_its_definition(tmp_path: Path) -> None:
    out, name = tmp_path / "out", "model.layers.0.mlp.up_proj"
    convert(str(GOLDENS / "qwen3"), out, _tables("q4_b32_sym"), layout="gptq")
    arrays = load_file(out / "model.safetensors")
    words = arrays[f"{name}.qweight"].view(np.uint32)
    codes = (words[:, None] >> (4 * np.arange(8, dtype=np.uint32))[:, None]) & 15  # [k / 8, 8, o]
    levels = codes.reshape(-1, words.shape[1]).astype(np.float32)
    packed = arrays[f"{name}.qzeros"].view(np.uint32)[..., None]
    zeros = (packed >> 4 * np.arange(8, dtype=np.uint32) & 15).reshape(len(packed), -1) + 1
    group = arrays[f"{name}.g_idx"]
    scales = arrays[f"{name}.scales"].astype(np.float32)
    weights = ((levels - zeros[group].astype(np.float32)) * scales[group]).T
    source = open_checkpoint(GOLDENS / "qwen3").tensors[f"{name}.weight"].read()
    steps = np.repeat(np.abs(scales.T), 32, axis=1)
    assert (np.abs(weights - source.astype(np.float32)) <= 0.51 * steps).mean() > 0.95
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (config["bits"], config["group_size"], config["sym"]) == (4, 32, True)
    assert f"{name}.weight" not in arrays
    assert "model.embed_tokens.weight" in arrays


@pytest.mark.parametrize(
    ("model", "format", "type"),
    [
        ("gguf_llama2", "q4_sym", "Q4_0"),
        ("gguf_qwen3", "q4", "Q4_1"),
        ("gguf_mixtral", "q5_sym", "Q5_0"),
        ("gguf_phi2", "q5", "Q5_1"),
        ("gguf_qwen3", "q8", "Q8_0"),
    ],
)
def test_gguf(model: str, format: str, type: str, tmp_path: Path) -> None:
    """The gguf package decodes each matrix to what is near the source's; metadata is kept."""
    source, out = GOLDENS / model / "model.gguf", tmp_path / "out"
    convert(str(source), out, _tables(format), layout="gguf")
    before, after = (GGUFReader(path) for path in (source, out / "model.gguf"))
    told = {"general.file_type", "general.quantization_version"}
    kept = {name for name in before.fields if not name.startswith("GGUF.")} - told
    for name in kept:
        assert after.fields[name].contents() == before.fields[name].contents()
    expected = {tensor.name: tensor for tensor in before.tensors}
    assert [tensor.name for tensor in after.tensors] == list(expected)
    types = set()
    for tensor in after.tensors:
        own, original = (
            dequantize(item.data, item.tensor_type) for item in (tensor, expected[tensor.name])
        )
        error = np.abs(own - original).max() / np.abs(original).max()
        types.add(tensor.tensor_type.name)
        assert error <= (0 if tensor.tensor_type == expected[tensor.name].tensor_type else 0.1)
    assert type in types
    ours, theirs = LLM(out, dtype="float32"), LLM(source, dtype="float32")
    assert np.corrcoef(ours.logits(IDS)[0].ravel(), theirs.logits(IDS)[0].ravel())[0, 1] > 0.9


def test_split_source(tmp_path: Path) -> None:
    """The metadata of the first part, whichever part is given."""
    source = GOLDENS / "gguf_llama2" / "model.gguf"
    metadata, tensors = raw_metadata(source), list(open_checkpoint(source).tensors.items())
    halves = tensors[:12], tensors[12:]
    paths = [tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    for number, (path, half) in enumerate(zip(paths, halves, strict=True)):
        split = {"split.no": number, "split.count": 2, "split.tensors.count": len(tensors)}
        own = metadata if number == 0 else {}
        own = own | {key: uint32(value) for key, value in split.items()}
        stored = {name: StoredTensor(tensor.shape, tensor.type) for name, tensor in half}
        with GGUFWriter(path, own, stored) as writer:
            for name, tensor in half:
                writer.write(name, tensor.raw())
    first, last = paths
    for part in (first, last):
        convert(str(part), tmp_path / part.stem, _tables("q8"), layout="gguf")
    files = [(tmp_path / part.stem / "model.gguf").read_bytes() for part in (first, last)]
    assert files[0] == files[1]
    assert "llama.block_count" in GGUFReader(tmp_path / last.stem / "model.gguf").fields


def test_file_is_closed_on_an_error(tmp_path: Path) -> None:
    tensors = {"a": StoredTensor((32,), "F32")}
    with pytest.raises(KeyError), GGUFWriter(tmp_path / "m.gguf", {}, tensors) as writer:
        writer.write("b", np.zeros(32, np.float32))
    with pytest.raises(ValueError, match="closed"):
        writer.write("a", np.zeros(32, np.float32))


@pytest.mark.parametrize("layout", ["gptq", "compressed-tensors"])
def test_no_config(tmp_path: Path, layout: str) -> None:
    """Refused before anything is quantized."""
    spec, source = tmp_path / "m.toml", GOLDENS / "qwen3"
    (weights := tmp_path / "bare.safetensors").write_bytes(
        (source / "model.safetensors").read_bytes()
    )
    spec.write_text(f'family = "qwen3"\nweights = "{weights}"\n')
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        convert(str(spec), tmp_path / "out", _tables("q4_b32_sym"), layout=layout)


def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for layout, format, reason in (
        ("gptq", "q4", "does not hold q4"),
        ("gptq", "q5_sym", "does not hold q5_sym"),
        ("gguf", "q4_sym", "is no GGUF file"),
        ("compressed-tensors", "plain", "name a format"),
    ):
        arguments = [str(GOLDENS / "qwen3"), str(tmp_path / "out"), "--weights", format]
        assert main([*arguments, "--layout", layout, "--set", "quantization.threshold=0"]) == 2
        error = capsys.readouterr().err
        assert reason in error
        assert error.count("\n") == 1
        assert not (tmp_path / "out").exists()
