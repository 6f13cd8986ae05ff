"""The demonstration model, with real weights, against values of the reference implementation."""

import json
from pathlib import Path

import numpy as np
import pytest

from jinfer import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("optimized")
ROOT = Path(__file__).parents[1]
SPEC = ROOT / "specs" / "smollm2_135m_instruct.toml"
FOLDER = ROOT / "tests" / "goldens" / "real_smollm2_135m_q4_1"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(SPEC, dtype="float32", quantization={"activations": "float"})


@pytest.fixture(scope="module")
def values() -> dict[str, np.ndarray]:
    with np.load(FOLDER / "expected.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def meta() -> dict:
    return json.loads((FOLDER / "meta.json").read_text())


def test_token_ids(llm: LLM, meta: dict) -> None:
    assert [llm.encode(text) for text in meta["prompts"]] == meta["token_ids"]


def test_chat_template(llm: LLM, meta: dict) -> None:
    assert llm.encode_chat(meta["messages"]) == meta["token_ids"][2]


@pytest.mark.parametrize("p", [0, 1, 2])
def test_logits(llm: LLM, values: dict[str, np.ndarray], p: int) -> None:
    got = llm.logits([values[f"p{p}_input_ids"].tolist()])[0]
    columns = values["sample_columns"]
    for reference, ours in [
        (values[f"p{p}_last_logits"], got[-1]),
        (values[f"p{p}_sampled_logits"], got[:, columns]),
        (values[f"p{p}_top20_logits"], np.take_along_axis(got, values[f"p{p}_top20_ids"], 1)),
    ]:
        np.testing.assert_allclose(ours, reference, rtol=0, atol=2e-3)


def test_greedy_tokens(llm: LLM, values: dict[str, np.ndarray], meta: dict) -> None:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    answers = llm.generate(meta["prompts"], params)
    assert [a.token_ids for a in answers] == [values[f"p{p}_greedy"].tolist() for p in range(3)]


def test_as_its_specification_says(values: dict[str, np.ndarray], meta: dict) -> None:
    """With 16 bits for activations and cache: the same tokens, and nearly the same logits."""
    with LLM(SPEC) as llm:
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        answers = llm.generate(meta["prompts"], params)
        assert [a.token_ids for a in answers] == [values[f"p{p}_greedy"].tolist() for p in range(3)]
        logits = llm.logits([values["p0_input_ids"].tolist()])[0]
    np.testing.assert_allclose(logits[-1], values["p0_last_logits"], rtol=0, atol=0.1)


def test_chat_answers_sensibly(llm: LLM, meta: dict) -> None:
    answer = llm.chat(meta["messages"], SamplingParams(max_tokens=64))
    assert answer.text.startswith("The primary colours are: Red, Blue, and Yellow.")
    assert answer.finish_reason == "stop"
    assert llm.tokenizer is not None
    assert answer.token_ids[-1] in llm.tokenizer.eos_ids
    streamed = list(llm.stream(meta["messages"], SamplingParams(max_tokens=64)))
    assert "".join(chunk.text for chunk in streamed) == answer.text
    assert streamed[-1].finish_reason == "stop"
