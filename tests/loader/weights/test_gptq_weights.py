"""Loading with GPTQ: once, then from what was kept; or a search, and why in one line."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jinfer import LLM
from jinfer.disk_cache import CacheOffError
from jinfer.engine.scheduling.cache_size import free_memory
from jinfer.loader.open_model import open_model
from jinfer.loader.weights import (
    layer_forward,
    layerwise_gptq,
    quantized_cache,
    storage_plan,
)
from jinfer.loader.weights.plan_weights import WeightPlan, plan_weights
from jinfer.modelspec.spec_errors import SpecError
from jinfer.nn.abstract_model import build_abstract_model
from jinfer.ops.matmul.dense import reads_16_bit_weights
from tests.loader.checkpoint.converting import check_equal, leaves

from .loading import plan

GOLDENS = Path(__file__).parents[2] / "goldens"
MODEL = GOLDENS / "llama2"
Q3 = {"weights": "q3", "threshold": 0}
FED = {**Q3, "method": "gptq"}
ONCE = "jinfer: weights are quantized with GPTQ, once; they are kept in "


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's, and few tokens to read."""
    monkeypatch.setattr(quantized_cache, "cache_folder", lambda name: tmp_path / "weights")
    monkeypatch.setattr(
        layer_forward.generated_texts, "__kwdefaults__", {"tokens": 512, "progress": False}
    )
    return tmp_path / "weights"


def stop(*_: Any, **__: Any) -> None:
    raise AssertionError("this is not to be done again")


