"""Mixtures of experts as Transformers 5 saves them: all experts of a layer in two tensors."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jinfer import LLM
from jinfer.loader.checkpoint import open_checkpoint
from jinfer.loader.weights.tensor_mapping import LoadError
from jinfer.modelspec.spec_files import read_toml, specs_folder

GOLDENS = Path(__file__).parents[2] / "goldens"
TOLERANCE = 2e-4
EXPERT = re.compile(r"(.*)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
# Their names for gate, up and down.
PARTS = {"gate_proj": 0, "up_proj": 1, "down_proj": 2, "w1": 0, "w3": 1, "w2": 2}


def fused(folder: Path) -> dict[str, np.ndarray]:
    """A checkpoint's tensors, the experts' put together."""
    file: dict[str, np.ndarray] = {}
    layers: dict[str, dict[int, dict[int, np.ndarray]]] = defaultdict(lambda: defaultdict(dict))
    for name, tensor in open_checkpoint(folder).tensors.items():
        values = np.ascontiguousarray(tensor.read())
        if found := EXPERT.fullmatch(name):
            layers[found[1]][PARTS[found[3]]][int(found[2])] = values
        else:
            file[name.replace(".block_sparse_moe.", ".mlp.")] = values
    for layer, parts in layers.items():
        gate, up, down = (np.stack([parts[n][e] for e in sorted(parts[n])]) for n in range(3))
        file[f"{layer}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        file[f"{layer}.mlp.experts.down_proj"] = down
    return file


def saved(folder: Path, name: str, file: dict[str, np.ndarray]) -> Path:
    save_file(file, folder / "model.safetensors")
    (folder / "config.json").write_bytes((GOLDENS / name / "config.v5.json").read_bytes())
    return folder


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v2"])
def test_fused_experts(tmp_path: Path, name: str) -> None:
    file = fused(GOLDENS / name)
    assert not any(".experts.0." in each for each in file)
    with np.load(GOLDENS / name / "expected.npz") as arrays:
        requested, expected = arrays["long_input_ids"][0].tolist(), arrays["long_logits"][0]
    got = LLM(saved(tmp_path, name, file), dtype="float32").logits([requested])[0]
    np.testing.assert_allclose(got[3::4], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("tensor", ["gate_up_proj", "down_proj"])
def test_an_expert_too_few(tmp_path: Path, tensor: str) -> None:
    file = fused(GOLDENS / "mixtral")
    name = f"model.layers.0.mlp.experts.{tensor}"
    file[name] = file[name][1:]
    with pytest.raises(LoadError, match=rf"{tensor} is \[\d+, \d+, \d+\] for decoder\.0\.ffn\."):
        LLM(saved(tmp_path, "mixtral", file), dtype="float32")


def test_no_experts_at_all(tmp_path: Path) -> None:
    """The error names both forms."""
    file = fused(GOLDENS / "mixtral")
    del file["model.layers.1.mlp.experts.down_proj"]
    names = r"1\.mlp\.experts\.down_proj or model\.layers\.1\.block_sparse_moe\.experts\.0\.w2\."
    with pytest.raises(LoadError, match=names):
        LLM(saved(tmp_path, "mixtral", file), dtype="float32")


def entries(family: str) -> dict[str, Any]:
    return read_toml(specs_folder() / "families" / f"{family}.toml").get("tensors", {})


def test_every_family_with_separate_experts_has_both() -> None:
    families = [path.stem for path in (specs_folder() / "families").glob("*.toml")]
    separate = [name for name in families if "experts.{e}" in json.dumps(entries(name))]
    assert len(separate) >= 6
    for name in separate:
        block = "moe" if "decoder.{i}.moe.experts.down" in entries(name) else "ffn"
        experts = f"decoder.{{i}}.{block}.experts"
        assert entries(name)[f"{experts}.down.weight"].endswith(".experts.down_proj")
        if f"{experts}.gate" in entries(name):
            assert entries(name)[f"{experts}.{{gate,up}}.weight"]["axis"] == 1
