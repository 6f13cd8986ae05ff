"""Golden checkpoints on one device and on several of eight virtual ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from jinfer import LLM, SamplingParams
from jinfer.loader.open_model import open_files
from tools.bench_models import LlamaShape, make_up

GOLDENS = Path(__file__).parents[2] / "goldens"
LENGTHS = (5, 24, 70)  # tokens of prompts; one is longer than a block
# Prompts come in small chunks: each size of a batch is a program for each stage.
FEW = {"engine.prefill_chunk": 32, "engine.mixed_chunk": 32}

type Requests = Sequence[tuple[list[int], SamplingParams]]


@dataclass(frozen=True)
class Answers:
    """Results of a model: logits of prompts, greedy and seeded tokens."""

    logits: list[np.ndarray]
    tokens: list[list[int]]


def opened(golden: str, **keys: Any) -> LLM:
    """A golden in float32; a plan's keys without their table."""
    plan = {f"partition.{key}": value for key, value in keys.items() if "." not in key}
    rest = {key: value for key, value in keys.items() if "." in key}
    file = GOLDENS / golden / "model.bin"
    source = file if golden.startswith("llama2c") else GOLDENS / golden
    return LLM(source, dtype="float32", **plan, **{**FEW, **rest})


def made_up(folder: Path, shape: LlamaShape) -> Path:
    """A model of random weights that has a tokenizer."""
    model = folder / "model.gguf"
    make_up(shape, open_files("smollm2_135m_instruct", {}).weights, model, "Q4_0")
    return model


def prompts(llm: LLM) -> list[list[int]]:
    """Random prompts, the same for each golden."""
    rng = np.random.default_rng(3)
    return [rng.integers(3, llm.spec.dims["vocab"], count).tolist() for count in LENGTHS]


def answers(llm: LLM) -> Answers:
    """Results of a model for `prompts`."""
    given = prompts(llm)
    if llm.spec.decoder is None:
        return Answers(llm.logits(given), [])
    crosses = llm.session.engine.runner.model.has_cross_attention
    logits = llm.logits([[2, 5, 9]] * 3, encoder_ids=given) if crosses else llm.logits(given)
    tokens = []
    for drawn in ({"temperature": 0}, {"temperature": 1.0, "seed": 7}):
        params = SamplingParams(max_tokens=8, ignore_eos=True, **drawn)
        tokens += [list(answer.token_ids) for answer in llm.generate(given, params)]
    return Answers(logits, tokens)


@cache
def alone(golden: str, weights: str = "auto") -> Answers:
    """Results on one device, without a plan."""
    with opened(golden, **{"quantization.weights": weights}) as llm:
        return answers(llm)


def check_answers(golden: str, limit: float = 1e-4, weights: str = "auto", **plan: Any) -> None:
    """A plan has the tokens of one device, and logits that differ by at most `limit`."""
    whole = alone(golden, weights)
    with opened(golden, **plan, **{"quantization.weights": weights}) as llm:
        found = answers(llm)
    assert found.tokens == whole.tokens
    for a, b in zip(found.logits, whole.logits, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=limit)


def mixed_requests(count: int) -> Requests:
    """Prompts of different lengths, some with a common beginning, greedy and seeded."""
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


def tokens(llm: LLM, requests: Requests) -> list[list[int]]:
    """The tokens of requests that run together."""
    given, params = zip(*requests, strict=True)
    return [list(each.token_ids) for each in llm.generate(list(given), list(params))]


def nothing_held(llm: LLM) -> bool:
    """Whether all cache blocks are free."""
    return llm.session.engine.scheduler.blocks.used == 0


def check_requests(
    golden: str, requests: Requests, keys: dict[str, Any], plan: dict[str, Any], times: int = 1
) -> None:
    """A plan has the tokens of one device, also with its prefix cache; no block stays in use."""
    with opened(golden, **keys) as llm:
        expected = tokens(llm, requests)
    with opened(golden, **(keys | plan)) as llm:
        for _ in range(times):
            assert tokens(llm, requests) == expected
            assert nothing_held(llm)


def plain(llm: LLM) -> Any:
    """Greedy and seeded tokens, and logits."""
    found = answers(llm)
    return {"tokens": found.tokens, "logits": [each.tolist() for each in found.logits]}


def together(llm: LLM) -> Any:
    """Sixteen requests at a time, twice; no block stays in use."""
    requests = mixed_requests(16)
    found = [tokens(llm, requests), tokens(llm, requests)]
    return {"tokens": found, "left": not nothing_held(llm)}


def strategies(llm: LLM) -> Any:
    """Searches, scores and vectors."""
    given = prompts(llm)
    ways = [
        SamplingParams(strategy="beam", beams=3, max_tokens=6, ignore_eos=True),
        SamplingParams(strategy="contrastive", top_k=3, max_tokens=6, ignore_eos=True),
        SamplingParams(strategy="fsd", max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3),
    ]
    chosen = [[list(each.token_ids) for each in llm.generate(given, way)] for way in ways]
    numbers = [*llm.score(given), *llm.hidden(given), *llm.embed(given)]
    found = [np.asarray(each).tolist() for each in numbers]
    return {"tokens": chosen, "logits": found, "left": not nothing_held(llm)}


def chances(llm: LLM) -> Any:
    """Allowed ids, several answers of a prompt, a sampler with a state."""
    given = prompts(llm)
    ways = [
        SamplingParams(temperature=1.0, seed=4, max_tokens=6, allowed_token_ids=[7, 8, 9, 10]),
        SamplingParams(temperature=0.8, seed=1, n=2, max_tokens=5, logprobs=2, ignore_eos=True),
        SamplingParams(mirostat=2, temperature=1.0, seed=3, max_tokens=8, ignore_eos=True),
    ]
    return {"tokens": [[list(a.token_ids) for a in llm.generate(given, way)] for way in ways]}


CALLS = {"chances": chances, "plain": plain, "together": together, "strategies": strategies}


def check_results(found: Any, whole: Any, limit: float = 1e-4) -> None:
    """Results of one of `CALLS` are those of one device."""
    assert found["tokens"] == whole["tokens"]
    assert not found.get("left")
    for a, b in zip(found.get("logits", ()), whole.get("logits", ()), strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=0, atol=limit)