def test_second_start_maps_the_cache_entry(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = leaves(MODEL, **FED)
    assert capsys.readouterr().err == f"{ONCE}{cache}\n"
    (entry,) = cache.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(layerwise_gptq, "LayerwiseGPTQ", stop)
        check_equal(leaves(MODEL, **FED), first)
        assert capsys.readouterr().err == ""
        with pytest.raises(AssertionError, match="not to be done again"):
            leaves(MODEL, **{**FED, "weights": "q2"})
    (entry / "model.safetensors").unlink()  # what is mapped stays as long as somebody knows it
    (entry / "model.safetensors").write_bytes(b"")
    check_equal(leaves(MODEL, **FED), first)
    assert capsys.readouterr().err.count(ONCE) == 2  # of q2, which failed, and this one


def test_fallback_to_scale_search_is_reported(cache: Path) -> None:
    searched = leaves(MODEL, **Q3)
    check_equal(leaves(MODEL, **Q3, method="mse"), searched)
    nearest = leaves(MODEL, **Q3, method="rtn")
    assert not cache.exists()
    fed_back = leaves(MODEL, **FED)
    for name in ("decoder.0.attn.q.weight", "decoder.1.ffn.down.weight"):
        three = [np.asarray(each[name].words) for each in (searched, nearest, fed_back)]
        assert not np.array_equal(three[0], three[1])
        assert not np.array_equal(three[0], three[2])
    check_equal({"": searched["embed.weight"]}, {"": fed_back["embed.weight"]})
    with pytest.raises(SpecError, match=r"quantization\.method.*'guess'"):
        leaves(MODEL, **Q3, method="guess")


@pytest.mark.parametrize(
    ("source", "name", "value", "words"),
    [
        (MODEL, "_memory", lambda *_: 1 << 70, "needs .* GiB of memory, .* are free"),
        (GOLDENS / "t5", "_memory", lambda *_: 0, "an encoder-decoder reads two texts at a time"),
    ],
)
def test_obstacle_to_gptq_is_one_line(
    source: Path,
    name: str,
    value: Any,
    words: str,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(f"jinfer.loader.weights.plan_weights.{name}", value)
    found = LLM(source, quantization=FED)
    output = capsys.readouterr().err
    assert re.search(rf"^jinfer: .*{words}.*; weights are quantized without GPTQ$", output)
    assert output.count("\n") == 1
    searched = LLM(source, quantization=Q3)
    ours, expected = (jax.tree.leaves(each._engine.runner.parameters) for each in (found, searched))
    assert all(np.array_equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert list(cache.iterdir()) == []


def test_auto_chooses_gptq_for_large_generators(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What writes text in fewer than 8 bits, is not tiny, and is one process's."""
    small = leaves(MODEL, **Q3)
    assert not cache.exists()
    monkeypatch.setattr("jinfer.loader.weights.plan_weights._FEWEST", 0)
    fed_back = leaves(MODEL, **FED)
    check_equal(leaves(MODEL, **Q3), fed_back)
    assert len(list(cache.iterdir())) == 1
    wide = {**Q3, "weights": "q8"}
    check_equal(leaves(MODEL, **wide), leaves(MODEL, **wide, method="mse"))
    for other in ("bert", "t5"):
        LLM(GOLDENS / other, quantization=Q3)
    monkeypatch.setattr("jax.process_count", lambda: 2)
    check_equal(leaves(MODEL, **Q3), small)
    assert len(list(cache.iterdir())) == 1


def test_automatic_gptq_has_a_time_limit(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jinfer.loader.weights.plan_weights._FEWEST", 0)
    monkeypatch.setitem(storage_plan.PER_WEIGHT, "gptq", 1.0)
    check_equal(leaves(MODEL, **Q3), leaves(MODEL, **Q3, method="mse"))
    output = capsys.readouterr().err
    assert re.fullmatch(
        r"jinfer: GPTQ would take some \d+ minutes, once \(quantization\.method = "
        r'"gptq" requests it, "mse" avoids it\); weights are quantized without '
        r"GPTQ\n",
        output,
    )
    assert list(cache.iterdir()) == []
    leaves(MODEL, **FED)
    assert len(list(cache.iterdir())) == 1


def test_no_folder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(name: str) -> Path:
        raise CacheOffError("JINFER_CACHE=off")

    monkeypatch.setattr(quantized_cache, "cache_folder", refuse)
    check_equal(leaves(MODEL, **FED), leaves(MODEL, **Q3))
    assert capsys.readouterr().err == (
        "jinfer: JINFER_CACHE=off; weights are quantized without GPTQ\n"
    )


def test_the_session_knows_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = list[Any]()

    def refuse(*given: Any) -> str:
        requested.append(given[-1])
        return "no"

    monkeypatch.setattr(quantized_cache, "obstacle", refuse)
    LLM(MODEL, quantization=FED)
    (free,) = requested
    assert 0 < free <= free_memory() * 4


def test_texts_that_a_model_writes() -> None:
    """Two tokens by chance, then by its own probabilities; the same ones every time."""
    opened = open_model(MODEL, {"dtype": "float32", "quantization.weights": "q3"})
    model = build_abstract_model(opened.spec, "float32")
    of = plan(model, opened.checkpoint, opened.spec.tensors)
    batches = [layer_forward.generated_texts(of, 32, tokens=2048) for _ in range(2)]
    ids, again = (np.concatenate(each) for each in batches)
    assert ids.shape == (64, 32)
    np.testing.assert_array_equal(ids, again)
    vocab = opened.spec.dims["vocab"]
    assert ids.min() >= 0
    assert ids.max() < vocab
    llm = LLM(MODEL, dtype="float32")
    own = np.mean([each[1:].mean() for each in llm.score(ids.tolist())])
    chance = np.random.default_rng(1).integers(0, vocab, ids.shape)
    long = layer_forward.generated_texts(of, 128, tokens=1024)
    assert [batch.shape for batch in long] == [(8, 128), (16, 1)]
    np.testing.assert_array_equal(long[1][:, 0], long[0].reshape(-1)[::64])
    assert own > 0.3 + np.mean([each[1:].mean() for each in llm.score(chance.tolist())])


def test_who_writes_and_who_reads_tokens_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_forward, "generated_texts", lambda *_, **__: "own")
    for name, writes in (("llama2", True), ("bert", False)):
        opened = open_model(GOLDENS / name, {"dtype": "float32"})
        model, spec = build_abstract_model(opened.spec, "float32"), opened.spec
        own = WeightPlan(model, spec, opened.checkpoint, {})
        found: Any = layer_forward.default_texts(own, tokens=2048)
        if writes:
            assert found == "own"
            headless = dataclasses.replace(spec, shared=spec.shared[:1])
            own = dataclasses.replace(own, spec=headless)
            found = layer_forward.default_texts(own, tokens=2048)
        assert [len(batch) for batch in found] == [16, 16]
        assert max(batch.max() for batch in found) < spec.dims["vocab"]


@pytest.mark.skipif(not reads_16_bit_weights(), reason="no custom calls")
def test_processors_that_round_to_bfloat16_find_the_same() -> None:
    keys = {"weights": "q4", "method": "gptq", "threshold": 0}
    opened = open_model(GOLDENS / "smollm2", {f"quantization.{k}": v for k, v in keys.items()})
    model = build_abstract_model(opened.spec, "float32")
    found = plan_weights(model, opened.spec, opened.checkpoint, opened.activations)
    assert found.model.rounded
    assert not layerwise_gptq.LayerwiseGPTQ(found, [])._forward._model.rounded
