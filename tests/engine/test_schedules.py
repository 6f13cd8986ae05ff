"""Random schedules: whoever comes when and goes, everybody's tokens and log-probabilities are those
it gets alone.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from jinfer import LLM, SamplingParams
from jinfer.engine.output.completion import Chunk, Completion, TokenLogprob, Usage
from jinfer.engine.requests import ImageSpan
from jinfer.engine.runner import sampler_output
from tests.test_smollm2 import ROOT

GOLDENS = Path(__file__).parents[1] / "goldens"
STORIES = GOLDENS / "stories260K"
SMOLLM2 = ROOT / "specs" / "smollm2_135m_instruct.toml"
# Each with what else it needs; strategies that need much room come less often.
STRATEGIES: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"temperature": 0.8, "logprobs": 2},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.9},
    {"min_p": 0.05},
    {"typical_p": 0.9},
    {"tfs_z": 0.9},
    {"top_a": 0.1},
    {"top_n_sigma": 1.0},
    {"mirostat": 1, "temperature": 1.0},
    {"mirostat": 2, "temperature": 1.0},
    {"temperature": 1.0, "xtc_probability": 0.5},
    {"temperature": 1.0, "dry_multiplier": 0.8, "dry_sequence_breakers": (3,)},
    {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"temperature": 1.0, "frequency_penalty": 0.3, "logit_bias": {5: 3.0, 9: -4.0}},
    {"temperature": 1.0, "dynatemp_range": 0.3},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(10, 60)), "min_tokens": 3},
    {"strategy": "fsd"},
    {"strategy": "random_fsd"},
    {"strategy": "contrastive", "top_k": 4},
    {"strategy": "beam", "beams": 3},
]
# For a model with a tokenizer; more than one of twenty, because they take other ways.
GRAMMARS: list[dict[str, Any]] = [
    {"regex": r"[a-z]{2,12}( and so it was: [a-z]{2,9}\.)+", "temperature": 1.0},
    {"choice": ("yes", "no", "that cannot be said of somebody who is not here")},
    {"grammar": 'start: "<item>" /[a-z0-9]{1,12}/ "</item>"', "temperature": 1.3, "top_k": 50},
    {"regex": r"(ab?c?)*", "temperature": 1.0, "repetition_penalty": 1.3},
    {
        "json_schema": {
            "type": "object",
            "properties": {"first": {"type": "integer"}, "second": {"enum": ["red", "blue"]}},
            "required": ["first", "second"],
            "additionalProperties": False,
        },
        "temperature": 1.0,
    },
] * 2


type Answer = list[tuple[int, tuple[float, ...]]]  # tokens with their log-probabilities, if any


@dataclass
class Asked:
    """A request, and what it should get and got."""

    prompt: list[int]
    params: SamplingParams
    expected: Answer = field(default_factory=list)
    got: Answer = field(default_factory=list)
    cancel_after: int | None = None
    error: BaseException | None = None
    adapter: str | None = None
    images: tuple[ImageSpan, ...] = ()


def answered(part: Chunk | Completion) -> Answer:
    """What a chunk or a completion has."""
    each: Sequence[TokenLogprob | None] = part.logprobs or [None] * len(part.token_ids)
    bits = [() if one is None else (one.logprob, *(top.logprob for top in one.top)) for one in each]
    return list(zip(part.token_ids, bits, strict=True))


def request(
    rng: random.Random,
    vocab: int,
    most: int,
    common: list[int],
    strategies: list[dict[str, Any]],
) -> Asked:
    length = rng.choice([1, 3, 17, 60, 64, 65, 130, most - 70])
    own = [rng.randrange(3, vocab) for _ in range(length)]
    begin = common[: rng.choice([0, 0, 40, 64, 100])]
    chosen = rng.choice(strategies)
    params = SamplingParams(
        **{
            "max_tokens": rng.randint(1, 30),
            "ignore_eos": True,
            "seed": rng.randrange(99),
            **chosen,
        }
    )
    cancel = (
        rng.randint(1, 10) if rng.random() < 0.15 and chosen.get("strategy") != "beam" else None
    )
    return Asked((begin + own)[: most - 61], params, cancel_after=cancel)


@contextmanager
def held(llm: LLM) -> Iterator[None]:
    """The engine begins with what came meanwhile at the end, however slowly it came."""
    begun, end = threading.Event(), threading.Event()

    def wait(_: Any) -> None:
        begun.set()
        end.wait(300)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(llm.session.thread.run, wait)
        begun.wait(300)
        try:
            yield
        finally:
            end.set()
            waiting.result()


def play(llm: LLM, asked: list[Asked], rng: random.Random, pauses: Sequence[float]) -> None:
    """Requests that arrive over time, a pause after each other; some callers leave before their
    answer is complete.
    """
    done = threading.Semaphore(0)

    def consume(one: Asked, prepared: Any, pieces: SimpleQueue[Any]) -> None:
        while not isinstance(piece := pieces.get(), Usage):
            if isinstance(piece, BaseException):
                one.error = piece
                break
            one.got += answered(piece)
            if one.cancel_after is not None and len(one.got) >= one.cancel_after:
                llm.session.thread.cancel(prepared.request.id)
                break
        done.release()

    with nullcontext() if any(pauses) else held(llm):
        for one in asked:
            adapter = one.adapter and llm.session.adapters.find(one.adapter)
            priority = rng.randint(0, 1)
            (prepared,) = llm.session.prepare(
                one.prompt,
                one.params,
                priority=priority,
                adapter=adapter or None,
                images=one.images,
            )
            pieces: SimpleQueue[Any] = SimpleQueue()
            llm.session.submit(prepared, pieces.put)
            threading.Thread(target=consume, args=(one, prepared, pieces)).start()
            time.sleep(rng.choice(pauses))
    for _ in asked:
        assert done.acquire(timeout=300)


def check(
    llm: LLM,
    seed: int,
    asked: list[Asked],
    rng: random.Random,
    pauses: Sequence[float] = (0, 0, 0.002, 0.02),
) -> None:
    """Plays a schedule; nothing may differ, nothing may leak."""
    play(llm, asked, rng, pauses)
    for index, one in enumerate(asked):
        assert one.error is None, (seed, index, one.params)
        assert one.got, (seed, index)
        assert one.got == one.expected[: len(one.got)], (seed, index, one)
        if one.cancel_after is None:
            assert len(one.got) == len(one.expected), (seed, index, one)
    llm.session.thread.run(lambda engine: None)
    assert llm.stats().blocks_held == 0
    assert llm.stats().running == llm.stats().waiting == 0


# Of the variants, by their slots; the last one's pool is too small for them.
ALL, FEW, MANY, LAST = slice(None), slice(2), slice(2, None), slice(3, None)


def variants(source: Path, most: int, which: slice = ALL, **overrides: Any) -> Iterator[LLM]:
    """The model with different sizes of pools, slots and chunks."""
    settings: dict[str, Any] = {"engine.context": most, **overrides}
    small = most + 640  # what one request of four candidates needs at most
    every: tuple[dict[str, Any], ...] = (
        {"engine.slots": 1},
        {"engine.slots": 4, "engine.kv_tokens": small, "engine.prefill_chunk": 64},
        {"engine.slots": 16, "engine.prefill_chunk": 100, "engine.mixed_chunk": 17},
        {"engine.slots": 7, "engine.kv_tokens": small, "engine.mixed_chunk": 40},
    )
    for keys in every[which]:
        with LLM(source, **{**settings, **keys}) as llm:
            yield llm


def schedules(
    source: Path, most: int, rounds: int, seed: int, which: slice = ALL, **overrides: Any
) -> None:
    rng = random.Random(seed)
    with LLM(source, **{"engine.context": most, "engine.slots": 1, **overrides}) as alone:
        vocab = alone.spec.dims["vocab"]
        # A model of windows and states has enough blocks for all slots, whatever `kv_tokens` says.
        limited = "all" in alone.session.engine.runner.programs.sizes.blocks
        common = [rng.randrange(3, vocab) for _ in range(100)]
        strategies = STRATEGIES + (GRAMMARS if alone.tokenizer else [])
        every = [request(rng, vocab, most, common, strategies) for _ in range(24)]
        for one in every:
            one.expected = answered(alone.generate([one.prompt], one.params)[0])
    preempted = 0
    for llm in variants(source, most, which, **overrides):
        for number in range(rounds):
            # First many at once, which small pools have no room for however fast they are computed.
            count, pauses = (rng.randint(4, 20), (0, 0, 0.002, 0.02)) if number else (20, (0,))
            asked = [replace(one, got=[]) for one in rng.sample(every, count)]
            check(llm, 1000 * seed + number, asked, rng, pauses)
        preempted += llm.stats().preemptions
    assert preempted > 0 or not limited, "the small pools were meant to be too small"


@pytest.mark.parametrize(
    ("seconds", "which"),
    [
        pytest.param(0.0, FEW, id="a step a call", marks=pytest.mark.soak),
        pytest.param(sampler_output.CALL_SECONDS, LAST, id="several"),
        pytest.param(
            sampler_output.CALL_SECONDS, MANY, id="several of many", marks=pytest.mark.soak
        ),
        pytest.param(0.0, MANY, id="a step a call of many", marks=pytest.mark.soak),
        pytest.param(sampler_output.CALL_SECONDS, FEW, id="several of few", marks=pytest.mark.soak),
    ],
)
def test_stories(monkeypatch: pytest.MonkeyPatch, seconds: float, which: slice) -> None:
    monkeypatch.setattr(sampler_output, "CALL_SECONDS", seconds)
    schedules(STORIES, 256, 2, int(seconds > 0), which)


@pytest.mark.soak
@pytest.mark.parametrize("cache", ["f32", "q8", "q4"])
@pytest.mark.parametrize("seed", range(10))
def test_many_of_stories(cache: str, seed: int) -> None:
    schedules(STORIES, 256, 5, seed, ALL, **{"quantization.kv_cache": cache})


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_many_of_smollm2(seed: int) -> None:
    schedules(SMOLLM2, 512, 10, seed)
