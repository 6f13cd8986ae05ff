"""Encoders of images without a golden, against their definition in NumPy, on random weights.

The text around is that of a golden whose encoder is another.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.testing import assert_allclose
from safetensors.numpy import load_file, save_file

from jinfer.engine.runner.image_encoder import EncodedTiles
from tests.families.vision_encoders import opened
from tests.images.image_goldens import golden
from tests.nn.test_image_modules import axis_weights, places, rotated
from tests.reference.numpy_images import (
    Floats,
    Tower,
    gelu,
    gelu_tanh,
    layer_norm,
    linear,
    merged,
    rms_norm,
    silu,
)

RNG = np.random.default_rng(0)
HIDDEN, INNER, TEXT, PATCH, LAYERS = 16, 24, 64, 4, 3
ROWS, COLUMNS = 6, 10


def drawn(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = RNG.normal(size=shape) * 0.3
        return (noise + ("norm" in name and name.endswith("weight"))).astype(np.float32)

    return {name: values(name, shape) for name, shape in shapes.items()}


def projections(prefix: str, shapes: Mapping[str, tuple[int, int]], bias: bool = True) -> Any:
    """The shapes of the weights and biases of projections."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        found[f"{prefix}{name}.weight"] = shape
        found |= {f"{prefix}{name}.bias": shape[:1]} if bias else {}
    return found


def norms(*names: str, size: int = HIDDEN, bias: bool = True) -> dict[str, tuple[int, ...]]:
    leaves = ("weight", "bias") if bias else ("weight",)
    return {f"{name}.{leaf}": (size,) for name in names for leaf in leaves}


