"""Whatever is drafted, the tokens are those of plain decoding, and the logits too, to the bit."""

from __future__ import annotations

from typing import Any

import pytest

from jinfer import LLM, SamplingParams
from jinfer.speculate.prompt_lookup import PromptLookup
from jinfer.speculate.replay_drafter import ReplayDrafter
from tests.engine.test_schedules import GOLDENS, STORIES, STRATEGIES
from tests.speculate.drafts import RandomTrees, alone, ids, known, same, speculating
from tests.test_goldens import CAUSAL

# Latents, experts, streams and keys of other layers here; ALiBi, windows, soft caps and sinks with
# the caches below; and what is asked of a Llama's structure on `STORIES`. The others are among what
# takes minutes.
USUAL = ("deepseek_v2", "gemma3n")
CACHES = [
    *[("bloom", "q8"), ("gemma2", "f16"), ("gpt_oss", "q3")],
    *(
        pytest.param(*case, marks=pytest.mark.soak)
        for case in (
            *[("llama2", "q8"), ("mistral", "q4"), ("gemma2", "q8"), ("deepseek_v2", "q8")],
            *[("qwen25_yarn", "bf16"), ("mixtral", "q6")],
        )
    ),
]

SHORT: dict[str, Any] = {"engine.context": 256}
ONE: dict[str, Any] = {"engine.slots": 2}


def source(name: str) -> Any:
    file = GOLDENS / name / "model.bin"
    return file if file.exists() else GOLDENS / name


def check_trees(llm: LLM, **sampling: Any) -> None:
    """Trees of random shape and of seven nodes, so that few programs are made."""
    vocab = llm.spec.dims["vocab"]
    prompts = ids(vocab, 9, 60)
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2, **sampling)
    plain = alone(llm, prompts, params)
    trees = RandomTrees(known(prompts, plain), vocab, 7, 7)
    with speculating(llm, trees) as drafted:
        same(alone(llm, prompts, params), plain)
    assert drafted.accepted > 5
    assert llm.stats().blocks_held == 0


@pytest.mark.parametrize(
    "name", [*USUAL, *(pytest.param(n, marks=pytest.mark.soak) for n in CAUSAL if n not in USUAL)]
)
def test_goldens(name: str) -> None:
    settings: dict[str, Any] = {"engine.slots": 2, "dtype": "float32"}
    with LLM(source(name), **settings) as llm:
        check_trees(llm)


@pytest.mark.parametrize(("name", "kv_cache"), CACHES)
def test_caches(name: str, kv_cache: str) -> None:
    settings: dict[str, Any] = {"engine.slots": 2, "quantization.kv_cache": kv_cache}
    with LLM(source(name), **settings) as llm:
        check_trees(llm, temperature=1.0, seed=3)


@pytest.mark.parametrize(
    "name",
    ["flan_t5", *(pytest.param(n, marks=pytest.mark.soak) for n in ("m2m100", "bart", "pegasus"))],
)
def test_encoder_decoders(name: str) -> None:
    with LLM(GOLDENS / name, **ONE) as llm:
        params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=1.0, seed=1)
        texts = ids(llm.spec.dims["vocab"], 9, 40)
        prepared = [llm.session.prepare(text, params)[0].request.prompt for text in texts]
        plain = alone(llm, texts, params)
        answers = dict(zip(prepared, (one.token_ids for one in plain), strict=True))
        for text, answer in zip(texts, plain, strict=True):
            # The decoder's prompts are the same, so their answers have to be told apart.
            answers[prepared[0]] = answer.token_ids
            with speculating(llm, RandomTrees(answers, llm.spec.dims["vocab"], 7, 7)) as drafted:
                same(llm.generate([text], params), [answer])
            assert drafted.accepted


@pytest.fixture(scope="module")
def stories() -> Any:
    with LLM(STORIES, **SHORT) as llm:
        yield llm


@pytest.mark.parametrize(
    "nodes", [*(pytest.param(n, marks=pytest.mark.soak) for n in (2, 4, 16)), 32]
)
def test_sizes(stories: LLM, nodes: int) -> None:
    vocab = stories.spec.dims["vocab"]
    prompts = ids(vocab, 9, 40)
    params = SamplingParams(max_tokens=30, ignore_eos=True, logprobs=2, temperature=0.9, seed=nodes)
    plain = alone(stories, prompts, params)
    trees = RandomTrees(known(prompts, plain), vocab, nodes - 1)
    with speculating(stories, trees, nodes=nodes) as drafted:
        same(alone(stories, prompts, params), plain)
        same(stories.generate(prompts, params), plain)
    assert drafted.accepted > 5
    assert stories.stats().blocks_held == 0


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize(
    "streams", [pytest.param(1, marks=pytest.mark.soak), 3, pytest.param(8, marks=pytest.mark.soak)]
)
def test_strategies(stories: LLM, strategy: dict[str, Any], streams: int) -> None:
    vocab = stories.spec.dims["vocab"]
    prompts = ids(vocab, *range(3, 3 + 9 * streams, 9))
    params = SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "seed": streams} | strategy)
    plain = alone(stories, prompts, params)
    answers = known(prompts, plain)
    for drafter in (
        ReplayDrafter(answers, 0.8, vocab),
        RandomTrees(answers, vocab, 5),
        PromptLookup(),
    ):
        with speculating(stories, drafter, nodes=6):
            same(stories.generate(prompts, params), plain)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 6))]
)
def test_seeds_and_a_mixed_batch(stories: LLM, seed: int) -> None:
    vocab = stories.spec.dims["vocab"]
    chosen = [STRATEGIES[(seed + 3 * i) % (len(STRATEGIES) - 2)] for i in range(8)]
    each = [
        SamplingParams(**{"max_tokens": 20 + i, "seed": seed} | s) for i, s in enumerate(chosen)
    ]
    prompts = ids(vocab, 2, 64, 65, 63, 128, 1, 17, 30)
    plain = [stories.generate([p], params)[0] for p, params in zip(prompts, each, strict=True)]
    trees = RandomTrees(known(prompts, plain), vocab, 4)
    with speculating(stories, trees, nodes=5) as drafted:
        same(stories.generate(prompts, each), plain)
    assert drafted.accepted


