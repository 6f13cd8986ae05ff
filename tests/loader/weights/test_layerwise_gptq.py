"""Weights quantized layer by layer, on the inputs that the layers before give."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jinfer import LLM
from jinfer.loader.open_model import Opened, open_model
from jinfer.loader.weights.layer_forward import LayerwiseForward
from jinfer.loader.weights.layerwise_gptq import LayerwiseGPTQ
from jinfer.loader.weights.plan_weights import WeightPlan, with_gptq
from jinfer.loader.weights.read_weights import read as read_all
from jinfer.loader.weights.storage_plan import Storage, choose_storages
from jinfer.nn.abstract_model import AbstractModel, build_abstract_model
from jinfer.quant import QuantizedTensor
from jinfer.quant.calibration_stats import record_inputs

from .loading import plan

GOLDENS = Path(__file__).parents[2] / "goldens"


class Model(NamedTuple):
    """A golden model, opened."""

    opened: Opened
    model: AbstractModel
    plan: WeightPlan
    leaves: dict[str, Any]

    @property
    def stack(self) -> str:
        return self.opened.spec.stacks[0].name

    def quantized(self, storages: dict[str, Storage]) -> WeightPlan:
        return replace(self.plan, storages=storages)

    def storages(self, weights: str) -> dict[str, Storage]:
        spec = open_model(self.opened.checkpoint.path, _keys(weights)).spec
        origins: dict[str, Any] = dict(self.plan.origins)
        chosen = choose_storages(self.model, spec.quantization, origins, "float", "spec")
        return with_gptq(self.model, spec, origins, chosen)


def _keys(weights: str) -> dict[str, Any]:
    quantization = {"weights": weights, "threshold": 0, "method": "gptq"}
    return {"dtype": "float32", "quantization": quantization}


def opened(name: str) -> Model:
    found = open_model(GOLDENS / name, {"dtype": "float32"})
    model = build_abstract_model(found.spec, "float32")
    own = plan(model, found.checkpoint, found.spec.tensors)
    return Model(found, model, own, dict(zip(model.names, read_all(own), strict=True)))


def texts(of: Model, count: int = 4, seed: int = 0) -> list[np.ndarray]:
    vocab = of.opened.spec.dims["vocab"]
    return list(np.random.default_rng(seed).integers(0, vocab, (count, 4, 24), np.int32))


@pytest.mark.parametrize(
    "name",
    [
        *("llama2", "bert", "deepseek_v2"),
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("mixtral", "gemma2")),
    ],
)
def test_the_walk_is_the_forward_pass(name: str) -> None:
    of = opened(name)
    walk, (ids, *_) = LayerwiseForward(of.model, of.stack), texts(of)
    own = [{n: of.leaves[n] for n in names} for names in walk.layers]
    others = {n: of.leaves[n] for n in walk.others}
    assert sorted([*walk.others, *(n for names in own for n in names)]) == sorted(of.model.names)
    x = walk.embed(others, ids)
    for number, leaves in enumerate(own):
        x = walk.layer(number, leaves | others, x, ids)
    hidden = np.asarray(walk.finish(others, x, ids)).reshape(*ids.shape, -1)
    llm = LLM(GOLDENS / name, dtype="float32", quantization={"weights": "plain"})
    np.testing.assert_allclose(hidden, np.stack(llm.hidden(ids.tolist())), rtol=1e-5, atol=1e-5)


def test_layers_are_quantized_for_outputs_of_quantized_layers() -> None:
    """Every matrix is what feedback makes of the products that a plain walk finds for it."""
    of = opened("llama2")
    storages, read = of.storages("q3"), texts(of)
    found = dict(LayerwiseGPTQ(of.quantized(storages), read))
    assert found.keys() == of.leaves.keys()
    walk = LayerwiseForward(of.model, of.stack)
    ours = {n: t.dequantize() if isinstance(t, QuantizedTensor) else t for n, t in found.items()}
    others = {n: ours[n] for n in walk.others}
    vectors = [walk.embed(others, ids) for ids in read]
    for number, names in enumerate(walk.layers):
        plain = {n: of.leaves[n] for n in names}
        plain |= {n: record_inputs(plain[n], "products") for n in names if n in storages}
        for x, ids in zip(vectors, read, strict=True):
            walk.layer(number, plain | others, x, ids)
        for name in names:
            if name in storages:
                expected = storages[name].quantize(
                    np.asarray(of.leaves[name]), plain[name].inputs()
                )
                assert isinstance(expected, QuantizedTensor)
                np.testing.assert_array_equal(found[name].words, expected.words)
        after = {n: ours[n] for n in names} | others
        vectors = [walk.layer(number, after, x, ids) for x, ids in zip(vectors, read, strict=True)]


@pytest.mark.parametrize(
    "name", ["llama2", *(pytest.param(n, marks=pytest.mark.soak) for n in ("bert", "mixtral"))]
)
def test_results_are_nearer_than_with_a_search(name: str) -> None:
    """On texts that were not read."""
    of = opened(name)
    storages, read = of.storages("q3"), texts(of, 8)
    fed = dict(LayerwiseGPTQ(of.quantized(storages), read))
    llm = LLM(GOLDENS / name, dtype="float32", quantization={"weights": "plain"})
    (ids,) = texts(of, 1, seed=1)
    expected = np.stack(llm.hidden(ids.tolist()))

    def error(found: dict[str, Any]) -> float:
        each = (found[name] for name in of.model.names)
        plain = [t.dequantize() if isinstance(t, QuantizedTensor) else t for t in each]
        llm._engine.runner.parameters = tuple(jax.device_put(plain))
        return float(np.square(np.stack(llm.hidden(ids.tolist())) - expected).mean())

    searched = {n: replace(s, method="mse") for n, s in storages.items()}
    loaded = dict(zip(of.model.names, read_all(of.quantized(searched)), strict=True))
    assert error(fed) < 0.95 * error(loaded)


def test_experts_that_no_token_chose() -> None:
    of = opened("mixtral")
    (ids, *_) = texts(of)
    storages = of.storages("q4")
    found = dict(LayerwiseGPTQ(of.quantized(storages), [ids[:1, :1]]))
    for name, tensor in found.items():
        if isinstance(tensor, QuantizedTensor):
            error = tensor.dequantize() - np.asarray(of.leaves[name])
            assert float(np.square(error).mean()) < 0.05 * float(np.square(of.leaves[name]).mean())
