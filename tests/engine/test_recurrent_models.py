"""Models with recurrent blocks in the engine: in company, in pieces, from snapshots."""

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jinfer import LLM, SamplingParams
from jinfer.loader.weights.model_size import bytes_text
from jinfer.modelspec.spec_errors import SpecError

from .hybrid import MANY, check_company, write_hybrid
from .test_schedules import ALL, schedules

LONG: dict[str, Any] = {"engine.context": 512, "dims.context": 512}
GOLDENS = Path(__file__).parents[1] / "goldens"
# A state space, a delta rule, a short convolution, both in one layer with attention, RWKV.
OF_EACH_KIND = ("lfm2", "mamba2", "qwen3_5", "falcon_h1", "rwkv4")
HYBRIDS = ("lfm2", "nemotron_h", "qwen3_5", "kimi_linear", "recurrent_gemma", "minimax")
_RNG = np.random.default_rng(7)


def tokens(count: int) -> list[int]:
    return _RNG.integers(3, 250, count).tolist()


def open_model(name: str, **overrides: Any) -> LLM:
    return LLM(GOLDENS / name, **{"dtype": "float32", **overrides})


def reused(llm: LLM, prompt: list[int], **params: Any) -> tuple[Any, int]:
    """An answer, and how many tokens of the prompt were cached."""
    before = llm.stats().cached_tokens
    params = {"max_tokens": 4, "ignore_eos": True, "logprobs": 1} | params
    return llm.generate([prompt], **params)[0], llm.stats().cached_tokens - before


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_the_second_prompt_reuses_whole_blocks(name: str) -> None:
    """Of the same prompt, and of a common beginning; the bits are those without reuse."""
    with open_model(name, **LONG) as llm:
        for length, expected in ((64, 0), (67, 64), (200, 192)):
            prompt = tokens(length)
            (first, none), *others = (reused(llm, prompt) for _ in range(3))
            assert none == 0
            for answer, count in others:
                assert count == expected
                assert answer.token_ids == first.token_ids
                assert answer.logprobs == first.logprobs
        for length in (64, 96, 200, 400):
            common = tokens(length)
            counts = [reused(llm, common + tokens(30))[1] for _ in range(3)]
            assert counts == [0, length // 64 * 64, length // 64 * 64]
        assert llm.stats().blocks_held == 0


@pytest.mark.parametrize("ends", [{}, {"ignore_eos": False, "stop_token_ids": [*range(100, 115)]}])
def test_a_conversation_is_reused_whole(ends: dict[str, Any]) -> None:
    """Answers that reach their limit, and such that end while the next call is in flight."""
    with open_model("qwen3_5", **LONG) as llm:
        said, counts, lengths = tokens(80), [], []
        for _ in range(4):
            answer, count = reused(llm, said, max_tokens=60, **ends)
            counts.append(count)
            said = [*said, *answer.token_ids]
            lengths.append(len(said) - 1)  # the last token is not computed
            said += tokens(15)
        assert counts == [0, *lengths[:-1]]
        assert answer.finish_reason == ("stop" if ends else "length")
        again, count = reused(llm, said[:-15][: -len(answer.token_ids)], max_tokens=60, **ends)
        assert count > 0
        assert again.token_ids == answer.token_ids


@pytest.mark.soak
@pytest.mark.parametrize("name", HYBRIDS)
def test_many_random_schedules(name: str) -> None:
    schedules(GOLDENS / name, 256, 3, 5, ALL, dtype="float32")


@pytest.mark.parametrize("weights", ["f32", "q4"])
def test_a_common_prompt_is_computed_once(weights: str) -> None:
    common = tokens(150)
    prompts = [common + tokens(20) for _ in range(8)]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    bits: dict[str, Any] = {} if weights == "f32" else {"quantization.weights": weights}
    alone = []
    for prompt in prompts[:3]:
        with open_model("qwen3_5", **bits) as llm:
            alone.append(llm.generate([prompt], params)[0].token_ids)
    with open_model("qwen3_5", **{"engine.slots": 8}, **bits) as llm:
        together = [answer.token_ids for answer in llm.generate(prompts, params)]
        stats = llm.stats()
    assert together[:3] == alone
    computed = sum(map(len, prompts)) - stats.cached_tokens
    assert computed <= len(common) + 64 + 8 * 20
    assert stats.blocks_held == 0


@pytest.mark.parametrize("weights", ["f32", "q4"])
def test_a_hybrid_that_nobody_ships(tmp_path: Path, weights: str) -> None:
    bits: dict[str, Any] = {} if weights == "f32" else {"quantization.weights": weights}
    spec = write_hybrid(tmp_path)
    with LLM(spec, **bits) as one, LLM(spec, **bits, **MANY) as many:
        check_company(one, many)


def test_memory_of_states() -> None:
    """Blocks for twice the slots, and for snapshots."""
    keys: dict[str, Any] = {
        "engine.slots": 5,
        "engine.state_snapshots": 3,
        "partition.devices": "0",
    }
    with open_model("mamba2", **keys) as llm:
        programs: Any = llm.session.engine.runner.programs
        assert programs.sizes.blocks == {"state": 13}
        shapes: Any = llm.session.engine.runner.model.caches.values()
        bytes_ = 4 * sum(math.prod(each) for shape in shapes for _, each in shape.arrays)
        assert f"room for 13 recurrent states of {bytes_text(bytes_)}" in programs.pipeline.memory
        llm.generate([tokens(40)], max_tokens=2)
        cache = jax.tree.leaves(llm.session.engine.runner.cache)
        assert sum(array.nbytes for array in cache) == 13 * bytes_


def test_gptq_gives_way_to_mse() -> None:
    """It runs single layers, without an engine's states."""
    overrides = {"quantization.weights": "q4", "quantization.method": "gptq"}
    with open_model("lfm2", **overrides) as llm:
        answer = llm.generate([[3, 4, 5]], max_tokens=3, ignore_eos=True)[0].token_ids
    with open_model("lfm2", **(overrides | {"quantization.method": "mse"})) as llm:
        assert llm.generate([[3, 4, 5]], max_tokens=3, ignore_eos=True)[0].token_ids == answer


# Attention and a state space in one layer, or in layers of their own.
@pytest.mark.parametrize("name", ["falcon_h1", pytest.param("lfm2", marks=pytest.mark.soak)])
def test_keys_on_the_host(name: str) -> None:
    """States stay on the device; a common beginning is found, and sequences are preempted."""
    common = tokens(112)
    prompts = [common + tokens(5 + i) for i in range(6)]
    params = SamplingParams(max_tokens=80, ignore_eos=True, temperature=0.7, seed=3)
    keys: dict[str, Any] = {"engine.slots": 6, "engine.prefill_chunk": 64}
    with open_model(name, **keys) as llm:
        wanted = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
    keys |= {"engine.kv_tokens": 512, "partition.host_kv_cache": 0.5}
    with open_model(name, **keys) as llm:
        assert [answer.token_ids for answer in llm.generate(prompts, params)] == wanted
        stats = llm.stats()
    assert stats.preemptions
    assert stats.cached_tokens >= 5 * 64
    assert stats.blocks_held == 0


def test_states_alone_are_refused_on_the_host() -> None:
    with pytest.raises(SpecError, match=r"partition\.host_kv_cache: no layer has keys"):
        open_model("mamba2", **{"partition.host_kv_cache": 0.5})


@pytest.mark.parametrize("name", ["lfm2", pytest.param("mamba2", marks=pytest.mark.soak)])
def test_a_draft_with_a_state(name: str) -> None:
    """A copy of the model is right, chains and what is computed in their place begin anew."""
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.7, seed=3)
    prompts = [tokens(40), tokens(9), tokens(70)]
    with open_model(name) as llm:
        alone = [answer.token_ids for answer in llm.generate(prompts, params)]
    keys = {"speculation.draft": [{"weights": "q8"}], "speculation.nodes": 6, "engine.slots": 2}
    with open_model(name, **keys, **{"speculation.expansion": [2, 1, 1]}) as llm:
        assert [answer.token_ids for answer in llm.generate(prompts, params)] == alone
        stats = llm.stats()
    assert stats.accepted_tokens > 0.6 * stats.draft_tokens
