"""Golden checkpoints on one device and on several of eight virtual ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from jinfer import LLM, SamplingParams

GOLDENS = Path(__file__).parents[2] / "goldens"
LENGTHS = (5, 24, 70)  # tokens of prompts; one is longer than a block
# Prompts come in small chunks: each size of a batch is a program for each stage.
FEW = {"engine.prefill_chunk": 32, "engine.mixed_chunk": 32}


@dataclass(frozen=True)
class Answers:
    """What a model gives: logits of prompts, greedy and seeded tokens."""

    logits: list[np.ndarray]
    tokens: list[list[int]]


def opened(golden: str, **keys: Any) -> LLM:
    """A golden in float32; a plan's keys without their table."""
    plan = {f"partition.{key}": value for key, value in keys.items() if "." not in key}
    rest = {key: value for key, value in keys.items() if "." in key}
    file = GOLDENS / golden / "model.bin"
    source = file if golden.startswith("llama2c") else GOLDENS / golden
    return LLM(source, dtype="float32", **plan, **{**FEW, **rest})


def prompts(llm: LLM) -> list[list[int]]:
    """Random ones, the same for each golden."""
    rng = np.random.default_rng(3)
    return [rng.integers(3, llm.spec.dims["vocab"], count).tolist() for count in LENGTHS]


def answers(llm: LLM) -> Answers:
    """What it gives."""
    asked = prompts(llm)
    if llm.spec.decoder is None:
        return Answers(llm.logits(asked), [])
    crosses = llm.session.engine.runner.model.has_cross_attention
    logits = llm.logits([[2, 5, 9]] * 3, encoder_ids=asked) if crosses else llm.logits(asked)
    tokens = []
    for drawn in ({"temperature": 0}, {"temperature": 1.0, "seed": 7}):
        params = SamplingParams(max_tokens=8, ignore_eos=True, **drawn)
        tokens += [list(answer.token_ids) for answer in llm.generate(asked, params)]
    return Answers(logits, tokens)


@cache
def alone(golden: str, weights: str = "auto") -> Answers:
    """What it gives on one device, without a plan."""
    with opened(golden, **{"quantization.weights": weights}) as llm:
        return answers(llm)


def distance(one: Answers, other: Answers) -> float:
    """The greatest difference of logits."""
    pairs = zip(one.logits, other.logits, strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)