def encoded(
    tmp_path: Path,
    text: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    grid: tuple[int, int],
) -> tuple[Floats, EncodedTiles]:
    """Random patches, and what the encoder of a checkpoint makes of them."""
    folder = tmp_path / "m"
    folder.mkdir()
    whole = json.loads((golden(text) / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(whole))
    held = load_file(golden(text) / "model.safetensors")
    others = ("vision", "visual", "multi_modal", "image_newline")
    kept = {n: v for n, v in held.items() if not any(part in n for part in others)}
    save_file(kept | dict(tensors), folder / "model.safetensors")
    _, encoder = opened(folder)
    patches = RNG.normal(size=(1, grid[0] * grid[1], 3 * PATCH * PATCH)).astype(np.float32)
    return patches[0].astype(np.float64), encoder.encode(patches, [grid])


def close(found: Floats, wanted: Floats) -> None:
    assert_allclose(found[: len(wanted)], wanted, rtol=0, atol=1e-4)


SIGLIP = "vision_tower.vision_model"
SIGLIP_LAYER = f"{SIGLIP}.encoder.layers.{{i}}"
SIGLIP_CONFIG = {
    "model_type": "siglip_vision_model",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "patch_size": PATCH,
    "image_size": 6 * PATCH,
    "hidden_act": "gelu_pytorch_tanh",
}


def siglip_shapes() -> dict[str, tuple[int, ...]]:
    shapes = {
        f"{SIGLIP}.embeddings.patch_embedding.weight": (HIDDEN, 3, PATCH, PATCH),
        f"{SIGLIP}.embeddings.patch_embedding.bias": (HIDDEN,),
        f"{SIGLIP}.embeddings.position_embedding.weight": (36, HIDDEN),
        **norms(f"{SIGLIP}.post_layernorm"),
    }
    for i in range(LAYERS):
        layer = SIGLIP_LAYER.replace("{i}", str(i))
        shapes |= norms(f"{layer}.layer_norm1", f"{layer}.layer_norm2")
        square = dict.fromkeys(("q_proj", "k_proj", "v_proj", "out_proj"), (HIDDEN, HIDDEN))
        shapes |= projections(f"{layer}.self_attn.", square)
        shapes |= projections(f"{layer}.mlp.", {"fc1": (INNER, HIDDEN), "fc2": (HIDDEN, INNER)})
    return shapes


def siglip_states(t: Mapping[str, Floats], patches: Floats) -> list[Floats]:
    names = {"norm1": f"{SIGLIP_LAYER}.layer_norm1", "norm2": f"{SIGLIP_LAYER}.layer_norm2"}
    names |= {key: f"{SIGLIP_LAYER}.self_attn.{key}_proj" for key in "qkv"}
    names |= {"o": f"{SIGLIP_LAYER}.self_attn.out_proj"}
    names |= {"up": f"{SIGLIP_LAYER}.mlp.fc1", "down": f"{SIGLIP_LAYER}.mlp.fc2"}
    x = linear(t, f"{SIGLIP}.embeddings.patch_embedding", patches)
    x = x + t[f"{SIGLIP}.embeddings.position_embedding.weight"]
    return Tower(names, LAYERS, 2, layer_norm, gelu_tanh).states(t, x)


def doubles(tensors: Mapping[str, np.ndarray]) -> dict[str, Floats]:
    return {name: values.astype(np.float64) for name, values in tensors.items()}


def test_paligemma(tmp_path: Path) -> None:
    shapes = projections("multi_modal_projector.", {"linear": (TEXT, HIDDEN)})
    tensors = drawn(siglip_shapes() | shapes)
    config: dict[str, Any] = {"architectures": ["PaliGemmaForConditionalGeneration"]}
    config |= {"vision_config": SIGLIP_CONFIG}
    patches, found = encoded(tmp_path, "llava", config, tensors, (6, 6))
    t = doubles(tensors)
    x = layer_norm(t, f"{SIGLIP}.post_layernorm", siglip_states(t, patches)[-1], 1e-6)
    close(found.features[0], linear(t, "multi_modal_projector.linear", x))


def test_aya_vision(tmp_path: Path) -> None:
    wide = {"linear_1": (40, 4 * HIDDEN), "linear_2": (TEXT, 20)}
    shapes = projections("multi_modal_projector.", wide)
    shapes |= norms("multi_modal_projector.layernorm", size=4 * HIDDEN)
    tensors = drawn(siglip_shapes() | shapes)
    config = {
        "architectures": ["AyaVisionForConditionalGeneration"],
        "alignment_intermediate_size": 40,
        "downsample_factor": 2,
        "vision_feature_layer": -1,
        "vision_config": SIGLIP_CONFIG,
    }
    patches, found = encoded(tmp_path, "llava", config, tensors, (6, 6))
    t = doubles(tensors)
    x = merged(siglip_states(t, patches)[-1], 6, 6, 2)
    x = layer_norm(t, "multi_modal_projector.layernorm", x, 1e-6)
    first, second = np.split(linear(t, "multi_modal_projector.linear_1", x), 2, axis=-1)
    close(found.features[0], linear(t, "multi_modal_projector.linear_2", silu(second) * first))


def test_granite_vision(tmp_path: Path) -> None:
    wide = {"linear_1": (TEXT, 2 * HIDDEN), "linear_2": (TEXT, TEXT)}
    shapes = projections("multi_modal_projector.", wide) | {"image_newline": (TEXT,)}
    tensors = drawn(siglip_shapes() | shapes)
    config: dict[str, Any] = {
        "vision_feature_layer": [-3, -1],
        "vision_feature_select_strategy": "full",
    }
    config |= {"vision_config": SIGLIP_CONFIG}
    patches, found = encoded(tmp_path, "llava_next", config, tensors, (6, 6))
    t = doubles(tensors)
    states = siglip_states(t, patches)
    x = np.concatenate([states[-3], states[-1]], axis=-1)
    x = gelu(linear(t, "multi_modal_projector.linear_1", x))
    close(found.features[0], linear(t, "multi_modal_projector.linear_2", x))
    assert found.newline is not None
    assert_allclose(found.newline, tensors["image_newline"])


def test_pixtral(tmp_path: Path) -> None:
    layer = "vision_tower.transformer.layers.{i}"
    shapes: dict[str, tuple[int, ...]] = {}
    shapes["vision_tower.patch_conv.weight"] = (HIDDEN, 3, PATCH, PATCH)
    shapes |= norms("vision_tower.ln_pre", bias=False)
    for i in range(LAYERS):
        prefix = layer.replace("{i}", str(i))
        shapes |= norms(f"{prefix}.attention_norm", f"{prefix}.ffn_norm", bias=False)
        square = {f"{key}_proj": (HIDDEN, HIDDEN) for key in "qkvo"}
        shapes |= projections(f"{prefix}.attention.", square, bias=False)
        gated = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN)}
        gated |= {"down_proj": (HIDDEN, INNER)}
        shapes |= projections(f"{prefix}.feed_forward.", gated, bias=False)
    wide = {"linear_1": (TEXT, HIDDEN), "linear_2": (TEXT, TEXT)}
    tensors = drawn(shapes | projections("multi_modal_projector.", wide))
    vision = {
        "model_type": "pixtral",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "patch_size": PATCH,
        "image_size": 16 * PATCH,
        "rope_theta": 100.0,
        "hidden_act": "silu",
    }
    config = {"vision_config": vision, "vision_feature_layer": -1}
    config |= {"vision_feature_select_strategy": "full"}
    patches, found = encoded(tmp_path, "llava", config, tensors, (ROWS, COLUMNS))
    t, at = doubles(tensors), places(ROWS, COLUMNS, 1)
    names = {"norm1": f"{layer}.attention_norm", "norm2": f"{layer}.ffn_norm"}
    names |= {key: f"{layer}.attention.{key}_proj" for key in "qkvo"}
    names |= {key: f"{layer}.feed_forward.{key}_proj" for key in ("gate", "up", "down")}
    tower = Tower(
        names,
        LAYERS,
        2,
        rms_norm,
        silu,
        eps=1e-5,
        rotate=lambda head, n: rotated(head, *at[n], theta=100.0, shifted=True),
    )
    x = rms_norm(t, "vision_tower.ln_pre", linear(t, "vision_tower.patch_conv", patches), 1e-5)
    x = gelu(linear(t, "multi_modal_projector.linear_1", tower.states(t, x)[-1]))
    close(found.features[0], linear(t, "multi_modal_projector.linear_2", x))


