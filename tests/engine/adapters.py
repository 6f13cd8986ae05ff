"""LoRA adapters as PEFT writes them, and the weights that they are merged into."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.engine.tiny import GOLDEN

TARGETS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
           "mlp.up_proj", "mlp.down_proj")  # fmt: skip


def write_adapter(
    folder: Path,
    rank: int,
    seed: int,
    *,
    targets: tuple[str, ...] = TARGETS,
    tensors: dict[str, np.ndarray] | None = None,
    base: Path = GOLDEN,
    dora: bool = False,
    turned: bool = False,
    **config: Any,
) -> Path:
    """An adapter of random matrices for modules of a checkpoint; `turned` ones are [in, out]."""
    folder.mkdir(exist_ok=True)
    rng, found = np.random.default_rng(seed), {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module.endswith(targets):
            outputs, inputs = weight.shape[::-1] if turned else weight.shape
            place = f"base_model.model.{module}"
            found[f"{place}.lora_A.weight"] = rng.normal(0, 0.1, (rank, inputs))
            found[f"{place}.lora_B.weight"] = rng.normal(0, 0.1, (outputs, rank))
            if dora:
                length = np.linalg.norm(weight.astype(np.float32), axis=1)
                found[f"{place}.lora_magnitude_vector"] = length * rng.uniform(0.8, 1.2, outputs)
    found |= tensors or {}
    arrays = {name: each.astype(np.float32) for name, each in found.items()}
    save_file(arrays, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    said |= {"target_modules": [each.split(".")[-1] for each in targets], "use_dora": dora}
    (folder / "adapter_config.json").write_text(json.dumps(said | config))
    return folder


def in_steps_of_int8(adapter: Path, into: Path) -> Path:
    """An adapter with each row of A and column of B rounded to 255 evenly spaced numbers."""
    into.mkdir()
    shutil.copy(adapter / "adapter_config.json", into)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, matrix in tensors.items():
        step = np.abs(matrix).max(axis=1 if ".lora_A." in name else 0, keepdims=True) / 127
        tensors[name] = np.rint(matrix / step) * step
    save_file(tensors, into / "adapter_model.safetensors")
    return into


def merge_by_hand(adapter: Path, into: Path, base: Path = GOLDEN) -> Path:
    """A checkpoint with W + scale B A, and DoRA's magnitudes, in float32 from the formulas."""
    into.mkdir(exist_ok=True)
    weights = {n: w.astype(np.float32) for n, w in load_file(base / "model.safetensors").items()}
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        stem = name.removesuffix(".lora_A.weight")
        weight = stem.removeprefix("base_model.model.") + ".weight"
        root = math.sqrt(len(a)) if config.get("use_rslora") else len(a)
        b = tensors[f"{stem}.lora_B.weight"]
        whole = weights[weight] + config["lora_alpha"] / root * (b @ a)
        if (lengths := tensors.get(f"{stem}.lora_magnitude_vector")) is not None:
            whole *= (lengths / np.linalg.norm(whole, axis=1))[:, None]
        weights[weight] = whole
    save_file(weights, into / "model.safetensors")
    said = json.loads((base / "config.json").read_text()) | {"torch_dtype": "float32"}
    (into / "config.json").write_text(json.dumps(said))
    return into


def write_gguf_adapter(path: Path, matrices: dict[str, tuple[int, int]], rank: int) -> Path:
    """An adapter of random matrices in llama.cpp's file: `[outputs, inputs]` by tensor."""
    rng = np.random.default_rng(rank)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 2.0 * rank)
    for name, (outputs, inputs) in matrices.items():
        a, b = rng.normal(0, 0.1, (rank, inputs)), rng.normal(0, 0.1, (outputs, rank))
        writer.add_tensor(f"{name}.lora_a", a.astype(np.float32))
        writer.add_tensor(f"{name}.lora_b", b.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
