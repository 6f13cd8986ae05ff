"""Requests of every kind through several stages: the tokens of one device, no block left in use."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer import LLM, SamplingParams
from jinfer.parallel.pipeline import Pipeline
from tests.parallel.eight.models import (
    CALLS,
    check_requests,
    check_results,
    made_up,
    mixed_requests,
    nothing_held,
    opened,
    tokens,
)
from tools.bench_models import LlamaShape
from tools.bench_partition import Timeline, overlap_fraction

HYBRID = {"devices": "0&1;2&3", "layers": [2, 1]}
KEYS: dict[str, Any] = {"engine.slots": 6, "engine.kv_tokens": 1024}


@pytest.mark.soak
@pytest.mark.parametrize("plan", [HYBRID, {"devices": "5"}], ids=["hybrid", "another"])
@pytest.mark.parametrize("call", ["together", "strategies", "chances"])
def test_every_kind_of_request(call: str, plan: dict[str, Any]) -> None:
    with opened("llama2", **KEYS) as llm:
        whole = CALLS[call](llm)
    with opened("llama2", **plan, **KEYS) as llm:
        check_results(CALLS[call](llm), whole)


@pytest.mark.soak
def test_stages_work_at_the_same_time(tmp_path: Path) -> None:
    """Of one device each: XLA:CPU runs one program of several devices at a time."""
    # Large enough that a stage takes longer than it takes to launch it.
    model = made_up(tmp_path, LlamaShape(6, 1024, 8, 8, 3072, context=256))
    keys: dict[str, Any] = {**KEYS, "dtype": "float32"}
    requests = mixed_requests(6)
    with LLM(model, **keys) as llm:
        expected = tokens(llm, requests)
    plan: dict[str, Any] = {"partition.devices": "0;1;2"}
    with LLM(model, **keys, **plan) as llm:
        assert tokens(llm, requests) == expected
        pipeline = llm.session.engine.runner.programs.pipeline
        assert isinstance(pipeline, Pipeline)
        timeline = Timeline()
        pipeline.observe = timeline.note
        assert tokens(llm, requests) == expected
        busy = timeline.close()
    assert {call.stage for call in busy} == {0, 1, 2}
    assert {call.lane for call in busy} == {0, 1, 2}
    # Launched from one thread they would have 2% of the time in common.
    assert overlap_fraction(busy) > 0.15


def test_a_small_cache_and_few_slots() -> None:
    """Sequences are preempted, wait for each other, and have the same tokens."""
    few = {"engine.prefill_chunk": 16, "engine.mixed_chunk": 16}  # sizes, each of them a program
    small = {"engine.slots": 3, "engine.kv_tokens": 320, "engine.context": 160}
    plan = {"devices": "0;1;2", "layers": [2, 0, 1], "lanes": 2, **small}
    check_requests("llama2", mixed_requests(8), KEYS | few, plan)


@pytest.mark.soak
def test_translations() -> None:
    rng = np.random.default_rng(2)
    greedy = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
    beams = SamplingParams(strategy="beam", beams=2, max_tokens=6, ignore_eos=True)
    texts = [rng.integers(4, 320, n).tolist() for n in (6, 40, 90)]
    requests = [(text, way) for way in (greedy, beams) for text in texts]
    check_requests("m2m100", requests, KEYS, {"devices": "0&1;2&3"})


@pytest.mark.soak
def test_programs_are_compiled_at_the_start() -> None:
    """Nothing is compiled afterwards."""
    with opened("llama2", **HYBRID, **{**KEYS, "engine.slots": 2, "engine.warm_up": True}) as llm:
        compilations = llm.compilations
        tokens(llm, mixed_requests(3))
        assert llm.compilations == compilations


@pytest.mark.soak
def test_answers_under_a_grammar(tmp_path: Path) -> None:
    """Their tokens are chosen a call later, in their own micro-batch, next to those of others."""
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
def test_rare_options() -> None:
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
            return [(answer.token_ids, answer.logprobs) for answer in found]

    assert answers(devices="0;1") == answers()


@pytest.mark.soak
def test_devices_that_the_cost_model_chooses() -> None:
    check_requests("llama2", mixed_requests(3), KEYS, {"devices": "auto"})
