"""Requests with images on several devices give what they give on one."""

from typing import Any

import pytest

from jinfer import LLM, SamplingParams
from tests.engine.images import Drawn, laid, open_model
from tests.engine.test_image_requests import TEXT, run
from tests.parallel.eight.models import FEW

PARAMS = (
    SamplingParams(max_tokens=8, ignore_eos=True),
    SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, seed=7),
)


def answers(llm: LLM) -> list[list[int]]:
    prompts = [
        laid(llm, [TEXT[:5], (Drawn(1, 12), 3, 1), TEXT[5:30], (Drawn(2, 6), 3, 1), TEXT[30:34]]),
        laid(llm, [(Drawn(2, 6), 3, 1), TEXT[40:50]]),
    ]
    return [run(llm, prompt, params)[0][0] for prompt in prompts for params in PARAMS]


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
@pytest.mark.parametrize(
    "plan",
    [
        {"partition.devices": "0;1", "partition.layers": [1, 2]},
        pytest.param({"partition.devices": "0&1"}, marks=pytest.mark.soak),
    ],
    ids=["layers", "tensors"],
)
def test_images(name: str, plan: dict[str, Any]) -> None:
    with open_model(name, **FEW) as llm:
        expected = answers(llm)
    with open_model(name, **FEW, **plan) as llm:
        assert answers(llm) == expected
