"""Batch invariance: tokens and log-probabilities of a request are the same bits in any batch.

Each case is a model, its settings and its adapters. Requests are first answered alone, without a
prefix cache. Then they run together and arrive while others decode, in a pool of blocks that is too
small for them, in chunks, with beginnings in common.
"""

import json
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from jinfer import LLM
from tests.engine.adapters import write_adapter
from tests.engine.hybrid import write_hybrid
from tests.engine.test_schedules import GOLDENS, answered, check, request
from tests.families.test_rwkv7 import CONFIG, shapes
from tests.families.tiny import written
from tests.test_goldens import CAUSAL, UNSAID

type Case = Callable[[Path], None]  # given an empty folder

pytestmark = pytest.mark.usefixtures("optimized")
# More checkpoints, by their folders.
MORE = os.environ.get("JINFER_GOLDENS")
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "engine.slots": 16,
    "engine.prefill_chunk": 50,
    "engine.mixed_chunk": 17,
}
SAMPLING: list[dict[str, Any]] = [{"logprobs": 2}, {"logprobs": 2, "temperature": 0.8}]
MOST = 128  # tokens of a text and its answer
# Where keys become old, and where more do; computed while those before them decode.
LONG: dict[str, Any] = {
    "lengths": [1020, 1085, 2040, 2110],
    "dims.context": 4096,
    "engine.prefill_chunk": 512,
    "engine.mixed_chunk": 512,
}
WIDTHS = ("f32", "bf16", "f16", "q8", "q6", "q5", "q4", "q3.5", "q3", "q2")
DRAFTS: dict[str, Any] = {
    "prompts": ["ngram", "suffix"],
    "model": [{"weights": "q8"}],
    "layers": [{"skip": [1]}],
}
LORA: dict[str, dict[str, Any]] = {"lora": {}, "rslora": {"use_rslora": True}}
DORA: dict[str, dict[str, Any]] = {"dora": {"dora": True}, "lora": {}}


def causal() -> dict[str, Path]:
    """Goldens by name, and those of the folder of more."""
    found = {name: GOLDENS / name for name in CAUSAL}
    for config in sorted(Path(MORE).glob("*/config.json")) if MORE else ():
        architectures = json.loads(config.read_text()).get("architectures", [""])
        if architectures[0].endswith(("ForCausalLM", "LMHeadModel")):
            found.setdefault(config.parent.name, config.parent)
    return found


CAUSAL_FOLDERS = causal()


def invariant(source: Any, loaded: Mapping[str, Path] | None = None, **overrides: Any) -> None:
    """Compares 16 requests, with adapters or none of them.

    The first of them grow to more blocks than there are, unless `lengths` says their prompts.
    """
    rng = random.Random(Path(source).name)
    lengths = overrides.pop("lengths", None)
    room = MOST + 64 if lengths is None else sum(lengths) // 2
    keys = {**SETTINGS, "engine.kv_tokens": room, **overrides}
    plain = {name: value for name, value in keys.items() if not name.startswith("speculation.")}
    with LLM(source, **plain) as llm:
        for name, path in (loaded or {}).items():
            llm.load_adapter(name, path)
        vocab, most = llm.spec.dims["vocab"], min(MOST, llm.session.opened.context)
        common = [rng.randrange(3, vocab) for _ in range(100)]
        every = [request(rng, vocab, most, common, SAMPLING) for _ in range(16)]
        for one, length in zip(every, lengths or [62] * 4, strict=False):
            one.prompt = [rng.randrange(3, vocab) for _ in range(length)]
            answer = 30 if lengths else most - length
            one.params, one.cancel_after = replace(one.params, max_tokens=answer), None
        for one in every:
            one.adapter = rng.choice([None, *(loaded or {})])
            llm.sleep()
            llm.wake_up()
            (alone,) = llm.generate([one.prompt], one.params, adapter=one.adapter)
            one.expected = answered(alone)
        if plain == keys:
            play(llm, every, rng)
    if plain != keys:
        with LLM(source, **keys) as llm:
            play(llm, every, rng)
            assert llm.stats().draft_tokens


