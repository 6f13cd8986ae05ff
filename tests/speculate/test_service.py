"""Speculation as users see it: settings, usage, counts, colours; and that nothing compiles late."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from jinfer import LLM, SamplingParams
from jinfer.generate import main
from jinfer.server.http.metrics import Metrics
from jinfer.speculate.draft_length import DraftLength
from jinfer.speculate.replay_drafter import ReplayDrafter
from tests.engine.test_schedules import (
    GOLDENS,
    GRAMMARS,
    STORIES,
    STRATEGIES,
    answered,
    check,
    request,
)
from tests.speculate.drafts import RandomTrees, alone, ids, known, same, speculating

KEYS: dict[str, Any] = {"engine.context": 256, "engine.slots": 2, "speculation.nodes": 8}
DRAFTS: dict[str, Any] = {"speculation.draft": ["ngram", "suffix"]}
# A text that repeats itself, so that lookups find something.
PROMPT = [5, 6, 7, 8, 9, 10] * 6
LONG = SamplingParams(max_tokens=150, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(STORIES, **KEYS, **DRAFTS) as llm:
        yield llm


def test_usage_and_stats(llm: LLM) -> None:
    before = llm.stats()
    (answer,) = llm.generate([PROMPT], LONG)
    after, usage = llm.stats(), answer.usage
    assert 0 < usage.accepted_tokens <= usage.drafted_tokens
    assert after.accepted_tokens - before.accepted_tokens == usage.accepted_tokens
    assert after.draft_tokens - before.draft_tokens == usage.drafted_tokens
    assert after.drafts > before.drafts


def test_a_request_may_do_without(llm: LLM) -> None:
    before = llm.stats().drafts
    (plain,) = llm.generate([PROMPT], LONG, speculation=False)
    assert plain.usage.drafted_tokens == 0
    assert llm.stats().drafts == before
    same(llm.generate([PROMPT], LONG), [plain])
    # Beside one another, each as it asked.
    both = [SamplingParams(max_tokens=150, ignore_eos=True, speculation=on) for on in (True, False)]
    first, second = llm.generate([PROMPT, PROMPT[1:]], both)
    assert first.usage.drafted_tokens
    assert not second.usage.drafted_tokens


def test_origins_of_tokens(llm: LLM) -> None:
    chunks = list(llm.stream(PROMPT, LONG))
    origins = [chunk.origin for chunk in chunks]
    sources = {source.rstrip("234") for origin in origins for source in origin.split("+")}
    assert sources <= {"", "ngram", "suffix"}
    assert sum(map(bool, origins)) == llm.last_usage.accepted_tokens


def test_figures_for_prometheus(llm: LLM) -> None:
    metrics = Metrics()
    metrics.stats = lambda: {"m": llm.stats()}
    text = metrics.text().decode()
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        assert f'jinfer:spec_decode_num_{name}_total{{model_name="m"}}' in text


@pytest.mark.parametrize("logprobs", [None, pytest.param(1, marks=pytest.mark.soak)])
def test_grammars(logprobs: int | None) -> None:
    """Drafts that are right, and often wrong drafts, in batches with answers without a grammar."""
    keys = {**KEYS, "engine.slots": 4, "tokenizer": str(GOLDENS / "tok_llama2c")}
    base = {"max_tokens": 40, "seed": 3, "ignore_eos": True, "logprobs": logprobs}
    with LLM(STORIES, **keys) as llm:
        prompts = [PROMPT, PROMPT[2:], PROMPT[4:]]
        for grammar in GRAMMARS[:5]:
            params = [
                SamplingParams(**{**base, **kind}) for kind in (grammar, {}, {"temperature": 0.7})
            ]
            plain = llm.generate(prompts, params)
            for accuracy in (1.0, 0.7):
                replay = ReplayDrafter(known(prompts, plain), accuracy, 512)
                with speculating(llm, replay, nodes=6) as drafted:
                    same(llm.generate(prompts, params), plain)
                    assert drafted.accepted
                    same(llm.generate(prompts[:1], params[:1]), plain[:1])
        (mixed,) = alone(llm, prompts[:1], SamplingParams(**{**base, **GRAMMARS[0]}))
        with speculating(llm, ReplayDrafter(known(prompts[:1], [mixed]), 1.0, 512)) as drafted:
            same(alone(llm, prompts[:1], SamplingParams(**{**base, **GRAMMARS[0]})), [mixed])
        assert drafted.accepted == drafted.drafted > 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_random_schedules(seed: int) -> None:
    rng = random.Random(seed)
    keys = {**KEYS, "engine.slots": 3, "engine.kv_tokens": 640, "engine.prefill_chunk": 64}
    common = ids(512, 100)[0]
    requested = [request(rng, 512, 200, common, STRATEGIES[:18]) for _ in range(12)]
    with LLM(STORIES, **keys) as plain:
        for one in requested:
            one.expected = answered(alone(plain, [one.prompt], one.params)[0])
    with LLM(STORIES, **keys, **DRAFTS) as llm:
        check(llm, seed, requested, rng)


@pytest.mark.soak
def test_nothing_compiles_after_start_while_sizes_change() -> None:
    keys: dict[str, Any] = {"engine.warm_up": True, "engine.context": 128, "engine.slots": 1}
    keys |= {"engine.mixed_chunk": 8, "engine.prefill_chunk": 16}
    keys |= {"speculation.draft": ["ngram", {"skip": [3]}]}
    with LLM(STORIES, **keys) as llm:
        speculation: Any = llm.session.engine.speculator
        # What calls take is known before anybody asks for anything.
        measured = speculation.draft_length
        assert set(measured.costs) == {4, 8, 16, 32}
        assert set(measured.plain) == {1}
        assert all(0 < mean.value < 1 for mean in measured.costs.values())
        assert measured.knows(1)
        assert not measured.chances
        assert (llm.stats().drafts, llm.stats().blocks_held) == (0, 0)
        programs = [llm.session.engine.runner.programs, speculation.drafters[1].programs]
        made = [one.compilations for one in programs]
        for nodes in (2, 3, 5, 8, 13, 16, None):
            speculation.draft_length = DraftLength(nodes)
            for temperature in (0.0, 1.0):
                llm.generate([PROMPT], max_tokens=30, temperature=temperature)
        assert [one.compilations for one in programs] == made
        assert llm.stats().drafts


def test_explained(capfd: Any) -> None:
    requested = [str(STORIES), "--ids", " ".join(map(str, PROMPT)), "--max-tokens", "60"]
    settings = ["--set", "speculation.draft=ngram", "--set", "speculation.nodes=8"]
    assert main([*requested, "--ignore-eos", *settings, "--explain-speculation"]) == 0
    out, err = capfd.readouterr()
    assert "\x1b[32m" in out
    assert "tokens drafted" in err
    assert "right by depth: " in err
    assert main([*requested, "--explain-speculation"]) == 2
    assert "there is no draft source" in capfd.readouterr().err
    assert main([*requested, "--json", "--explain-speculation"]) == 2


def test_drafted_tokens_are_reported() -> None:
    """The trees of an answer: their accepted tokens are the answer's, and they are drawn."""
    keys: dict[str, Any] = {"engine.context": 256}
    with LLM(STORIES, **keys) as llm:
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        plain = llm.generate([PROMPT], params)
        trees = RandomTrees(known([PROMPT], plain), 512, 7, 3)
        with speculating(llm, trees):
            (answer,) = llm.generate([PROMPT], params)
    assert plain[0].speculation is None
    steps = answer.speculation
    assert steps is not None
    assert sum(len(step.tokens) for step in steps.drafted) == answer.usage.drafted_tokens
    assert sum(len(step.accepted) for step in steps.drafted) == answer.usage.accepted_tokens
    text = " ".join(map(str, answer.token_ids))
    for step in steps.drafted:
        assert [step.tokens[node] for node in step.accepted] == list(step.chosen)[
            : len(step.accepted)
        ]
        assert " ".join(map(str, step.chosen)) in text
    tried = steps.tried()
    assert sum(right for of in tried.values() for right, _ in of.values()) == sum(
        len(step.accepted) for step in steps.drafted
    )
    picture = ElementTree.fromstring(steps._repr_svg_())
    drawn = [one for one in picture.iter() if one.get("data-step") is not None]
    assert len(drawn) == min(len(steps), 12)
    for group, step in zip(drawn, steps.drafted, strict=False):
        boxes = [one for one in group.iter() if one.tag.endswith("rect")]
        own = len(step.chosen) > len(step.accepted)
        assert len(boxes) == len(step.tokens) + 1 + own
        bold = [one for one in boxes if "right" in (one.get("class") or "")]
        assert len(bold) == len(step.accepted) + own
    assert ElementTree.fromstring(steps[0]._repr_svg_()).tag.endswith("svg")
    assert repr(steps[:2]).startswith("Steps(2 calls, ")