def test_qwen2_5_vl(tmp_path: Path) -> None:
    """Attention in windows of 4 x 4 patches, ragged at both edges, but in one layer."""
    layer = "visual.blocks.{i}"
    shapes: dict[str, tuple[int, ...]] = {
        "visual.patch_embed.proj.weight": (HIDDEN, 3, 2, PATCH, PATCH),
        **norms("visual.merger.ln_q", bias=False),
        **projections("visual.merger.mlp.", {"0": (64, 64), "2": (TEXT, 64)}),
    }
    for i in range(LAYERS):
        prefix = layer.replace("{i}", str(i))
        shapes |= norms(f"{prefix}.norm1", f"{prefix}.norm2", bias=False)
        shapes |= projections(f"{prefix}.attn.", {"qkv": (48, HIDDEN), "proj": (HIDDEN, HIDDEN)})
        gated = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN)}
        shapes |= projections(f"{prefix}.mlp.", gated | {"down_proj": (HIDDEN, INNER)})
    tensors = drawn(shapes)
    vision = {
        "model_type": "qwen2_5_vl",
        "depth": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 4 * PATCH,
        "fullatt_block_indexes": [1],
        "out_hidden_size": TEXT,
        "hidden_act": "silu",
    }
    config = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": vision}
    patches, found = encoded(tmp_path, "qwen2_vl", config, tensors, (ROWS, COLUMNS))
    t, at = doubles(tensors), places(ROWS, COLUMNS, 2)
    t["visual.patch_embed.proj.weight"] = t["visual.patch_embed.proj.weight"].sum(axis=2)
    windows = [(row // 4, column // 4) for row, column in at]
    same = np.array([[a == b for b in windows] for a in windows])
    names = {"norm1": f"{layer}.norm1", "norm2": f"{layer}.norm2"}
    names |= {"qkv": f"{layer}.attn.qkv", "o": f"{layer}.attn.proj"}
    names |= {key: f"{layer}.mlp.{key}_proj" for key in ("gate", "up", "down")}
    tower = Tower(
        names,
        LAYERS,
        2,
        rms_norm,
        silu,
        rotate=lambda head, n: rotated(head, *at[n]),
        seen=lambda number: None if number == 1 else same,
    )
    x = tower.states(t, linear(t, "visual.patch_embed.proj", patches))[-1]
    x = rms_norm(t, "visual.merger.ln_q", x, 1e-6).reshape(-1, 4 * HIDDEN)
    x = gelu(linear(t, "visual.merger.mlp.0", x))
    close(found.features[0], linear(t, "visual.merger.mlp.2", x))


def test_kimi_vl(tmp_path: Path) -> None:
    layer = "vision_tower.encoder.blocks.{i}"
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (HIDDEN, 3, PATCH, PATCH),
        "vision_tower.patch_embed.proj.bias": (HIDDEN,),
        "vision_tower.patch_embed.pos_emb.weight": (8, 8, HIDDEN),
        **norms("vision_tower.encoder.final_layernorm", "multi_modal_projector.pre_norm"),
        **projections("multi_modal_projector.", {"linear_1": (64, 64), "linear_2": (TEXT, 64)}),
    }
    for i in range(LAYERS):
        prefix = layer.replace("{i}", str(i))
        shapes |= norms(f"{prefix}.norm0", f"{prefix}.norm1")
        shapes |= projections(f"{prefix}.", {"wqkv": (48, HIDDEN), "wo": (HIDDEN, HIDDEN)})
        shapes |= projections(f"{prefix}.mlp.", {"fc0": (INNER, HIDDEN), "fc1": (HIDDEN, INNER)})
    tensors = drawn(shapes)
    vision = {
        "model_type": "moonvit",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "patch_size": PATCH,
        "init_pos_emb_height": 8,
        "init_pos_emb_width": 8,
        "merge_kernel_size": [2, 2],
    }
    config = {"architectures": ["KimiVLForConditionalGeneration"], "vision_config": vision}
    patches, found = encoded(tmp_path, "llava", config, tensors, (ROWS, COLUMNS))
    t, at = doubles(tensors), places(ROWS, COLUMNS, 1)
    names = {"norm1": f"{layer}.norm0", "norm2": f"{layer}.norm1", "qkv": f"{layer}.wqkv"}
    names |= {"o": f"{layer}.wo", "up": f"{layer}.mlp.fc0", "down": f"{layer}.mlp.fc1"}
    fields: dict[str, Any] = {"pairs": "adjacent", "order": "column", "interleaved": True}
    tower = Tower(
        names,
        LAYERS,
        2,
        layer_norm,
        gelu_tanh,
        eps=1e-5,
        rotate=lambda head, n: rotated(head, *at[n], **fields),
    )
    table = t["vision_tower.patch_embed.pos_emb.weight"]
    axes = [axis_weights(8, count, "cubic", False, False) for count in (ROWS, COLUMNS)]
    position = np.einsum("ri,cj,ijw->rcw", *axes, table).reshape(-1, HIDDEN)
    x = tower.states(t, linear(t, "vision_tower.patch_embed.proj", patches) + position)[-1]
    x = layer_norm(t, "vision_tower.encoder.final_layernorm", x, 1e-5)
    x = layer_norm(t, "multi_modal_projector.pre_norm", x, 1e-5)
    x = gelu(linear(t, "multi_modal_projector.linear_1", merged(x, ROWS, COLUMNS, 2)))
    close(found.features[0], linear(t, "multi_modal_projector.linear_2", x))