def play(llm: LLM, every: list[Any], rng: random.Random) -> None:
    """All at once; while others decode; and one again, whose prompt is cached."""
    for number, pauses in enumerate([(0,), (0, 0.002, 0.02)]):
        check(llm, number, [replace(one, got=[]) for one in every], rng, pauses)
    last = max(every, key=lambda one: len(one.prompt))
    for _ in range(2):
        (again,) = llm.generate([last.prompt], last.params, adapter=last.adapter)
        assert answered(again) == last.expected
    # Windows and states have blocks for all slots, whatever `kv_tokens` says.
    if set(llm.session.engine.runner.programs.sizes.blocks) == {"all"}:
        assert llm.stats().preemptions or len(last.prompt) > MOST
        assert again.usage.cached_tokens


def golden(name: str, keys: dict[str, Any] | None = None) -> Case:
    """A golden's case, with more settings."""

    def run(_: Path) -> None:
        folder = CAUSAL_FOLDERS[name]
        file = folder / "model.bin"
        own = UNSAID.get(name, {}) | ({"trust_config": "warn"} if MORE else {})
        invariant(file if file.exists() else folder, **own, **(keys or {}))

    return run


def adapted(kinds: dict[str, dict[str, Any]], **keys: Any) -> Case:
    """Adapters of these kinds in slots."""

    def run(folder: Path) -> None:
        named = enumerate(kinds.items())
        paths = {
            name: write_adapter(folder / name, 4 + 4 * n, n, **one) for n, (name, one) in named
        }
        room = {"engine.max_adapters": len(kinds), "engine.dora_adapters": "dora" in kinds}
        invariant(GOLDENS / "llama2", paths, **room, **keys)

    return run


def merged(**config: Any) -> Case:
    """An adapter that is merged into the weights."""

    def run(folder: Path) -> None:
        path = write_adapter(folder / "adapter", 4, 1, **config)
        invariant(GOLDENS / "llama2", adapters={"a": {"source": str(path), "merge": True}})

    return run


def hybrid(folder: Path) -> None:
    """All kinds of recurrences that share a matrix state, and RG-LRU, in one model."""
    invariant(write_hybrid(folder))


def rwkv7(folder: Path) -> None:
    """RWKV-7, of which there is no golden."""
    written(folder, CONFIG, shapes())
    invariant(folder)


def cases() -> dict[str, Case]:
    """By name."""
    found = {name: golden(name) for name in CAUSAL_FOLDERS}
    for name, kind in product(("llama2", "gemma2", "deepseek_v2"), WIDTHS):
        found[f"{name}, {kind} cache"] = golden(name, {"quantization.kv_cache": kind})
    for name, bits in product(("smollm2", "mixtral", "qwen3_next"), ("auto", "q4")):
        keys = {"dtype": "bfloat16", "quantization.weights": bits}
        found[f"{name}, {bits} weights"] = golden(name, keys)
    for kind in ("f16", "bf16", "q8", "f32"):  # with int8 keys, where a machine has them
        found[f"long texts, {kind} cache"] = golden(
            "llama2", {"quantization.kv_cache": kind, **LONG}
        )
    for name, (kind, drafts) in product(("llama2", "kimi_linear", "deepseek_v2"), DRAFTS.items()):
        drafting = {"speculation.draft": drafts, "speculation.nodes": 4}
        found[f"{name}, drafts of {kind}"] = golden(name, drafting)
    found |= {"hybrid": hybrid, "rwkv7": rwkv7}
    found |= {"merged lora": merged(), "merged dora": merged(dora=True)}
    for dtype in ("auto", "int8"):
        found[f"{dtype} lora"] = adapted(LORA, **{"engine.adapter_dtype": dtype})
        found[f"{dtype} dora"] = adapted(DORA, **{"engine.adapter_dtype": dtype})
    return found


CASES = cases()


@pytest.mark.parametrize("case", CASES)
def test_same_bits_in_any_batch(case: str, tmp_path: Path) -> None:
    CASES[case](tmp_path)
