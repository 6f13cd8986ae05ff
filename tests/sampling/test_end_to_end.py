"""Strategies through a model: each request of a mixed batch as alone, and what they promise."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer import LLM, RequestError, SamplingParams
from tests.reference import numpy_samplers as numpy

PROMPT = [1, 403, 407, 261, 378]


@pytest.fixture(scope="module")
def llm(goldens: Path) -> LLM:
    return LLM(goldens / "stories260K" / "model.bin")


def answer(llm: LLM, prompt: list[int] = PROMPT, **fields: Any) -> list[int]:
    fields = {"max_tokens": 24, "ignore_eos": True, "seed": 3} | fields
    return llm.generate([prompt], SamplingParams(**fields))[0].token_ids


def test_a_mixed_batch(llm: LLM) -> None:
    requested: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "repetition_penalty": 1.3},
        {"dry_multiplier": 1.0, "dry_sequence_breakers": ()},
        {"strategy": "fsd"},
        {"strategy": "random_fsd"},
        {"mirostat": 2, "mirostat_tau": 3.0},
        {"frequency_penalty": 0.5},
        {"allowed_token_ids": range(100, 400), "temperature": 1.0},
    ]
    made = [
        SamplingParams(max_tokens=24, ignore_eos=True, seed=3, **fields) for fields in requested
    ]
    together = llm.generate([PROMPT] * len(made), made)
    for fields, completion in zip(requested, together, strict=True):
        assert completion.token_ids == answer(llm, **fields), fields
    assert set(together[-1].token_ids) <= set(range(100, 400))


@pytest.mark.parametrize("fields", [{"strategy": "fsd"}, {"repetition_penalty": 1.5}], ids=str)
def test_tokens_depend_on_the_whole_text(llm: LLM, fields: dict[str, Any]) -> None:
    """The history that the device keeps is the text: prompt, chunks and answer."""
    prompt = [PROMPT[0], *np.random.default_rng(0).integers(260, 500, 40).tolist()]
    tokens = answer(llm, prompt, **fields)
    text = prompt + tokens
    logits = np.asarray(llm.logits([text])[0], np.float64)
    for place in range(len(prompt), len(text)):
        x, before = logits[place - 1], text[:place]
        if "strategy" in fields:
            assert text[place] == numpy.fsd(x, before)
        else:
            assert text[place] == numpy.penalties(x, before, len(prompt), 1.5).argmax()


def test_impossible_parameters_are_early_errors(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"^logit_bias: token 512 is outside the vocabulary"):
        answer(llm, logit_bias={512: 1.0})
