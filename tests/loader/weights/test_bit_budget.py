"""Bits per matrix under a budget: what errors cost, how formats are chosen, and what comes out."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer import LLM
from jinfer.cli.quality import bits_per_weight
from jinfer.cli.quantize.quantize_checkpoint import convert
from jinfer.loader.open_model import open_model
from jinfer.loader.weights import quantized_cache
from jinfer.loader.weights.bit_budget import divergence_costs, with_budget
from jinfer.loader.weights.layer_forward import LayerwiseForward
from jinfer.loader.weights.plan_weights import with_gptq
from jinfer.loader.weights.storage_plan import choose, choose_storages
from jinfer.modelspec.spec_errors import SpecError
from jinfer.quant import QuantizedTensor
from jinfer.quant.calibration_stats import record_inputs
from jinfer.quant.gptq import DAMPING

from .test_layerwise_gptq import opened, texts

GOLDENS = Path(__file__).parents[2] / "goldens"
MODEL = GOLDENS / "llama2"


def logits(walk: LayerwiseForward, leaves: dict[str, Any], ids: np.ndarray) -> jax.Array:
    """Of a whole forward pass."""
    x = walk.embed(leaves, ids)
    for number in range(len(walk.layers)):
        x = walk.layer(number, leaves, x, ids)
    return jax.nn.log_softmax(walk.logits(leaves, x, ids))


def test_costs_are_the_divergence_of_such_errors() -> None:
    of = opened("llama2")
    ids = [row[None] for row in np.concatenate(texts(of))]
    walk, together = LayerwiseForward(of.model, of.stack), np.concatenate(ids)
    fed = ("decoder.0.attn.v.weight", "decoder.1.ffn.down.weight", "logits.weight")
    kinds = {**dict.fromkeys(fed, True), "embed.weight": False}
    costs = divergence_costs(
        LayerwiseForward(of.model, of.stack), of.leaves.__getitem__, ids, kinds
    )
    taps = {name: record_inputs(of.leaves[name], "products") for name in fed}
    expected, size, rng = logits(walk, of.leaves | taps, together), 3e-3, np.random.default_rng(0)
    for name, is_fed in kinds.items():
        found = []
        for _ in range(4):
            error = rng.normal(size=of.leaves[name].shape)
            if is_fed:
                error = fed_back(error, np.asarray(taps[name].inputs().mean, np.float64))
            other = of.leaves[name] + size * jnp.asarray(error, jnp.float32)
            given = logits(walk, of.leaves | {name: other}, together)
            found.append(jnp.sum(jnp.exp(expected) * (expected - given), axis=-1).mean() / size**2)
        assert costs[name] == pytest.approx(float(np.mean(found)), rel=0.25), name


def fed_back(rounding: np.ndarray, H: np.ndarray) -> np.ndarray:
    """The error of a matrix with GPTQ, of errors of rounding."""
    H += DAMPING * np.diag(H).mean() * np.eye(len(H))
    order = np.argsort(-np.diag(H))
    R = np.linalg.cholesky(H[np.ix_(order, order)][::-1, ::-1])[::-1, ::-1]
    whole = np.empty_like(rounding)
    whole[:, order] = rounding * np.diag(R) @ np.linalg.inv(R)
    return whole


def test_the_choice_is_nearly_the_best_there_is() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        counts, costs = rng.integers(1, 9, 5), np.exp(2 * rng.normal(size=5))
        widths = np.array([2, 3, 4, 6])
        sizes, losses = np.outer(counts, widths), np.outer(costs, 4.0**-widths)
        room = int(rng.uniform(2, 6) * counts.sum())
        chosen = choose(sizes, losses, room)
        rows = range(5)
        assert sizes[rows, chosen].sum() <= room
        best = min(
            losses[rows, each].sum()
            for each in map(list, product(range(4), repeat=5))
            if sizes[rows, each].sum() <= room
        )
        assert losses[rows, chosen].sum() < 1.6 * best
    assert choose(sizes, losses, float(6 * counts.sum())) == [3] * 5


def keys(weights: str, **more: Any) -> dict[str, Any]:
    return {"quantization": {"weights": weights, "threshold": 0, "method": "gptq", **more}}


def test_the_plan_stays_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    formats = ("q3_b64_nl", "q4_b64_nl", "q8_b64")
    monkeypatch.setattr("jinfer.loader.weights.storage_plan._FORMATS", formats)
    of = opened("llama2")
    rule = {"match": "decoder.0.attn.v", "weights": "q8"}
    spec = open_model(MODEL, keys("5 bits", rules=[rule])).spec
    origins: dict[str, Any] = dict(of.plan.origins)
    storages = choose_storages(of.model, spec.quantization, origins, "float", "spec")
    storages = with_gptq(of.model, spec, origins, storages)
    plan = replace(of.plan, spec=spec, storages=storages)
    one = {each.format.name for each in storages.values()}
    assert one == {"q4_b64_nl", "q8"}
    found = with_budget(plan, texts(of)).storages
    shapes = {n: of.leaves[n].shape for n in found}
    size = sum(8 * each.abstract(shapes[name]).nbytes for name, each in found.items())
    assert 4.8 < size / sum(map(np.prod, shapes.values())) <= 5
    assert found["decoder.0.attn.v.weight"].format.name == "q8"
    assert len({each.format.name for each in found.values()} & {*formats}) >= 2
    assert [each.method for each in found.values()] == [each.method for each in storages.values()]


@pytest.mark.soak
def test_models_with_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of the cache are for one number of bits."""
    convert(str(MODEL), tmp_path / "out", keys("5 bits"), tokens=512)
    assert 4.7 < bits_per_weight(LLM(tmp_path / "out")) <= 5
    monkeypatch.setattr(quantized_cache, "cache_folder", lambda name: tmp_path / "kept")
    monkeypatch.setattr("jinfer.loader.weights.plan_weights.TOKENS", 256)
    for bits in (6, 4.5, 4.5):
        assert bits - 0.3 < bits_per_weight(LLM(MODEL, **keys(f"{bits} bits"))) <= bits
    assert len([each for each in (tmp_path / "kept").iterdir() if each.is_dir()]) == 2


def test_without_costs_all_have_one_format() -> None:
    llm = LLM(MODEL, **keys("4.5 bits", method="mse"))
    leaves = [each for each in llm._engine.runner.parameters if isinstance(each, QuantizedTensor)]
    assert len({each.format for each in leaves}) == 1
    assert bits_per_weight(llm) <= 4.5


def test_refused() -> None:
    with pytest.raises(SpecError, match=r"weights: '1 bits': the fewest bits are [\d.]+, with"):
        LLM(MODEL, **keys("1 bits", method="mse"))
    with pytest.raises(SpecError, match=r'or a number of bits, such as "4.25 bits"$'):
        open_model(MODEL, {"quantization": {"weights": "4.25"}})
    with pytest.raises(SpecError, match="no quantization format '4 bits'"):
        open_model(MODEL, {"quantization": {"embedding": "4 bits"}})
