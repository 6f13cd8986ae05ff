"""Drafts for a model on several devices: the tokens of plain decoding, whoever drafts where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest

from jinfer import LLM, SamplingParams
from jinfer.modelspec.spec_errors import SpecError
from jinfer.speculate.draft_model import DraftModel
from jinfer.speculate.prompt_lookup import PromptLookup
from jinfer.speculate.speculative_decoding import SpeculativeDecoder
from tests.families.tiny import close
from tests.parallel.eight.models import FEW, GOLDENS, opened
from tests.speculate.drafts import RandomTrees, alone, ids, known, same, speculating
from tests.speculate.heads import CASES
from tests.speculate.test_heads import head_of, kept_by

# Stages x devices; the golden has three layers, so that one stage of four has none.
SPLITS: dict[str, dict[str, Any]] = {
    "1x1": {"devices": "1"},
    "2x1": {"devices": "0;1", "layers": [2, 1]},
    "4x1": {"devices": "0;1;2;3", "layers": [1, 1, 0, 1]},
    "2x2": {"devices": "0&1;2&3", "layers": [2, 1]},
}
KEYS: dict[str, Any] = {"engine.slots": 5, "engine.context": 256}
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2, temperature=0)
DRAWN = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2, temperature=1.0, seed=4)


def placed(llm: LLM) -> list[set[jax.Device]]:
    """The devices of each draft model's weights."""
    speculation = llm.session.engine.speculator
    assert isinstance(speculation, SpeculativeDecoder)
    models = [one for one in speculation.drafters if isinstance(one, DraftModel)]
    return [{device for leaf in one.runner.leaves for device in leaf.devices()} for one in models]


@pytest.mark.parametrize(
    ("split", "params"),
    [
        ("2x2", DRAWN),
        *(pytest.param(split, GREEDY, marks=pytest.mark.soak) for split in SPLITS),
        *(pytest.param(split, DRAWN, marks=pytest.mark.soak) for split in ("1x1", "2x1", "4x1")),
    ],
)
def test_trees(split: str, params: SamplingParams) -> None:
    """Random ones with branches, alone and several at a time: in each lane its own."""
    with opened("llama2", **SPLITS[split], **KEYS) as llm:
        prompts = ids(320, 9, 60, 5, 33, 70)
        plain = alone(llm, prompts, params)
        trees = RandomTrees(known(prompts, plain), 320, 5, 5)
        with speculating(llm, trees, nodes=6) as drafted:
            same(alone(llm, prompts[:1], params), plain[:1])
            same(llm.generate(prompts, params), plain)
        assert drafted.accepted > 20
        assert llm.session.engine.scheduler.blocks.used == 0


@pytest.mark.soak
@pytest.mark.parametrize(
    ("split", "golden"),
    [
        (split, golden)
        for split in ("2x1", "1x1", "2x2")
        for golden in ("bloom", "deepseek_v2", "mixtral")
    ],
)
def test_other_models(split: str, golden: str) -> None:
    """Each lane has a sequence, which often is the only one that has tokens left."""
    with opened(golden, devices=SPLITS[split]["devices"], **KEYS) as llm:
        vocab = llm.spec.dims["vocab"]
        prompts = ids(vocab, 9, 60)
        plain = alone(llm, prompts, DRAWN)
        trees = RandomTrees(known(prompts, plain), vocab, 5, 5)
        for drafter in (trees, trees, trees, PromptLookup(branches=2)):
            with speculating(llm, drafter, nodes=6):
                same(llm.generate(prompts, DRAWN), plain)


@pytest.mark.parametrize(
    ("split", "device"),
    [
        ("2x1", None),
        pytest.param("2x2", 5, marks=pytest.mark.soak),
        pytest.param("4x1", 2, marks=pytest.mark.soak),
    ],
)
def test_a_draft_model_is_whole_on_a_device(split: str, device: int | None) -> None:
    """Its own, one of a stage's, or the last stage's where nobody says."""
    draft = {"weights": "q6"} if device is None else {"weights": "q6", "device": device}
    keys = {**KEYS, "quantization.threshold": 0, "speculation.nodes": 4}
    prompts = ids(320, 9, 60)
    with opened("llama2", **SPLITS[split], **keys) as llm:
        plain = {params: alone(llm, prompts, params) for params in (GREEDY, DRAWN)}
    keys["speculation.draft"] = [draft]
    with opened("llama2", **SPLITS[split], **keys) as llm:
        assert placed(llm) == [{jax.devices()[1 if device is None else device]}]
        for params, answers in plain.items():
            same(llm.generate(prompts, params), answers)
        stats = llm.stats()
        assert stats.accepted_tokens > 20
        assert stats.blocks_held == 0


def test_a_draft_model_beside_one_that_is_not_divided() -> None:
    draft = {"source": str(GOLDENS / "llama2"), "device": 3}
    prompts = ids(320, 9)
    keys: dict[str, Any] = {**KEYS, "engine.slots": 1, "speculation.nodes": 4}
    with opened("llama2", **keys) as llm:
        plain = alone(llm, prompts, DRAWN)
    with opened("llama2", **keys, **{"speculation.draft": [draft]}) as llm:
        assert placed(llm) == [{jax.devices()[3]}]
        same(llm.generate(prompts, DRAWN), plain)
        assert llm.stats().accepted_tokens > 8


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("eagle", "0;1"),
        pytest.param("eagle", "0&1;2&3", marks=pytest.mark.soak),
        *(
            pytest.param(name, devices, marks=pytest.mark.soak)
            for name in ("mimo", "deepseek")
            for devices in ("0;1", "0&1;2&3")
        ),
    ],
)
def test_heads(name: str, devices: str, tmp_path: Path) -> None:
    """What layers of several stages give comes to the head's device."""
    case = CASES[name](tmp_path)
    keys = {**KEYS, **FEW, "engine.slots": 2, "engine.context": 128, "dtype": "float32"}
    keys["partition.devices"] = devices
    prompts = ids(96, 9, 66)
    with LLM(case.source, **keys) as llm:
        plain = alone(llm, prompts, DRAWN)
    keys |= {"speculation.draft": case.draft, "speculation.nodes": 4}
    with LLM(case.source, **keys) as llm:
        same(llm.generate(prompts, DRAWN), plain)
        assert llm.stats().draft_tokens > 20
        close(kept_by(llm, head_of(llm)), case.vectors)
        assert placed(llm) == [{jax.devices()[2 if "&" in devices else 1]}]


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ({"weights": "q4", "device": 9}, "device 9 is not there: there are 8, from 0 on"),
        ({"skip": [1]}, "skip shares the weights of a model that is whole"),
        ({"skip": [1], "device": 2}, "is of a model with weights of its own; leave it out"),
        ({"source": "ngram", "device": 2}, "is of a model with weights of its own; leave it out"),
    ],
    ids=str,
)
def test_what_is_refused(draft: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as error:
        opened("llama2", devices="0;1", **{"speculation.draft": [draft]})
    assert message in str(error.value)
    assert "\n" not in str(error.value)
