"""Values that outlive a layer: a model of them gives NumPy's logits, in any company."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jinfer import LLM, SamplingParams
from jinfer.modelspec.spec_errors import SpecError
from tests.reference.numpy_carried import SPEC, carried_params, numpy_carried

RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, 64, count).tolist() for count in (40, 9, 70)]


@pytest.fixture(scope="module")
def params() -> dict[str, np.ndarray]:
    return carried_params(seed=5)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory, params: dict[str, np.ndarray]) -> Path:
    folder: Path = tmp_path_factory.mktemp("carried")
    save_file(params, folder / "model.safetensors")
    (folder / "carried.toml").write_text(SPEC)
    return folder / "carried.toml"


def opened(spec: Path, **overrides: Any) -> LLM:
    return LLM(spec, dtype="float32", **overrides)


@pytest.fixture(scope="module")
def llm(spec: Path) -> LLM:
    return opened(spec)


def test_logits(llm: LLM, params: dict[str, np.ndarray]) -> None:
    for prompt, got in zip(PROMPTS, llm.logits(PROMPTS), strict=True):
        np.testing.assert_allclose(got, numpy_carried(params, prompt), rtol=0, atol=5e-5)


def test_decoding_token_by_token(llm: LLM, params: dict[str, np.ndarray]) -> None:
    tokens = [5, 17, 60]
    answer = llm.generate([tokens], SamplingParams(max_tokens=12, ignore_eos=True))[0]
    for token in answer.token_ids:
        assert token == int(np.argmax(numpy_carried(params, tokens)[-1]))
        tokens.append(token)


def test_bits_do_not_depend_on_chunks(spec: Path, llm: LLM) -> None:
    together = llm.logits(PROMPTS)
    with opened(spec, **{"engine.prefill_chunk": 7, "engine.mixed_chunk": 7}) as small:
        for prompt, whole in zip(PROMPTS, together, strict=True):
            assert np.array_equal(small.logits([prompt])[0], whole)


def test_weights_that_uses_share_are_loaded_once(llm: LLM) -> None:
    engine = llm.session.engine
    found = dict(zip(engine.runner.model.names, engine.runner.parameters, strict=True))
    assert found["decoder.0.attn.q.weight"] is found["decoder.4.attn.q.weight"]
    assert found["decoder.0.lora_up.weight"] is not found["decoder.4.lora_up.weight"]
    assert "decoder.4.attn.k.weight" not in found
    assert not {"decoder.4.attn", "decoder.5.attn"} & engine.runner.model.caches.keys()


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            {"decoder.modules.attn.kv_layer": "i - 1 if i else none"},
            "layer 2 takes the keys of layer 1, which has none under that name",
        ),
        ({"speculation.draft": {"skip": [2]}}, "layer 4 takes the keys of layer 2 for its attn"),
        ({"speculation.draft": {"skip": [0]}}, "skip leaves out the layer that assigns first"),
        (
            {"partition.host_kv_cache": 0.5, "partition.devices": "0"},
            "layers that share keys need these on one device",
        ),
    ],
)  # fmt: skip
def test_refused(spec: Path, overrides: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError, match=reason) as caught:
        opened(spec, **overrides)
    assert "\n" not in str(caught.value)
