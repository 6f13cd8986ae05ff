"""Random schedules of requests with images: each answer has the bits of the same request alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from jinfer import LLM, SamplingParams
from tests.engine.images import drawn_prompt, open_model
from tests.engine.test_schedules import STRATEGIES, Asked, check, play

CONTEXT = 256
# Beams need more of the cache than the small one has.
CHOSEN = [each for each in STRATEGIES if each.get("strategy") not in ("beam", "contrastive")]
# Positions on a grid and added features; attention within an image and windows; several runs of
# placeholders an image; layers with a state.
MODELS = ("qwen3_vl", "gemma3", "smolvlm", "qwen3_5")


def drawn_request(llm: LLM, rng: random.Random) -> Asked:
    prompt, images = drawn_prompt(llm, rng)
    chosen: dict[str, Any] = rng.choice(CHOSEN)
    if images and images[-1].runs[-1][0] + images[-1].runs[-1][1] == len(prompt):
        chosen = CHOSEN[0]
    params = SamplingParams(
        **{
            "max_tokens": rng.randint(1, 100),
            "ignore_eos": True,
            "seed": rng.randrange(99),
            **chosen,
        }
    )
    return Asked(prompt, params, images=images)


def answer_alone(llm: LLM, one: Asked) -> None:
    llm.session.thread.run(lambda engine: engine.scheduler.blocks.clear())
    play(llm, [one], random.Random(0), (0,))
    assert one.error is None, one
    one.expected, one.got = one.got, []


def schedules(name: str, count: int, seed: int, **overrides: Any) -> None:
    rng = random.Random(seed)
    settings: dict[str, Any] = {"engine.context": CONTEXT, **overrides}
    with open_model(name, **{**settings, "engine.slots": 1}) as alone:
        every = [drawn_request(alone, rng) for _ in range(min(count, 24))]
        for one in every:
            answer_alone(alone, one)
    small = {"engine.slots": 6, "engine.kv_tokens": CONTEXT + 64, "engine.prefill_chunk": 80}
    drafting = {
        "engine.slots": 3,
        "engine.mixed_chunk": 20,
        "speculation.draft": "ngram",
        "speculation.nodes": 8,
    }
    preempted = drafted = 0
    for keys in (small, drafting):
        with open_model(name, **{**settings, **keys}) as llm:
            for number in range(-(-count // 2 // len(every))):
                asked = [replace(one, got=[]) for one in rng.sample(every, len(every))]
                check(llm, 1000 * seed + number, asked, rng, (0, 0, 0.01) if number else (0,))
            preempted += llm.stats().preemptions
            drafted += llm.session.engine.drafted.drafted
    assert preempted, "the pool was meant to be too small"
    assert drafted, "prompts that repeat were meant to be drafted from"


@pytest.mark.parametrize("name", MODELS[:2])
def test_images_in_any_schedule(name: str) -> None:
    schedules(name, 15, 1)


@pytest.mark.soak
@pytest.mark.parametrize("cache", ["f32", "q8"])
@pytest.mark.parametrize("name", MODELS)
def test_many_images_in_any_schedule(name: str, cache: str) -> None:
    schedules(name, 500, 2, **{"quantization.kv_cache": cache})
