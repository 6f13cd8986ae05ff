"""What "auto" has the host take over where the devices' memory does not suffice."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jinfer import LLM, SamplingParams
from jinfer.modelspec.partition_table import CPU
from jinfer.parallel import auto_plan
from jinfer.parallel.cost_model import HARDWARE, Hardware, Interconnect
from jinfer.parallel.memory_budget import HOST
from jinfer.parallel.memory_plan import memory_planner
from jinfer.parallel.placement import ModelToPlace, partition_plan
from tests.parallel.test_memory_plan import golden, planned

GOLDENS = Path(__file__).parents[1] / "goldens"
TYPE = jnp.dtype(jnp.float32)
CARD = HARDWARE["rtx4090"]


def found(room: float, count: int = 1, machine: Hardware = CARD) -> list[auto_plan.OffloadOption]:
    """What fits on devices with so much memory."""
    spec, model = golden()
    spec = replace(spec, engine=replace(spec.engine, kv_tokens=512))

    def free(name: str) -> float:
        return 1e9 if name in (CPU, HOST) else room

    whole = ModelToPlace(spec, model, 256, TYPE, TYPE)
    every = auto_plan.offload_options(whole, machine, count, free)
    for option in every:  # each does what it promises
        own = whole.with_partition(**option.keys)
        assert not memory_planner(partition_plan(own, dry_run=True), own, free).asked().problem
    return every


def kinds(every: list[auto_plan.OffloadOption]) -> set[tuple[str, ...]]:
    return {tuple(option.keys)[1:] for option in every}


def test_the_fastest_that_fits_comes_first() -> None:
    (whole,) = planned(1e9).places
    every = found(whole.together - whole.cache / 2)
    assert [option.step for option in every] == sorted(option.step for option in every)
    assert {("host_kv_cache",), ("cpu_layers",)} <= kinds(every)
    assert {option.keys["devices"] for option in every} == {"0"}
    # What lacks is less than the table of embeddings.
    assert ("host_embeddings",) in kinds(found(whole.together - whole.tables / 2))
    assert found(1000) == []


def test_links_and_memories_decide() -> None:
    """Weights are streamed where the host's link is quick; else as little as can be is sent."""
    (whole,) = planned(1e9).places
    room = whole.together - whole.tables / 2
    free = replace(CARD, call=0.0, read=1e15, flops=1e18)
    quick = replace(free, host=Interconnect(1e15, 0.0))
    slow = replace(free, host=Interconnect(1e3, 0.0))
    assert "streamed_layers" in found(room, machine=quick)[0].keys
    first = found(room, machine=slow)[0].keys
    assert {"host_embeddings", "cpu_layers"} & first.keys()  # one vector alone is sent
    assert "streamed_layers" not in first


def test_every_device_is_used_before_the_host() -> None:
    (whole,) = planned(1e9).places
    every = found(whole.together * 0.4, count=2)
    assert {option.keys["devices"] for option in every} <= {"0;1", "0&1"}
    assert every


def test_auto_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The same tokens as without, on virtual devices that are said to have so little."""
    keys: dict[str, Any] = {"dtype": "float32", "engine.kv_tokens": 512}
    auto: dict[str, Any] = {**keys, "partition.devices": "auto"}
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)
    prompts = [[3, 4, 5, 6], [7, 8, 9]]
    with LLM(GOLDENS / "llama2", **keys) as llm:
        plain = [each.token_ids for each in llm.generate(prompts, params)]
    with LLM(GOLDENS / "llama2", progress=True, **auto) as llm:
        assert [each.token_ids for each in llm.generate(prompts, params)] == plain
    assert "does not fit" not in capsys.readouterr().err
    (whole,) = planned(1e9).places
    room = whole.together - whole.cache / 2

    def memories() -> Any:
        return lambda name: 1e9 if name in (CPU, HOST) else room

    monkeypatch.setattr(auto_plan, "free_memories", memories)
    monkeypatch.setattr(auto_plan, "has_own_memory", lambda devices: True)
    with LLM(GOLDENS / "llama2", progress=True, **auto) as llm:
        assert [each.token_ids for each in llm.generate(prompts, params)] == plain
    told = capsys.readouterr().err
    assert 'devices = "auto": the model alone does not fit on ' in told
    assert "ms a token, taken" in told
    assert told.index("taken") < told.index("memory ")
