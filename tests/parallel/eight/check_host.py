"""A part of the cache, and weights, in host memory: the answers of one device."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jinfer import LLM, SamplingParams
from jinfer.loader.weights.model_size import bytes_text
from jinfer.modelspec.partition_table import PartitionSpec
from jinfer.ops.attention.kv_cache import BLOCK, ENCODER
from jinfer.parallel.device_groups import HOST_MEMORY
from jinfer.parallel.host_offload import WeightPrefetcher
from jinfer.parallel.pipeline import Pipeline
from tests.parallel.eight.models import (
    Answers,
    check_answers,
    check_requests,
    made_up,
    mixed_requests,
    nothing_held,
    opened,
)
from tools.bench_models import LlamaShape

KEYS: dict[str, Any] = {"engine.slots": 6, "engine.context": 256}
GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 7}


@contextmanager
def watched(llm: LLM) -> Iterator[list[bool]]:
    """Whether each table that was used names blocks of both places."""
    programs, used = llm.session.engine.runner.programs.pipeline, list[bool]()
    assert isinstance(programs, Pipeline)
    before = llm.session.engine.runner.block_tables

    def block_tables(rows: int, sequences: Any) -> Any:
        found = before(rows, sequences)
        for _, blocks in sequences:
            for group, own in blocks.by_group.items():
                first = programs.sizes.blocks[group] - programs.hosted.get(group, 0)
                here = [block for block in own if block >= 0]
                used.append(any(b < first for b in here) and any(b >= first for b in here))
        return found

    llm.session.engine.runner.block_tables = block_tables  # type: ignore[method-assign]
    yield used
    llm.session.engine.runner.block_tables = before  # type: ignore[method-assign]


def long_answers(llm: LLM) -> Answers:
    """Of texts of several blocks."""
    rng = np.random.default_rng(5)
    crosses = llm.session.engine.runner.model.has_cross_attention
    most = 100 if crosses else 200
    prompts = [rng.integers(4, 320, count).tolist() for count in (most, 70)]
    texts = [rng.integers(4, 320, 30).tolist() for _ in prompts]
    logits = llm.logits(prompts, encoder_ids=texts) if crosses else llm.logits(prompts)
    count = 80 if crosses else 8  # an answer alone fills blocks where the prompt is the encoder's
    found = [
        list(answer.token_ids)
        for how in (GREEDY, SEEDED)
        for answer in llm.generate(
            prompts, SamplingParams(**how, max_tokens=count, ignore_eos=True)
        )
    ]
    return Answers(logits, found)


def bytes_on_host(llm: LLM) -> float:
    """The share of the cache's bytes that are not on the first device."""
    sizes = {True: 0, False: 0}
    for leaf in jax.tree.leaves(llm.session.engine.runner.cache):
        sizes[leaf.sharding.device_set == {jax.devices()[0]}] += leaf.nbytes
    return sizes[False] / sum(sizes.values())


def same(golden: str, share: float, most: float = 1e-4, **more: Any) -> None:
    crosses = golden == "m2m100"
    context = 128 if crosses else 256
    keys = {**more, "engine.slots": 2, "engine.context": context}
    with opened(golden, **keys) as llm:
        whole = long_answers(llm)
    # Four blocks in all, so that a long sequence holds them all.
    small = {**keys, "engine.kv_tokens": context}
    with opened(golden, host_kv_cache=share, **small) as llm, watched(llm) as both:
        found = long_answers(llm)
        assert nothing_held(llm)
        if ENCODER not in llm.session.engine.runner.programs.sizes.blocks:
            assert bytes_on_host(llm) == share
    assert found.tokens == whole.tokens
    for one, other in zip(found.logits, whole.logits, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=most)
    assert any(both) == (share < 1)


SHARES = (0.25, 0.5, 1.0)
USUAL = {("deepseek_v2", 0.25)}
GOLDENS = ("llama2", "mixtral", "deepseek_v2", "falcon7b", "bloom", "m2m100")


@pytest.mark.parametrize(
    ("golden", "share"),
    [
        pytest.param(golden, share, marks=() if (golden, share) in USUAL else pytest.mark.soak)
        for golden in GOLDENS
        for share in SHARES
    ],
)
def test_a_share_of_the_cache(golden: str, share: float) -> None:
    same(golden, share)


@pytest.mark.parametrize(
    "golden",
    [
        pytest.param("gemma2", marks=pytest.mark.soak),  # soft-caps, a window in turn
        pytest.param("mistral", marks=pytest.mark.soak),  # a window
        pytest.param("gpt_oss", marks=pytest.mark.soak),  # sinks, a window in turn
        pytest.param("flan_t5", marks=pytest.mark.soak),  # relative biases
    ],
)
def test_other_attentions(golden: str) -> None:
    requests = mixed_requests(3)
    if golden == "flan_t5":
        long = SamplingParams(max_tokens=90, ignore_eos=True)
        requests = [(prompt, long) for prompt, _ in requests]
    keys: dict[str, Any] = {"engine.slots": 2, "engine.context": 192}
    check_requests(golden, requests, keys, {"host_kv_cache": 0.5, "engine.kv_tokens": 192})


@pytest.mark.parametrize(
    ("kind", "most"), [("q8", 1e-3), pytest.param("q3.5", 0.05, marks=pytest.mark.soak)]
)
def test_quantized_caches(kind: str, most: float) -> None:
    """A sum's last bit may turn a code of the next layer into its neighbour."""
    same("llama2", 0.5, most, **{"quantization.kv_cache": kind})


