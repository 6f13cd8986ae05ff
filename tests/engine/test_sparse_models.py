"""Models with sparse attention in the engine: in company, in pieces, with drafts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer import LLM, SamplingParams
from jinfer.modelspec.spec_errors import SpecError

from .test_schedules import ALL, schedules

GOLDEN = Path(__file__).parents[1] / "goldens" / "deepseek_v32"  # 12 keys for each query
# The second layer uses the keys that the first has chosen (GLM-5.2).
SHARED: dict[str, Any] = {
    "decoder.modules.attn.indexer.shared": "i > 0",
    "tensors.ignore": ["model.layers.1.self_attn.indexer.*", "model.layers.2.self_attn.indexer.*"],
}
IDS = np.random.default_rng(7).integers(3, 250, 200).tolist()


def open_model(**overrides: Any) -> LLM:
    keys = {name.replace("__", "."): value for name, value in overrides.items()}
    return LLM(GOLDEN, **{"dtype": "float32", **keys})


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["f32", "q8", "q3"])
def test_many_random_schedules(kind: str) -> None:
    schedules(GOLDEN, 256, 3, 5, ALL, dtype="float32", **{"quantization.kv_cache": kind})


@pytest.mark.parametrize(("kind", "shared"), [("f32", {}), ("q4", SHARED)], ids=["f32", "q4"])
def test_bits_do_not_depend_on_chunks(kind: str, shared: dict[str, Any]) -> None:
    results = []
    for chunk in (512, 7, 1):
        keys = {"engine__prefill_chunk": chunk, "quantization__kv_cache": kind, **shared}
        with open_model(**keys) as llm:
            results.append(llm.logits([IDS[:90]])[0])
    for other in results[1:]:
        assert np.array_equal(results[0], other)


def test_all_keys_chosen() -> None:
    """Chosen and gathered, or not looked for because no text of the engine is longer."""
    results = []
    for top_k in (12, 191, 192):
        chosen = {"decoder.modules.attn.indexer.top_k": top_k, "trust_config": "warn"}
        with open_model(**chosen, engine__context=192) as llm:
            results.append(llm.logits([IDS[:191]])[0])
    assert np.array_equal(results[1], results[2])
    assert np.array_equal(results[0][:12], results[2][:12])
    assert np.abs(results[0][12:] - results[2][12:]).max() > 0.1


def test_drafts() -> None:
    """Trees of a draft with indexers of its own, in some of its layers: the same tokens."""
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    prompts = [IDS[:70], IDS[100:110] * 5]
    with open_model(**SHARED) as llm:
        alone = [answer.token_ids for answer in llm.generate(prompts, params)]
    trees = {"speculation__nodes": 6, "speculation__expansion": [2, 1]}
    with open_model(speculation__draft=[{"weights": "q4"}], **trees, **SHARED) as llm:
        drafted = llm.generate(prompts, params)
        assert [answer.token_ids for answer in drafted] == alone
        assert llm.stats().drafts > llm.stats().accepted_tokens > 0


def test_keys_that_no_layer_has_chosen() -> None:
    shared = "decoder.modules.attn.indexer.shared"
    with pytest.raises(SpecError, match=r"attn\.indexer\.shared: is true, and no layer before 0"):
        open_model(**{shared: True})
    fewer = {**SHARED, "decoder.modules.attn.indexer.top_k": "12 if i == 0 else 8"}
    with pytest.raises(SpecError, match="top_k: is 8 in layer 1, which uses the 12 of a layer"):
        open_model(**fewer)


def test_a_cache_on_the_host_is_refused() -> None:
    with pytest.raises(SpecError, match=r"partition\.host_kv_cache: an indexer chooses"):
        open_model(partition__host_kv_cache=0.5)
