"""A tiny model for tests of the engine, and what it answers without one."""

from pathlib import Path
from typing import Any

import numpy as np

from jinfer import LLM, SamplingParams

GOLDEN = Path(__file__).parents[1] / "goldens" / "llama2"
_RNG = np.random.default_rng(5)
PROMPTS = [_RNG.integers(3, 320, n).tolist() for n in (3, 16, 17, 40, 5, 29, 64, 11, 2)]
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)


def open_model(**overrides: Any) -> LLM:
    return LLM(GOLDEN, **{"dtype": "float32", "engine.slots": 4, **overrides})


def held(llm: LLM) -> int:
    """Blocks held, after all that the engine's thread was told to do is done."""
    llm.session.thread.run(lambda engine: None)
    return llm.stats().blocks_held


def continued(llm: LLM, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(llm.logits([tokens])[0][-1])))
    return tokens[len(prompt) :]


def ids(answers: list) -> list[list[int]]:
    return [answer.token_ids for answer in answers]
