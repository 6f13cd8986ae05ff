"""Requests of every kind through several stages: the tokens of one device, nothing left over."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer import LLM, SamplingParams
from jinfer.loader.open_model import open_files
from jinfer.parallel.pipeline import Pipeline
from tests.parallel.eight.models import opened
from tools.bench_models import LlamaShape, make_up
from tools.bench_partition import Timeline, overlap_fraction

HYBRID = {"devices": "0&1;2&3", "layers": [2, 1]}
KEYS: dict[str, Any] = {"engine.slots": 6, "engine.kv_tokens": 1024}


def asked(count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of different lengths, some with a beginning in common, and ways to choose."""
    rng = np.random.default_rng(8)
    common = rng.integers(3, 320, 70).tolist()
    requests = []
    for index in range(count):
        own = rng.integers(3, 320, int(rng.integers(1, 60))).tolist()
        drawn: dict[str, Any] = {"temperature": 0.9, "seed": index} if index % 2 else {}
        params = SamplingParams(
            **{"temperature": 0, **drawn}, max_tokens=5 + index % 9, ignore_eos=True
        )
        requests.append(((common if index % 3 == 0 else []) + own, params))
    return requests


def tokens(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    prompts, params = zip(*requests, strict=True)
    return [list(each.token_ids) for each in llm.generate(list(prompts), list(params))]


def nothing_held(llm: LLM) -> bool:
    blocks = llm.session.engine.scheduler.blocks
    return blocks.used == 0


@pytest.mark.soak
def test_sixteen_at_a_time() -> None:
    requests = asked(16)
    with opened("llama2", **KEYS) as llm:
        wanted = tokens(llm, requests)
    with opened("llama2", **HYBRID, **KEYS) as llm:
        assert tokens(llm, requests) == wanted
        assert nothing_held(llm)
        # Again, with what the first time left in the cache.
        assert tokens(llm, requests) == wanted
        assert nothing_held(llm)


@pytest.mark.soak
def test_stages_work_at_the_same_time(tmp_path: Path) -> None:
    """Of one device each: XLA:CPU runs one program of several devices at a time."""
    # Large enough that a stage takes longer than it takes to launch it.
    model = made_up(tmp_path, LlamaShape(6, 1024, 8, 8, 3072, context=256))
    keys: dict[str, Any] = {**KEYS, "dtype": "float32"}
    plan: dict[str, Any] = {"partition.devices": "0;1;2"}
    requests = asked(6)
    with LLM(model, **keys) as llm:
        wanted = tokens(llm, requests)
    with LLM(model, **keys, **plan) as llm:
        assert tokens(llm, requests) == wanted
        programs = llm.session.engine.runner.programs.pipeline
        assert isinstance(programs, Pipeline)
        timeline = Timeline()
        programs.observe = timeline.note
        assert tokens(llm, requests) == wanted
        busy = timeline.close()
    assert {call.stage for call in busy} == {0, 1, 2}
    assert {call.lane for call in busy} == {0, 1, 2}
    # Launched from one thread they would have 2% of the time in common.
    assert overlap_fraction(busy) > 0.15


def made_up(folder: Path, shape: LlamaShape) -> Path:
    """A model of random weights that knows words."""
    model = folder / "model.gguf"
    words = open_files("smollm2_135m_instruct", {}).weights
    make_up(shape, words, model, "Q4_0")
    return model


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(HYBRID, id="hybrid", marks=pytest.mark.soak),
        pytest.param({"devices": "5"}, id="another", marks=pytest.mark.soak),
    ],
)
def test_every_strategy(plan: dict[str, Any]) -> None:
    requests = asked(2)
    prompts = [prompt for prompt, _ in requests]
    ways = [
        SamplingParams(strategy="beam", beams=3, max_tokens=6, ignore_eos=True),
        SamplingParams(strategy="contrastive", top_k=3, max_tokens=6, ignore_eos=True),
        SamplingParams(strategy="fsd", max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3),
    ]

    def everything(llm: LLM) -> tuple[Any, ...]:
        answers = [llm.generate(prompts, way) for way in ways]
        chosen = [[list(each.token_ids) for each in group] for group in answers]
        return chosen, llm.score(prompts), llm.hidden(prompts), llm.embed(prompts)

    with opened("llama2", **KEYS) as llm:
        wanted, *numbers = everything(llm)
    with opened("llama2", **plan, **KEYS) as llm:
        found, *others = everything(llm)
        assert nothing_held(llm)
    assert found == wanted
    for one, other in zip(numbers, others, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


def test_a_small_cache_and_few_slots() -> None:
    """Sequences are preempted, wait for each other, and come to the same."""
    requests = asked(8)
    few = {"engine.prefill_chunk": 16, "engine.mixed_chunk": 16}  # sizes, each of them a program
    keys = {"engine.slots": 3, "engine.kv_tokens": 320, "engine.context": 160, **few}
    with opened("llama2", **KEYS, **few) as llm:
        wanted = tokens(llm, requests)
    with opened("llama2", devices="0;1;2", layers=[2, 0, 1], lanes=2, **keys) as llm:
        assert tokens(llm, requests) == wanted
        assert nothing_held(llm)


@pytest.mark.soak
def test_translations() -> None:
    rng = np.random.default_rng(2)
    prompts = [rng.integers(4, 320, n).tolist() for n in (6, 40, 90)]
    params = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
    beams = SamplingParams(strategy="beam", beams=2, max_tokens=6, ignore_eos=True)

    def both(llm: LLM) -> list[list[int]]:
        answers = [*llm.generate(prompts, params), *llm.generate(prompts, beams)]
        return [list(each.token_ids) for each in answers]

    with opened("m2m100", **KEYS) as llm:
        wanted = both(llm)
    with opened("m2m100", devices="0&1;2&3", **KEYS) as llm:
        assert both(llm) == wanted
        assert nothing_held(llm)


@pytest.mark.soak
def test_programs_made_at_the_start() -> None:
    """Nothing is compiled afterwards."""
    with opened("llama2", **HYBRID, **{**KEYS, "engine.slots": 2, "engine.warm_up": True}) as llm:
        made = llm.compilations
        tokens(llm, asked(3))
        assert llm.compilations == made


@pytest.mark.soak
def test_answers_under_a_grammar(tmp_path: Path) -> None:
    """Their tokens are chosen a call later, in their own lane, beside those of free ones."""
    model = made_up(tmp_path, LlamaShape(2, 64, 4, 2, 96, context=512))
    params = [
        SamplingParams(regex=r"\d{3}-[a-f]{2}", temperature=1.0, seed=2),
        SamplingParams(choice=("Paris", "Rome", "Oslo")),
        SamplingParams(temperature=0, max_tokens=8),
        SamplingParams(regex="[A-Z][a-z]{3,6}", temperature=1.0, seed=3),
    ]
    prompts = ["A code: ", "The capital of Italy is ", "Once upon a time", "A name: "]
    keys: dict[str, Any] = {"engine.slots": 4, "engine.context": 256, "dtype": "float32"}

    def texts(**plan: Any) -> list[str]:
        with LLM(model, **keys, **plan) as llm:
            found = [answer.text for answer in llm.generate(prompts, params)]
            assert nothing_held(llm)
            return found

    assert texts(**{"partition.devices": "0;1"}) == texts()


@pytest.mark.soak
def test_what_few_requests_want() -> None:
    """A user's function, log-probabilities of ids and after the samplers, in stages too."""
    from tests.engine.test_logits_processors import even

    greedy = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=2)
    params = [
        replace(greedy, logits_processors=(even,)),
        replace(greedy, logprob_token_ids=(5, 9, 7)),
        replace(greedy, temperature=0.8, top_k=3, seed=1, post_sampling_probs=True),
    ]

    def answers(**plan: Any) -> list[Any]:
        with opened("llama2", **plan, **KEYS) as llm:
            found = llm.generate([[5, 6, 7], [9, 3], [8]], params)
            return [(one.token_ids, one.logprobs) for one in found]

    assert answers(devices="0;1") == answers()


@pytest.mark.soak
def test_devices_that_the_cost_model_chooses() -> None:
    requests = asked(3)
    with opened("llama2", **KEYS) as llm:
        wanted = tokens(llm, requests)
    with opened("llama2", devices="auto", **KEYS) as llm:
        assert isinstance(llm.session.engine.runner.programs.pipeline, Pipeline)
        assert tokens(llm, requests) == wanted
