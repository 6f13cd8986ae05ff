"""Language models inside of models that also see images: their keys and tensors are nested.

Some checkpoints are the same model served both ways. `multimodal_logits.npz` has, for each class of
transformers 5.24, its config.json, the shapes of its tensors, of each module that is left out only
one, and logits that the class gave for text alone, for weights drawn by name; of some, greedy
tokens, keys of `text_config` whose values are those that its class gives them (`default_keys`), or
all that the class gives (`usual`).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jinfer import LLM
from jinfer.loader.checkpoint import open_checkpoint
from jinfer.loader.config.config_json import language_model
from jinfer.loader.open_model import open_files
from jinfer.loader.resolve_model import family_of
from jinfer.loader.weights.tensor_mapping import LoadError
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.spec_files import families, format_table, read_toml
from tests.families.drawn_weights import drawn
from tests.families.test_transformers_logits import TEXT, greedy_tokens
from tests.loader.resolving import resolved

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


LOGITS = Path(__file__).with_name("multimodal_logits.npz")
ENCODER_DECODERS = {"florence2", "blip2_t5"}
WITHOUT_SCALE = {"aya_vision", "cohere2_vision"}  # transformers leaves `logit_scale` out there


def stored(kind: str, folder: Path) -> np.ndarray:
    """Writes a checkpoint, and gives the logits of every fourth token, or every second."""
    with np.load(LOGITS) as arrays:
        made, logits = json.loads(str(arrays[f"{kind}.made"])), arrays[f"{kind}.logits"]
    (folder / "config.json").write_text(json.dumps(made["config"]))
    shapes = made["shapes"].items()
    tensors = {name: np.asarray(drawn(name, tuple(shape))) for name, shape in shapes}
    save_file(tensors, folder / "model.safetensors")
    scale = made["config"]["text_config"]["logit_scale"] if kind in WITHOUT_SCALE else 1
    return logits * scale


def of_kind(kind: str, name: str) -> np.ndarray | None:
    with np.load(LOGITS) as arrays:
        return arrays.get(f"{kind}.{name}")


def kinds_with(name: str) -> list[str]:
    """The classes of which there is such an array."""
    return sorted(one.removesuffix(name) for one in np.load(LOGITS) if one.endswith(name))


@pytest.mark.parametrize("kind", kinds_with(".made"))
def test_logits_are_those_of_transformers(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = stored(kind, tmp_path)
    llm = LLM(tmp_path, dtype="float32")
    if kind in ENCODER_DECODERS:
        got = llm.logits([[2, 7, 11, 20]], encoder_ids=[TEXT])[0][::2]
    else:
        got = llm.logits([TEXT])[0][1::4]
    drawable = wanted > np.finfo(np.float32).min  # not the tokens that are images, of Chameleon
    np.testing.assert_allclose(got[drawable], wanted[drawable], rtol=0, atol=1e-4)
    if (greedy := of_kind(kind, "greedy")) is not None:
        assert greedy_tokens(llm, len(greedy)) == greedy.tolist()
    said = [record.getMessage() for record in caplog.records]
    left_out = [f"{tmp_path}: reads text alone: images and sounds are left out"]
    assert said == ([] if kind.endswith("_text") else left_out)


def test_classes_with_a_family_of_their_own_have_greedy_tokens() -> None:
    own = (
        *("apertus1p5", "cohere_compass", "cosmos3_edge", "ernie4_5_vl_moe", "molmo2"),
        *("muse_glimmer", "step3p7"),
    )
    assert set(own) <= set(kinds_with(".greedy"))


@pytest.mark.parametrize("kind", kinds_with(".default_keys"))
def test_defaults_are_those_of_the_configuration_class(tmp_path: Path, kind: str) -> None:
    stored(kind, tmp_path)
    whole = resolved(tmp_path, {}).spec
    config = json.loads((tmp_path / "config.json").read_text())
    for key in json.loads(str(of_kind(kind, "default_keys"))):
        del config["text_config"][key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    less = resolved(tmp_path, {}).spec
    assert (less.stacks, less.shared) == (whole.stacks, whole.shared)


# Kinds -> the family of their language model, where config.json may leave out everything.
WITH_DEFAULTS = {
    "aria": "aria",
    "chameleon": "chameleon",
    "fuyu": "persimmon",
    "hy_v4_vl": "hy_v4_vl",
    "kosmos2": "kosmos",
    "kosmos2_5": "kosmos",
    "mistral3_mistral4": "mistral4",
    "mllama": "mllama",
}


@pytest.mark.parametrize(("kind", "family"), WITH_DEFAULTS.items())
def test_keys_left_out_are_the_defaults_of_the_class(
    tmp_path: Path, kind: str, family: str
) -> None:
    stored(kind, tmp_path)
    held = {n: t.read() for n, t in open_checkpoint(tmp_path).tensors.items()}
    more = {f"vit.{n}": np.ones(1, np.float32) for n in range(80)}  # no fewer tensors than layers
    save_file(held | more, tmp_path / "model.safetensors")
    usual = json.loads(str(of_kind(kind, "usual")))
    config = json.loads((tmp_path / "config.json").read_text())
    specs = []
    for text in (usual, {"model_type": usual["model_type"]}):
        inside = {"text_config": text} if "text_config" in config else text
        whole = {"architectures": config["architectures"]} | inside
        (tmp_path / "config.json").write_text(json.dumps(whole))
        assert Path(family_of(open_files(tmp_path, {}))).stem == family
        specs.append(resolved(tmp_path, {}).spec)
    assert specs[0] == specs[1]


def test_every_row_leads_to_a_family() -> None:
    table = format_table("multimodal")
    known = {each["match"]["architectures"][0] for each in map(read_toml, families().values())
             if "architectures" in each.get("match", {})}  # fmt: skip
    assert set(table["text"].values()) <= known
    for name, row in table["architectures"].items():
        assert row["without"]
        assert row.keys() <= {"text", "config", "keys", "without"}
        by_version = row.get("text")
        for version in by_version if isinstance(by_version, dict) else [None] * ("text" in row):
            config: dict[str, Any] = {"architectures": [name], "text_config": {}}
            assert language_model(config | {"version": version})["architectures"][0] in known


@pytest.mark.parametrize(("outside", "inside"), [(True, False), (None, True), (True, None)])
def test_embeddings_are_tied_if_either_table_says_so(
    tmp_path: Path, outside: bool | None, inside: bool | None
) -> None:
    """Transformers 5 writes true outside and false inside for a tied Mistral 3, and ties."""
    wanted = stored("mistral3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for table, value in ((config, outside), (config["text_config"], inside)):
        table.pop("tie_word_embeddings", None)
        table |= {} if value is None else {"tie_word_embeddings": value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    got = LLM(tmp_path, dtype="float32").logits([TEXT])[0][1::4]
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("scaling", [{"type": "mrope"}, {"type": "default"}, {}])
def test_a_qwen2_vl_of_transformers_4(tmp_path: Path, scaling: dict[str, Any]) -> None:
    """Its keys stand at the top, and its tensors are those of the text model."""
    wanted = stored("qwen2_vl", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    flat = config | config.pop("text_config") | {"model_type": "qwen2_vl", "rope_theta": 10000.0}
    del flat["rope_parameters"]
    flat["rope_scaling"] = scaling and scaling | {"mrope_section": [2, 1, 1]}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    got = LLM(tmp_path, dtype="float32").logits([TEXT])[0][1::4]
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4)


def test_an_internvl_with_code_of_its_own(tmp_path: Path) -> None:
    wanted = stored("internvl", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["llm_config"] = config.pop("text_config")
    config |= {"architectures": ["InternVLChatModel"], "auto_map": {"AutoModel": "m.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    held = {n: t.read() for n, t in open_checkpoint(tmp_path).tensors.items()}
    others = {"vision_model.embeddings.class_embedding": np.ones(2), "mlp1.0.weight": np.ones(2)}
    text = {n: values for n, values in held.items() if n.startswith("language_model.")}
    save_file(text | others, tmp_path / "model.safetensors")
    got = LLM(tmp_path, dtype="float32").logits([TEXT])[0][1::4]
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": [{"a": 1}, ["b"]]},
        {"architectures": ["LlavaForConditionalGeneration"], "text_config": [1]},
        {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": [1]}},
        {"architectures": ["Qwen2_5OmniForConditionalGeneration"], "thinker_config": "x"},
        {"model_type": ["llava"], "text_config": {"tie_word_embeddings": "x"}},
    ],
)
def test_values_of_other_types(config: dict[str, Any]) -> None:
    assert isinstance(language_model(config), dict)


def test_sizes_that_llava_leaves_out() -> None:
    """The published LLaVA 1.5 says no more of its Vicuna than this."""
    inside = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064}
    config: dict[str, Any] = {"architectures": ["LlavaForConditionalGeneration"]}
    config |= {"text_config": inside, "vision_config": {"hidden_size": 1024}}
    found = language_model(config)
    assert found["architectures"] == ["LlamaForCausalLM"]
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    assert [found[name] for name in sizes] == [4096, 11008, 32, 32]
    assert (found["max_position_embeddings"], found["vocab_size"]) == (4096, 32064)
    mistral = {"model_type": "mistral", "sliding_window": None}
    config = {"architectures": ["LlavaNextForConditionalGeneration"], "text_config": mistral}
    assert language_model(config).get("sliding_window") is None, "null is no key left out"


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


def test_rows_that_the_model_does_not_use_are_as_many_as_its_own(tmp_path: Path) -> None:
    stored("ernie4_5_vl_moe", tmp_path)
    held = {n: t.read() for n, t in open_checkpoint(tmp_path).tensors.items()}
    name = "model.layers.1.mlp.moe_statics.e_score_correction_bias"
    save_file(held | {name: np.ones((3, 4), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=rf"{name} is \[3, 4\], which does not split into 4 \+ 4"):
        LLM(tmp_path)


def test_a_version_that_is_not_known(tmp_path: Path) -> None:
    stored("minicpmv2_6", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"version": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecError, match="no family is known for the language model of MiniCPMV"):
        LLM(tmp_path)


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
    assert language_model(config)["architectures"] == ["Gemma3ForCausalLM"]
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
