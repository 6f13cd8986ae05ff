"""Encoders of images in llama.cpp's files (mmproj), written from the weights of goldens."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose
from safetensors.numpy import load_file

from jinfer.loader.open_model import open_model
from tests.families.gguf_files import write_gguf
from tests.families.vision_encoders import expected, features, opened
from tests.images.image_goldens import golden

LAYER = {
    **{f"self_attn.{key}_proj": f"attn_{key}" for key in "qkv"},
    **{f"attention.{key}_proj": f"attn_{key}" for key in "qkv"},
    "self_attn.out_proj": "attn_out",
    "attention.projection_layer": "attn_out",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "layernorm_before": "ln1",
    "layernorm_after": "ln2",
    "lambda_1": "ls1.weight",
    "lambda_2": "ls2.weight",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
OTHERS = {
    "embeddings.patch_embedding": "v.patch_embd",
    "embeddings.patch_embeddings.projection": "v.patch_embd",
    "embeddings.position_embedding": "v.position_embd",
    "embeddings.position_embeddings": "v.position_embd.weight",
    "embeddings.cls_token": "v.class_embd",
    "post_layernorm": "v.post_ln",
    "model.connector.modality_projection.proj": "mm.model.fc",
    "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
    "multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
    "multi_modal_projector.layer_norm": "mm.model.mlp.0",
    "multi_modal_projector.linear_1": "mm.model.mlp.1",
    "multi_modal_projector.linear_2": "mm.model.mlp.3",
}
# Golden -> kind of projector, the text's architecture, keys of the encoder, changes of tensors.
KINDS: dict[str, tuple[str, str, dict[str, Any], Callable[[str, np.ndarray], np.ndarray]]] = {
    "smolvlm": ("idefics3", "llama", {"projector.scale_factor": 2}, lambda name, values: values),
    "gemma3": (
        "gemma3",
        "gemma3",
        {"projector.scale_factor": 2},
        lambda name, values: values + 1 if "soft_emb_norm" in name else values,
    ),
    "internvl": (
        "internvl",
        "qwen2",
        {"projector.scale_factor": 2},
        lambda name, values: values[0] if "position" in name else values.squeeze(),
    ),
}


def name_in_gguf(name: str) -> str:
    """llama.cpp's name of a tensor."""
    for start in ("model.vision_model.", "vision_tower."):
        name = name.removeprefix(start)
    stem, dot, leaf = name.rpartition(".")
    whole = name in OTHERS or leaf not in ("weight", "bias")
    stem, end = (name, "") if whole else (stem, dot + leaf)
    if stem.startswith("encoder.layer"):
        _, _, number, part = stem.split(".", 3)
        return f"v.blk.{number}.{LAYER[part]}{end}"
    return OTHERS[stem] + end


def write_mmproj(name: str, path: Path) -> None:
    """Writes the encoder of a golden."""
    kind, _, more, changed = KINDS[name]
    config = json.loads((golden(name) / "config.json").read_text())
    vision = config["vision_config"]
    side, patch = (np.ravel(vision[key])[0] for key in ("image_size", "patch_size"))
    keys: dict[str, Any] = {
        "has_vision_encoder": True,
        "projector_type": kind,
        "use_gelu": True,
        "vision.image_size": int(side),
        "vision.patch_size": int(patch),
        "vision.embedding_length": vision["hidden_size"],
        "vision.feed_forward_length": vision["intermediate_size"],
        "vision.block_count": vision["num_hidden_layers"],
        "vision.attention.head_count": vision["num_attention_heads"],
        "vision.attention.layer_norm_epsilon": vision["layer_norm_eps"],
        "vision.projection_dim": config["text_config"]["hidden_size"],
        "vision.image_mean": [0.5, 0.5, 0.5],
        "vision.image_std": [0.5, 0.5, 0.5],
        **{f"vision.{key}": value for key, value in more.items()},
    }
    held = load_file(golden(name) / "model.safetensors")
    parts = ("vision_model", "vision_tower", "connector", "multi_modal_projector")
    own = {n: values for n, values in held.items() if any(part in n for part in parts)}
    tensors = {name_in_gguf(n): changed(n, values) for n, values in own.items()}
    write_gguf(path, "clip", keys, tensors)


def write_text(name: str, path: Path) -> None:
    """Writes a small text model of the same architecture, whose weights are not looked at."""
    sizes = {"embedding_length": 64, "block_count": 1, "feed_forward_length": 32}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2, "context_length": 256}
    keys: dict[str, Any] = sizes | {"attention.layer_norm_rms_epsilon": 1e-6}
    keys |= {"attention.key_length": 16, "attention.value_length": 16}
    keys |= {"vocab_size": 320, **({"attention.sliding_window": 8} if name == "gemma3" else {})}
    shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    shapes |= {"ffn_gate": (32, 64), "ffn_up": (32, 64), "ffn_down": (64, 32)}
    tensors: dict[str, np.ndarray] = {
        f"blk.0.{key}.weight": np.ones(shape, np.float32) for key, shape in shapes.items()
    }
    tensors |= {f"blk.0.{key}.weight": np.ones(64, np.float32) for key in ("attn_norm", "ffn_norm")}
    tensors |= {"token_embd.weight": np.ones((320, 64), np.float32)}
    tensors |= {"output_norm.weight": np.ones(64, np.float32)}
    write_gguf(path, KINDS[name][1], keys, tensors)


@pytest.mark.parametrize("name", KINDS)
def test_features_from_a_file_in_the_same_folder(name: str, tmp_path: Path) -> None:
    write_mmproj(name, tmp_path / "mmproj-model-f32.gguf")
    write_text(name, tmp_path / "model-f32.gguf")
    for source in (tmp_path, tmp_path / "model-f32.gguf"):
        _, encoder = opened(source)
        rows, _ = features(name, "b", encoder)
        assert_allclose(rows, expected(name)["features_b"], rtol=0, atol=1e-4)


def test_a_file_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    write_mmproj("smolvlm", tmp_path / "other" / "encoder.gguf")
    write_text("smolvlm", tmp_path / "model.gguf")
    assert open_model(tmp_path, {}).spec.vision is None
    _, encoder = opened(tmp_path, mmproj=str(tmp_path / "other" / "encoder.gguf"))
    rows, _ = features("smolvlm", "a", encoder)
    assert_allclose(rows, expected("smolvlm")["features_a"], rtol=0, atol=1e-4)


def test_of_several_files_none_is_taken(tmp_path: Path) -> None:
    write_mmproj("smolvlm", tmp_path / "mmproj-a.gguf")
    shutil.copy(tmp_path / "mmproj-a.gguf", tmp_path / "mmproj-b.gguf")
    write_text("smolvlm", tmp_path / "model.gguf")
    assert open_model(tmp_path / "model.gguf", {}).spec.vision is None