def test_stop_texts_and_ends() -> None:
    tokenizer = str(GOLDENS / "tok_llama2c")
    with LLM(STORIES, **SHORT, tokenizer=tokenizer) as llm:
        texts = ("Once upon a time", "Lily and Tom", "The cat")
        prompts = [llm.encode(text) for text in texts]
        long = SamplingParams(max_tokens=200, ignore_eos=True)
        replay = ReplayDrafter(known(prompts, alone(llm, prompts, long)), 1.0, 512)
        ends = tuple(sorted(set(alone(llm, prompts, long)[0].token_ids[20:23])))
        for params in (
            SamplingParams(max_tokens=60, stop=["the", "day"], include_stop=True),
            SamplingParams(max_tokens=60, stop=["."]),
            SamplingParams(max_tokens=60, stop_token_ids=ends),
            SamplingParams(max_tokens=190),
        ):
            plain = alone(llm, prompts, params)
            with speculating(llm, replay) as drafted:
                same(llm.generate(prompts, params), plain)
            assert drafted.accepted


def test_the_context_ends_within_a_tree(stories: LLM) -> None:
    prompts = ids(512, 230, 250, 255)
    params = SamplingParams(ignore_eos=True)
    plain = alone(stories, prompts, params)
    assert [len(one.token_ids) for one in plain] == [26, 6, 1]
    for drafter in (
        ReplayDrafter(known(prompts, plain), 1.0, 512),
        RandomTrees(known(prompts, plain), 512, 15),
    ):
        with speculating(stories, drafter, nodes=16):
            same(stories.generate(prompts, params), plain)


def test_preemption() -> None:
    settings: dict[str, Any] = {"engine.kv_tokens": 320, "engine.slots": 4, "engine.context": 256}
    with LLM(STORIES, **settings) as llm:
        prompts = ids(512, 50, 60, 40, 30)
        params = SamplingParams(max_tokens=90, ignore_eos=True, temperature=1.0, seed=4)
        plain = alone(llm, prompts, params)
        before = llm.stats().preemptions
        with speculating(llm, RandomTrees(known(prompts, plain), 512, 5), nodes=6) as drafted:
            same(llm.generate(prompts, params), plain)
        assert llm.stats().preemptions > before
        assert drafted.accepted
        assert llm.stats().blocks_held == 0


def test_prefixes_are_reused_after_rejections(stories: LLM) -> None:
    (prompt,) = ids(512, 70)
    params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=1.0, seed=8)
    (plain,) = alone(stories, [prompt], params)
    with speculating(stories, RandomTrees(known([prompt], [plain]), 512, 7), nodes=8):
        same(stories.generate([prompt], params), [plain])
    longer = prompt + plain.token_ids[:90]
    (again,) = stories.generate([longer], SamplingParams(max_tokens=10, ignore_eos=True))
    assert again.usage.cached_tokens >= 128
    with LLM(STORIES, **SHORT) as fresh:
        (other,) = fresh.generate([longer], SamplingParams(max_tokens=10, ignore_eos=True))
    same([again], [other])


def steps_of(replay: ReplayDrafter, prompt: tuple[int, ...], answer: int, nodes: int) -> int:
    """Calls after the first token, if each verifies so many drafted tokens."""
    steps, place = 0, 1
    while place < answer - 1:  # the last token alone needs no draft
        right = 0
        while right < min(nodes, answer - place - 1) and replay.right(prompt, place + right):
            right += 1
        steps, place = steps + 1, place + right + 1
    return steps


@pytest.mark.parametrize(
    ("accuracy", "count"),
    [(0.8, 4), *(pytest.param(a, 10, marks=pytest.mark.soak) for a in (0.6, 0.7, 0.8, 0.9))],
)
@pytest.mark.parametrize("nodes", [pytest.param(3, marks=pytest.mark.soak), 7])
def test_tokens_per_step_follow_the_formula(
    stories: LLM, accuracy: float, count: int, nodes: int
) -> None:
    """(1 - a^(N+1)) / (1 - a), where each of N drafted tokens is right with the chance a."""
    prompts = ids(512, *range(2, 2 + count))
    params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=1.0, seed=2)
    answers = known(prompts, alone(stories, prompts, params))
    replay = ReplayDrafter(answers, accuracy, 512)
    with speculating(stories, replay, nodes=nodes + 1) as drafted:
        for prompt in prompts:
            stories.generate([prompt], params)
    expected = sum(steps_of(replay, tuple(prompt), 200, nodes) for prompt in prompts)
    assert drafted.drafts == expected
    # As many steps as tell apart two per cent.
    steps = steps_of(replay, (1,), 100_000, nodes)
    formula = (1 - accuracy ** (nodes + 1)) / (1 - accuracy)
    assert 100_000 / steps == pytest.approx(formula, rel=0.02)
