"""Language models inside of models that also see images: their keys and tensors are nested.

What they are in themselves is tested elsewhere; here the same checkpoint is served both ways.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jinfer import LLM
from jinfer.checkpoint import open_checkpoint
from jinfer.modelspec.spec_errors import SpecError
from jinfer.opening.config_json import language_model
from jinfer.weights.tensor_mapping import LoadError

from .test_gemma3 import CONFIG, EVERY, LAYERS, forward, shapes
from .tiny import TEXTS, close, random_tensors

type Arrays = dict[str, np.ndarray]

GOLDENS = Path(__file__).parents[1] / "goldens"
MISTRAL = GOLDENS / "mistral"
OTHERS = {
    "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight": np.ones((4, 4), np.float32),
    "multi_modal_projector.mm_input_projection_weight": np.ones((4, 4), np.float32),
}


def published(tensors: Arrays) -> Arrays:
    """The names of published checkpoints."""
    return {f"language_model.{name}": values for name, values in tensors.items()} | OTHERS


def current(tensors: Arrays) -> Arrays:
    """The names of the modules themselves, as Transformers has them since 4.52."""
    renamed = {
        name.replace("model.", "model.language_model.", 1): values
        for name, values in tensors.items()
    }
    return renamed | {f"model.{name}": values for name, values in OTHERS.items()}


def nested(config: dict[str, Any], architecture: str, **outside: Any) -> dict[str, Any]:
    inside = config | {"architectures": ["Inner"], "eos_token_id": None}
    return {
        "architectures": [architecture],
        "text_config": inside,
        "vision_config": {"hidden_size": 4, "num_hidden_layers": 1},
        **outside,
    }


def served(folder: Path, config: dict[str, Any], tensors: Arrays) -> LLM:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return LLM(folder, dtype="float32")


def newer(config: dict[str, Any]) -> dict[str, Any]:
    """Gemma 3's keys as Transformers 5 writes them."""
    kept = dict(config)
    for key in ("rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern"):
        del kept[key]
    every = [(i + 1) % EVERY == 0 for i in range(LAYERS)]
    return kept | {
        "layer_types": ["full_attention" if full else "sliding_attention" for full in every],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    }


@pytest.mark.parametrize("keys", [dict, newer])
@pytest.mark.parametrize("names", [published, current])
def test_gemma3(tmp_path: Path, names: Any, keys: Any) -> None:
    tensors = random_tensors(shapes())
    # Only the keys that differ from the text model's are inside, the rest is looked up outside.
    outside = {"vocab_size": CONFIG["vocab_size"], "hidden_size": 1}
    inside = keys({key: value for key, value in CONFIG.items() if key != "vocab_size"})
    config = nested(inside, "Gemma3ForConditionalGeneration", **outside)
    llm = served(tmp_path, config, names(tensors))
    doubles = {name: values.astype(np.float64) for name, values in tensors.items()}
    for text, got in zip(TEXTS, llm.logits(TEXTS), strict=True):
        close(got, forward(doubles, text))


@pytest.mark.parametrize("names", [published, current])
def test_mistral3(tmp_path: Path, names: Any) -> None:
    config = json.loads((MISTRAL / "config.json").read_text())
    tensors = open_checkpoint(MISTRAL).tensors
    file = {name: np.ascontiguousarray(tensor.read()) for name, tensor in tensors.items()}
    llm = served(tmp_path, nested(config, "Mistral3ForConditionalGeneration"), names(file))
    with np.load(MISTRAL / "expected.npz") as arrays:
        asked, wanted = arrays["long_input_ids"][0].tolist(), arrays["long_logits"][0]
    np.testing.assert_allclose(llm.logits([asked])[0][3::4], wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_newer_gemmas(tmp_path: Path, name: str) -> None:
    """Files have keys and values of the last layers, too, which take those of others."""
    config = json.loads((GOLDENS / name / "config.json").read_text())
    last = f"model.layers.{config['num_hidden_layers'] - 1}.self_attn"
    unused = {f"{last}.{part}.weight": np.ones(3, np.float32) for part in ("k_proj", "v_proj")}
    tensors = {n: t.read() for n, t in open_checkpoint(GOLDENS / name).tensors.items()}
    file = current(tensors | unused)
    del file["model.multi_modal_projector.mm_input_projection_weight"]
    llm = served(tmp_path, nested(config, f"{name.capitalize()}ForConditionalGeneration"), file)
    with np.load(GOLDENS / name / "expected.npz") as arrays:
        asked, wanted = arrays["input_ids"][0].tolist(), arrays["logits"][0]
    np.testing.assert_allclose(llm.logits([asked])[0], wanted, rtol=0, atol=2e-4)


def test_what_is_left_over_is_an_error(tmp_path: Path) -> None:
    tensors = published(random_tensors(shapes())) | {"audio_tower.weight": np.ones(3, np.float32)}
    with pytest.raises(LoadError, match=r"no place for audio_tower\.weight; map"):
        served(tmp_path, nested(CONFIG, "Gemma3ForConditionalGeneration"), tensors)


def test_a_language_model_of_another_kind(tmp_path: Path) -> None:
    config = nested(CONFIG | {"model_type": "unknown"}, "Llava9ForConditionalGeneration")
    with pytest.raises(SpecError, match="no family is known for Llava9ForConditionalGeneration"):
        served(tmp_path, config, published(random_tensors(shapes())))


def test_sizes_that_published_files_leave_out(tmp_path: Path) -> None:
    """The 4B model's config.json says no more than this of the language model."""
    inside = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 6, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }  # fmt: skip
    config = nested(inside, "Gemma3ForConditionalGeneration", eos_token_id=[1, 106])
    with pytest.raises(LoadError, match=r"no tensor model\.embed_tokens\.weight"):
        served(tmp_path, config, OTHERS)
    assert language_model(config)["hidden_size"] == 2560
    assert language_model(config)["eos_token_id"] == [1, 106]
    assert language_model(config)["architectures"] == ["Gemma3ForConditionalGeneration"]
    assert language_model({"text_config": None, "a": 1})["a"] == 1


def test_qwen3_5(tmp_path: Path) -> None:
    """Published with what sees images and with a head that drafts, as `mtp`."""
    golden = Path(__file__).parents[1] / "goldens" / "qwen3_5"
    held = open_checkpoint(golden).tensors
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor.read()
        for name, tensor in held.items()
    }
    tensors |= {"model.visual.merger.norm.weight": np.ones(4, np.float32)}
    tensors |= {"mtp.layers.0.input_layernorm.weight": np.ones(4, np.float32)}
    config = json.loads((golden / "config.json").read_text())
    llm = served(tmp_path, nested(config, "Qwen3_5ForConditionalGeneration"), tensors)
    with np.load(golden / "expected.npz") as expected:
        close(
            llm.logits([expected["long_input_ids"][0].tolist()])[0][3::4],
            expected["long_logits"][0],
        )
