"""Compiled programs: a layer of a decoding step has two all-reduces, and nothing is gathered."""

import re
from collections import Counter
from typing import cast

import pytest
from jax.stages import Compiled

from jinfer.engine.runner.step_key import StepKey
from jinfer.parallel.pipeline import Pipeline
from jinfer.sampling.sampler_chain import sampler_sets
from tests.parallel.eight.models import opened

_COLLECTIVES = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def collectives(golden: str, **keys: object) -> list[Counter[str]]:
    """Those of each stage's program of a decoding step."""
    with opened(golden, **keys) as llm:
        programs = llm.session.engine.runner.programs
        assert isinstance(programs.pipeline, Pipeline)
        key = StepKey("decode", programs.slots, stages=sampler_sets()[0])
        chain = programs.pipeline.compiled_chain(programs.step(key), key)
        made = [chain.calls.programs[f"forward {n}"] for n in range(len(programs.pipeline.stages))]
        texts = [cast(Compiled, each.program).as_text() or "" for each in made]
        return [Counter(_COLLECTIVES.findall(text)) for text in texts]


@pytest.mark.parametrize(
    ("golden", "layers", "found"),
    [
        # The table of the vocabulary adds up once, before the layers; logits are gathered.
        ("llama2", [0, 2, 1], [(1, 0), (4, 0), (2, 1)]),
        ("mixtral", [0, 2, 0], [(1, 0), (4, 0), (0, 1)]),
        ("bloom", [1, 2, 0], [(3, 0), (4, 0), (0, 1)]),
    ],
)
def test_two_sums_a_layer(golden: str, layers: list[int], found: list[tuple[int, int]]) -> None:
    counts = collectives(golden, devices="0&1;2&3;4&5", layers=layers)
    assert [(each["all-reduce"], each["all-gather"]) for each in counts] == found
    assert all(each.keys() <= {"all-reduce", "all-gather"} for each in counts)


def test_branches_that_are_added_up_are_one_sum() -> None:
    # Attention and feed-forward stand side by side.
    (falcon,) = collectives("falcon7b", devices="0&1")
    assert falcon["all-reduce"] == 1 + 3
    # Experts, and those that see every token.
    (deepseek,) = collectives("deepseek_v2", devices="0&1")
    assert deepseek["all-reduce"] == 1 + 2 * 3


def test_stages_of_one_device_exchange_nothing() -> None:
    assert collectives("llama2", devices="0;1;2") == [Counter()] * 3