# With few blocks sequences are preempted and begin again.
@pytest.mark.soak
@pytest.mark.parametrize("blocks", [5, 16])
def test_eight_at_a_time_and_again(blocks: int) -> None:
    keys = {**KEYS, "engine.context": 160, "engine.prefill_chunk": 64, "engine.kv_tokens": 2048}
    plan = {"host_kv_cache": 0.5, "engine.kv_tokens": blocks * BLOCK}
    check_requests("llama2", mixed_requests(8), keys, plan, times=2)


@pytest.mark.soak
@pytest.mark.parametrize("searched", [False, True])
def test_a_common_beginning(searched: bool) -> None:
    """Held by several, and copied in part from one place to the other."""
    rng = np.random.default_rng(6)
    common = rng.integers(3, 320, 150).tolist()
    prompts = [common + rng.integers(3, 320, n).tolist() for n in (9, 20, 33)]
    params = SamplingParams(**GREEDY, max_tokens=6, ignore_eos=True)
    beams = SamplingParams(strategy="beam", beams=3, max_tokens=6, ignore_eos=True)
    keys: dict[str, Any] = {"engine.slots": 3, "engine.kv_tokens": 1024, "engine.prefill_chunk": 64}

    def three(llm: LLM) -> list[list[int]]:
        found = [list(llm.generate([prompt], params)[0].token_ids) for prompt in prompts]
        found += [list(each.token_ids) for each in llm.generate(prompts, params)]
        if searched:
            found += [list(each.token_ids) for each in llm.generate(prompts[:1], beams)]
        return found

    with opened("llama2", **keys) as llm:
        wanted = three(llm)
    # Of 16 blocks most are on the host.
    with opened("llama2", host_kv_cache=0.9, **keys) as llm, watched(llm) as both:
        assert three(llm) == wanted
        assert any(both)
        assert nothing_held(llm)


def on_device(memory: str) -> int:
    """Bytes of arrays of the first device in a memory of its own or of the host."""
    return sum(
        array.nbytes
        for array in jax.live_arrays()
        if array.sharding.device_set == {jax.devices()[0]}
        and (array.sharding.memory_kind == HOST_MEMORY) == (memory == "host")
    )


def test_streamed_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit the same, and of their weights the device has two layers' at most."""
    model = made_up(tmp_path, LlamaShape(10, 256, 4, 2, 3072, context=256))
    keys: dict[str, Any] = {
        "dtype": "float32",
        "engine.slots": 1,
        "engine.kv_tokens": 256,
        "engine.prefill_chunk": 16,
        "engine.mixed_chunk": 16,
    }
    prompts = [list(range(5, 40))]

    params = SamplingParams(**GREEDY, max_tokens=6, ignore_eos=True)
    with LLM(model, **keys) as llm:
        (answer,) = llm.generate(prompts, params)
        logits = llm.logits(prompts)
        leaves = llm.session.engine.runner.weights
        whole = sum(leaf.nbytes for leaf in leaves)
    del leaves
    seen: list[int] = []
    brought = WeightPrefetcher.take

    def take(stream: WeightPrefetcher, number: int, leaves: Any) -> Any:
        own = brought(stream, number, leaves)
        seen.append(on_device("device"))
        return own

    monkeypatch.setattr(WeightPrefetcher, "take", take)
    plan: dict[str, Any] = {"partition.devices": "0", "partition.streamed_layers": 8}
    with LLM(model, **keys, **plan) as llm:
        programs: Any = llm.session.engine.runner.programs.pipeline
        before = on_device("device")
        (again,) = llm.generate(prompts, params)
        most, engine = max(seen), llm.session.engine
        kept = sum(
            leaf.nbytes for leaf in jax.tree.leaves((engine.runner.cache, engine.runner.state))
        )
        others = llm.logits(prompts)
        streamed = [
            sum(leaf.nbytes for leaf in llm.session.engine.runner.leaves[stage.leaves])
            for stage in programs.stages
            if stage.streamed
        ]
        assert on_device("host") == sum(streamed)
        said = re.search(r"^host +0 B +0 B +(.+?)  ", programs.memory, re.MULTILINE)
    assert again.token_ids == answer.token_ids
    for one, other in zip(others, logits, strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(streamed) == 8
    rest = whole - sum(streamed)
    assert rest <= before
    # Beside what stays there two layers, and vectors of less than half a one.
    assert 2 <= (most - kept - rest) / max(streamed) < 2.5
    assert said is not None
    assert said[1] == bytes_text(sum(streamed))


@pytest.mark.soak
@pytest.mark.parametrize("golden", ["llama2", "deepseek_v2", "falcon7b", "bloom", "bert"])
@pytest.mark.parametrize("devices", ["0", "0&1"])
@pytest.mark.parametrize("weights", ["auto", "q3.5"])
def test_streamed_goldens(golden: str, devices: str, weights: str) -> None:
    limit = 0 if devices == "0" else 1e-4
    check_answers(golden, limit, weights, devices=devices, streamed_layers=3)


@pytest.mark.soak
def test_streamed_layers_beside_an_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their weights also give what the cache keeps of an encoder's output."""
    # The goldens that translate have two layers, of which nobody would stream both.
    monkeypatch.setattr(PartitionSpec, "check", lambda _: None)
    check_answers("m2m100", devices="0", streamed_layers=2, host_kv_cache=1.0)


@pytest.mark.soak
@pytest.mark.parametrize(
    "plan",
    [
        {"devices": "0;1", "host_kv_cache": 0.5},
        {"devices": "0;1", "host_kv_cache": 0.5, "streamed_layers": 3},
        {"devices": "0", "host_kv_cache": 0.5, "streamed_layers": 3, "host_embeddings": True},
        {"devices": "0", "host_kv_cache": 0.5, "cpu_layers": 1},
    ],
)
def test_all_together(plan: dict[str, Any]) -> None:
    keys = {**KEYS, "engine.context": 160, "engine.kv_tokens": 640}
    check_requests("llama2", mixed_requests(8), keys, plan)
