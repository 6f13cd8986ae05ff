"""`[quantization]`: which weights are quantized, and that the model then computes with them."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jinfer import LLM
from jinfer.loader.open_model import open_model
from jinfer.loader.weights.read_weights import read
from jinfer.loader.weights.storage_plan import choose_storages
from jinfer.loader.weights.tensor_mapping import find_origins
from jinfer.modelspec.spec_errors import SpecError
from jinfer.nn.abstract_model import build_abstract_model
from jinfer.quant import QuantizedTensor

from .loading import plan

GOLDENS = Path(__file__).parents[2] / "goldens"
MODEL = GOLDENS / "llama2"
MIXTURE = GOLDENS / "mixtral"
IDS = [1, 5, 9, 2, 40, 7, 3]


def storages(source: Path, **quantization: Any) -> dict[str, str]:
    """Name of each quantized parameter -> the name of its format."""
    keys = {f"quantization.{key}": value for key, value in {"threshold": 0, **quantization}.items()}
    opened = open_model(source, keys)
    model = build_abstract_model(opened.spec, "float32")
    origins = find_origins(model, opened.checkpoint, opened.spec.tensors)
    chosen = choose_storages(
        model, opened.spec.quantization, origins, opened.activations, opened.spec.path
    )
    return {name: storage.format.name for name, storage in chosen.items()}


def test_weights_is_for_matrices_and_tables_keep_six_bits() -> None:
    chosen = storages(MODEL, weights="q3.5")
    assert chosen["decoder.0.attn.q.weight"] == chosen["decoder.1.ffn.down.weight"] == "q3.5"
    assert chosen["embed.weight"] == chosen["logits.weight"] == "q6"
    assert not any("norm" in name for name in chosen)


def test_embedding_and_head_have_their_own_keys() -> None:
    chosen = storages(MODEL, weights="q4", embedding="q8", head="plain")
    assert chosen["embed.weight"] == "q8"
    assert "logits.weight" not in chosen


def test_nothing_is_quantized_by_default() -> None:
    assert storages(MODEL) == {}
    assert storages(MODEL, weights="plain") == {}


def test_the_first_rule_that_matches_counts() -> None:
    rules = [
        {"match": "decoder.0.attn.v", "weights": "q8"},
        {"match": "decoder.*.attn.*", "weights": "plain"},
    ]
    chosen = storages(MODEL, weights="q4", rules=rules)
    assert chosen["decoder.0.attn.v.weight"] == "q8"
    assert "decoder.1.attn.v.weight" not in chosen
    assert chosen["decoder.0.ffn.up.weight"] == "q4"


@pytest.mark.parametrize("match", ["decoder.*.attn.w", "decoder.*.attn_norm", "decoder.0.attn.v"])
def test_a_rule_that_matches_nothing_is_an_error(match: str) -> None:
    rules = [{"match": "decoder.0.*", "weights": "q8"}, {"match": match, "weights": "q4"}]
    with pytest.raises(SpecError, match=r"quantization\.rules\[1\]\.match: .* matches no weight"):
        storages(MODEL, rules=rules)


def test_small_matrices_stay() -> None:
    sizes = storages(MODEL, weights="q4", threshold=10**6)
    assert sizes == {}


# Of a mixture only the exact products: rounded activations may choose other experts.
@pytest.mark.parametrize(
    ("source", "activations"),
    [(MODEL, "float"), (MODEL, "int8"), (MIXTURE, "float")],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.parametrize("weights", ["q3.5", "q4_b64", "q8"])
def test_a_quantized_model_computes_with_its_quantized_weights(
    source: Path, weights: str, activations: str
) -> None:
    keys: dict[str, Any] = {
        "quantization.weights": weights,
        "quantization.threshold": 0,
        "quantization.activations": activations,
        "quantization.kv_cache": "f32",
    }
    quantized = LLM(source, **keys)
    whole: dict[str, Any] = {"dtype": "float32", "quantization.weights": "plain"}
    plain = LLM(source, **whole)
    engine = quantized._engine
    # The same model, in full, with the weights that the codes stand for.
    leaves = jax.device_get(engine.runner.parameters)
    full = [leaf.dequantize() if isinstance(leaf, QuantizedTensor) else leaf for leaf in leaves]
    plain._engine.runner.parameters = tuple(jax.device_put(full))
    ours, expected = quantized.logits([IDS])[0], plain.logits([IDS])[0]
    bound = 2e-4 if activations == "float" else 0.05 * np.abs(expected).max()
    assert np.abs(ours - expected).max() < bound
    assert any(isinstance(leaf, QuantizedTensor) for leaf in engine.runner.parameters)


def test_memory_of_quantized_parameters() -> None:
    opened = open_model(MODEL, {"quantization.weights": "q4", "quantization.threshold": 0})
    model = build_abstract_model(opened.spec, "float32")
    origins = find_origins(model, opened.checkpoint, opened.spec.tensors)
    chosen = choose_storages(model, opened.spec.quantization, origins, "int8", "spec")
    own = plan(model, opened.checkpoint, opened.spec.tensors, chosen)
    leaves = dict(zip(model.names, read(own), strict=True))
    leaf = leaves["decoder.0.ffn.up.weight"]
    bits = 8 * leaf.nbytes / np.prod(leaf.shape)
    assert bits == leaf.format.bits_per_weight == 5
    assert all(isinstance(part, jax.Array) for part in jax.tree.leaves(leaf))
