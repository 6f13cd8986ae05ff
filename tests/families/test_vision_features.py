"""Features of images against those of transformers, from equal pixel values."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose
from safetensors.numpy import load_file, save_file

from jinfer.loader.open_model import open_model
from jinfer.loader.weights.tensor_mapping import LoadError
from jinfer.modelspec.spec_errors import SpecError
from tests.families.vision_encoders import (
    encoder_of,
    expected,
    features,
    opened,
    processor_tiles,
)
from tests.images.image_goldens import NAMES, golden


@pytest.mark.parametrize("name", NAMES)
def test_features_are_those_of_transformers(name: str) -> None:
    _, encoder = encoder_of(name)
    for prompt in "ab":
        rows, deepstack = features(name, prompt, encoder)
        arrays = expected(name)
        assert_allclose(rows, arrays[f"features_{prompt}"], rtol=0, atol=1e-4)
        if f"deepstack_visual_embeds_{prompt}" in arrays:
            wanted = arrays[f"deepstack_visual_embeds_{prompt}"]
            assert_allclose(deepstack, wanted, rtol=0, atol=1e-4)
        else:
            assert len(deepstack) == 0


@pytest.mark.parametrize("name", [n for n in NAMES if (golden(n) / "config.v4.json").exists()])
def test_configurations_of_transformers_4_give_the_same_encoder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    shutil.copytree(golden(name), folder)
    shutil.copy(folder / "config.v4.json", folder / "config.json")
    older = open_model(folder, {"dtype": "float32"}).spec.vision
    newer = encoder_of(name)[0].spec.vision
    assert older is not None
    assert newer is not None
    assert older.stacks == newer.stacks


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "lfm2_vl", "minicpmv4_6", "gemma4"])
def test_tiles_have_equal_bits_alone_batched_and_padded(name: str) -> None:
    _, encoder = encoder_of(name)
    _, (image, patches) = processor_tiles(name, "b")
    whole = encoder.encode(patches, image.grids)
    for i, (rows, columns) in enumerate(image.grids):
        count = rows * columns
        alone = encoder.encode(patches[i : i + 1, :count], [(rows, columns)])
        more = np.full((1, 100, patches.shape[2]), 7, np.float32)  # garbage after the patches
        more[0, :count] = patches[i, :count]
        wide = encoder._encode(more, [(rows, columns)], 256)
        own = image.order[image.order[:, 0] == i][:, 1]
        for other in (alone, wide):
            assert np.array_equal(whole.features[i, own], other.features[0, own])
            assert np.array_equal(whole.deepstack[:, i, own], other.deepstack[:, 0, own])


def changed(name: str, folder: Path, **tensors: np.ndarray | None) -> Path:
    """A copy of a golden with other tensors, without those that are None."""
    shutil.copytree(golden(name), folder)
    held = load_file(folder / "model.safetensors")
    for pattern, values in tensors.items():
        for each in [n for n in held if pattern in n] if values is None else ():
            del held[each]
        if values is not None:
            held[pattern] = values
    save_file(held, folder / "model.safetensors")
    return folder


def test_a_checkpoint_without_its_encoder_reads_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = changed("smolvlm", tmp_path / "m", vision_model=None, connector=None)
    spec = open_model(folder, {}).spec
    assert spec.vision is None
    assert spec.image is None
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"{folder}: reads text alone: it has no tensors of its image encoder"]


def test_an_encoder_with_tensors_that_nothing_uses_is_refused(tmp_path: Path) -> None:
    more = {"model.vision_model.encoder.layers.0.extra.weight": np.ones(2, np.float32)}
    with pytest.raises(LoadError, match=r"no place for model\.vision_model\.encoder\.layers\.0"):
        opened(changed("smolvlm", tmp_path / "m", **more))


def test_a_key_of_the_encoder_that_nothing_follows_is_refused(tmp_path: Path) -> None:
    folder = changed("glm4v", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["hidden_activation"] = "relu"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecError, match="hidden_activation"):
        open_model(folder, {})


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("smolvlm", "model.", ""),
        ("gemma3", "vision_tower.", "model.vision_tower.vision_model."),
        ("llava", "vision_tower.", "vision_tower.vision_model."),
        ("qwen2_vl", "visual.", "model.visual."),
        ("mistral3", "vision_tower.", "model.vision_tower."),
    ],
)
def test_both_spellings_of_tensor_names(name: str, before: str, after: str, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(golden(name), folder)
    held = load_file(folder / "model.safetensors")
    parts = ("vision", "visual", "connector")
    renamed = {
        after + n.removeprefix(before)
        if n.startswith(before) and any(part in n for part in parts)
        else n: values
        for n, values in held.items()
    }
    assert renamed.keys() != held.keys()
    save_file(renamed, folder / "model.safetensors")
    _, encoder = opened(folder)
    rows, _ = features(name, "a", encoder)
    assert_allclose(rows, expected(name)["features_a"], rtol=0, atol=1e-4)


# SmolVLM's computation under other names, with sizes that no config.json has.
MADE_UP = '''
family  = "llama"
weights = "weights"

[dims]
vocab        = 309
hidden       = 64
layers       = 2
heads        = 4
kv_heads     = 1
head_dim     = 16
intermediate = 48

[image]
placeholder = 290
patch       = 8
mean        = [0.5, 0.5, 0.5]
std         = [0.5, 0.5, 0.5]
merge       = 2

[image.resize]
kind = "fixed"
side = 32

[vision.dims]
hidden       = 32
layers       = 2
heads        = 2
kv_heads     = 2
head_dim     = 16
intermediate = 64

[vision]
stem  = "look(patches) + place(grid)"
layer = """
x = x + attend(n1(x))
x = x + think(n2(x))
"""
head  = "say(join(end(x), grid))"

[vision.modules]
look   = { kind = "linear", inputs = 192, bias = true }
place  = { kind = "grid_positions", side = 4 }
n1     = { kind = "layer", eps = 1e-6 }
attend = { kind = "attention", bias = true }
n2     = { kind = "layer", eps = 1e-6 }
think  = { kind = "mlp", activation = "gelu_pytorch_tanh", bias = true }
end    = { kind = "layer", eps = 1e-6 }
join   = { kind = "merge", size = 2 }
say    = { kind = "linear", inputs = 128, outputs = 64 }

[tensors]
prefix               = { "model.text_model." = "model." }
"vision.look"        = "eye.patches"
"vision.place"       = "eye.places"
"vision.{i}.n1"      = "eye.{i}.layer_norm1"
"vision.{i}.attend.q" = "eye.{i}.self_attn.q_proj"
"vision.{i}.attend.k" = "eye.{i}.self_attn.k_proj"
"vision.{i}.attend.v" = "eye.{i}.self_attn.v_proj"
"vision.{i}.attend.o" = "eye.{i}.self_attn.out_proj"
"vision.{i}.n2"      = "eye.{i}.layer_norm2"
"vision.{i}.think.up" = "eye.{i}.mlp.fc1"
"vision.{i}.think.down" = "eye.{i}.mlp.fc2"
"vision.end"         = "eye.end"
"vision.say"         = "mouth"
'''
RENAMED = {
    "model.vision_model.encoder.layers.": "eye.",
    "model.vision_model.embeddings.patch_embedding.": "eye.patches.",
    "model.vision_model.embeddings.position_embedding.": "eye.places.",
    "model.vision_model.post_layernorm.": "eye.end.",
    "model.connector.modality_projection.proj.": "mouth.",
}


def test_an_encoder_that_a_specification_alone_describes(tmp_path: Path) -> None:
    held = load_file(golden("smolvlm") / "model.safetensors")
    for before, after in RENAMED.items():
        held = {
            after + n.removeprefix(before) if n.startswith(before) else n: values
            for n, values in held.items()
        }
    (tmp_path / "weights").mkdir()
    save_file(held, tmp_path / "weights" / "model.safetensors")
    config = {"rms_norm_eps": 1e-6, "tie_word_embeddings": True}
    (tmp_path / "weights" / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.toml").write_text(MADE_UP)
    model, encoder = opened(tmp_path / "model.toml")
    assert model.spec.image is not None
    rows, _ = features("smolvlm", "a", encoder)
    assert_allclose(rows, expected("smolvlm")["features_a"], rtol=0, atol=1e-4)
