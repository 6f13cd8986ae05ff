"""The families that come with jinfer, resolved for the checkpoints of the golden files."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jinfer.spec.blocks import Attention, Head, Rope, Scaling
from jinfer.spec.files import families, find_family, read_toml
from jinfer.spec.model import ModelSpec
from jinfer.spec.resolve import Facts

from .helpers import facts, gguf_facts, resolved_family

GOLDENS = Path(__file__).parents[1] / "goldens"
LLAMA2C = {
    "vocab_size": 320, "dim": 64, "hidden_dim": 112, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2,
    "max_seq_len": 256, "shared_classifier": True,
}  # fmt: skip


def folders(file: str) -> list[str]:
    return sorted(path.parent.name for path in GOLDENS.glob(f"*/{file}"))


def config_facts(folder: str, file: str = "config.json") -> tuple[Facts, list[str]]:
    config = json.loads((GOLDENS / folder / file).read_text())
    return facts(config), config["architectures"]


def gguf_golden(folder: str) -> tuple[Facts, list[str], dict[str, Any]]:
    meta = json.loads((GOLDENS / folder / "meta.json").read_text())
    _, rows = meta["tensors"]["token_embd.weight"][1]
    metadata = meta["kv"] | {"tokenizer.ggml.tokens": [""] * rows}  # left out of meta.json
    return gguf_facts(metadata, meta["tensors"]), [metadata["general.architecture"]], meta


def resolved_golden(folder: str, file: str = "config.json") -> ModelSpec:
    known, architectures = config_facts(folder, file)
    return resolved_family(find_family(known, architectures, Path(folder)).stem, known)


def attention(spec: ModelSpec, layer: int = 0) -> Attention:
    assert spec.decoder is not None
    block = dict(spec.decoder.layers[layer].modules)["attn"]
    assert isinstance(block, Attention)
    return block


def rope(spec: ModelSpec) -> Rope:
    position = attention(spec).position
    assert isinstance(position, Rope)
    return position


def candidates(spec: ModelSpec, present: set[str]) -> set[str]:
    """The tensors that a module of the specification is mapped to, of those present."""
    assert spec.decoder is not None
    modules = [name for name, _ in spec.shared]
    modules += [f"decoder.{name}" for name, _ in spec.decoder.modules]
    for i, layer in enumerate(spec.decoder.layers):
        for name, _ in layer.modules:
            modules += [f"decoder.{i}.{name}"]
            modules += [f"decoder.{i}.{name}.{p}" for p in ("q", "k", "v", "o", "gate", "up")]
            modules += [f"decoder.{i}.{name}.{p}" for p in ("down", "rope")]
    found = set()
    for module in modules:
        for leaf in ("weight", "bias", "factors"):
            place = spec.tensors.place(f"{module}.{leaf}")
            found |= set(place.names if place else ()) & present
    return found


def safetensors_names(folder: Path) -> set[str]:
    names = set[str]()
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            names |= set(json.loads(file.read(length))) - {"__metadata__"}
    return names


@pytest.mark.parametrize("folder", folders("config.json"))
def test_every_tensor_of_a_golden_has_a_parameter(folder: str) -> None:
    spec = resolved_golden(folder)
    names = safetensors_names(GOLDENS / folder)
    assert names
    names = {
        name.removeprefix(prefix) for prefix in spec.tensors.prefixes or ("",) for name in names
    }
    if spec_head(spec).tied:
        names -= {"lm_head.weight"}
    assert names - candidates(spec, names) == set()


def spec_head(spec: ModelSpec) -> Head:
    head = dict(spec.shared)["logits"]
    assert isinstance(head, Head)
    return head


@pytest.mark.parametrize("folder", folders("config.v5.json"))
def test_newer_config_files_say_the_same(folder: str) -> None:
    assert resolved_golden(folder) == resolved_golden(folder, "config.v5.json")


@pytest.mark.parametrize("folder", ["gguf_llama2", "gguf_llama31", "gguf_qwen15"])
def test_gguf_goldens_resolve(folder: str) -> None:
    known, architectures, meta = gguf_golden(folder)
    spec = resolved_family(find_family(known, architectures, Path(folder)).stem, known)
    architecture = architectures[0]
    assert spec.dims["hidden"] == meta["kv"][f"{architecture}.embedding_length"]
    assert spec.dims["layers"] == meta["kv"][f"{architecture}.block_count"]
    names = set(meta["tensors"])
    assert names - candidates(spec, names) == set()


@pytest.mark.parametrize(("gguf", "plain"), [("gguf_llama2", "llama2"), ("gguf_qwen15", "qwen15")])
def test_a_conversion_is_the_same_model(gguf: str, plain: str) -> None:
    known, architectures, _ = gguf_golden(gguf)
    converted = resolved_family(find_family(known, architectures, Path(gguf)).stem, known)
    original = resolved_golden(plain)
    assert converted.dims == pytest.approx(original.dims)
    assert attention(converted).bias == attention(original).bias
    assert spec_head(converted) == spec_head(original)


def gguf_like(architecture: str, **more: Any) -> Facts:
    """The least metadata of a GGUF file of any architecture."""
    own = {
        "vocab_size": 320, "embedding_length": 64, "block_count": 2, "attention.head_count": 4,
        "feed_forward_length": 128, "context_length": 256, "attention.layer_norm_epsilon": 1e-5,
    }  # fmt: skip
    own |= more
    metadata = {f"{architecture}.{key}": value for key, value in own.items()}
    return gguf_facts({"general.architecture": architecture, **metadata}, {})


def gguf_names() -> Iterator[tuple[str, str]]:
    for name, path in families().items():
        for architecture in read_toml(path)["match"].get("gguf", []):
            yield name, architecture


@pytest.mark.parametrize(("family", "architecture"), list(gguf_names()))
def test_every_family_with_a_gguf_name_resolves(family: str, architecture: str) -> None:
    known = gguf_like(architecture)
    assert find_family(known, [architecture], Path("file.gguf")).stem == family
    spec = resolved_family(family, known)
    assert spec.dims["eps"] == 1e-5
    assert spec_head(spec).tied  # there is no tensor output.weight


def test_every_family_has_a_golden() -> None:
    covered = set()
    for folder in folders("config.json"):
        covered.add(find_family(*config_facts(folder), Path(folder)).stem)
    assert covered == set(families())


def test_llama2c() -> None:
    known = facts(LLAMA2C)
    known = Facts("llama2c", known.lookup, known.has, "the header")
    assert find_family(known, [], Path("model.bin")).stem == "llama"
    spec = resolved_family("llama", known)
    assert rope(spec).pairs == "adjacent"
    assert spec_head(spec).tied
    assert spec.dims["kv_heads"] == 2
    place = spec.tensors.place("decoder.1.ffn.gate.weight")
    assert place is not None
    assert place.names == ("layers.1.feed_forward.w1.weight",)


def test_rotary_scaling_is_read_from_either_config() -> None:
    assert rope(resolved_golden("llama2")).scaling is None
    linear = rope(resolved_golden("llama_rope_linear")).scaling
    assert (linear and linear.rope_type, linear and linear.factor) == ("linear", 4.0)
    yarn = rope(resolved_golden("qwen25_yarn", "config.v5.json")).scaling
    assert yarn == Scaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)


def test_rotary_scaling_is_read_from_gguf_metadata() -> None:
    scaled = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    linear = rope(resolved_family("llama", gguf_like("llama", **scaled))).scaling
    assert linear == Scaling(rope_type="linear", factor=4.0, original_max_position_embeddings=256)
    assert rope(resolved_family("llama", gguf_like("llama"))).scaling is None


def test_qwen_windows_begin_at_a_layer() -> None:
    config = json.loads((GOLDENS / "qwen15/config.json").read_text())
    config |= {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 16}
    spec = resolved_family("qwen2", facts(config))
    assert [attention(spec, i).window for i in range(3)] == [None, 16, 16]


def test_mistral_window_may_be_null() -> None:
    assert attention(resolved_golden("mistral")).window == 16
    config = json.loads((GOLDENS / "mistral/config.json").read_text())
    spec = resolved_family("mistral", facts(config | {"sliding_window": None}))
    assert attention(spec).window is None


def test_a_spec_lies_over_its_family() -> None:
    known, _ = config_facts("llama2")
    over = {"dims": {"context": 32}, "decoder": {"modules": {"attn": {"window": 4}}}}
    spec = resolved_family("llama", known, over | {"engine": {"slots": 1}})
    assert (spec.dims["context"], attention(spec).window, spec.engine.slots) == (32, 4, 1)
