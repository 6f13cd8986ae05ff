"""Memory plans: what each memory holds, errors where it does not fit, and automatic offload."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jinfer import LLM, SamplingParams
from jinfer.cli.inspect.inspect_checkpoint import main as inspect
from jinfer.loader.open_model import open_model
from jinfer.loader.weights.plan_weights import plan_weights
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.partition_table import CPU, PartitionSpec
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.speculation_table import DraftSpec
from jinfer.nn.abstract_model import AbstractModel, build_abstract_model
from jinfer.parallel import memory_plan
from jinfer.parallel.cost_model import HARDWARE, Hardware
from jinfer.parallel.memory_plan import (
    HOST,
    MemoryPlan,
    OffloadOption,
    memory_planner,
    offload_options,
)
from jinfer.parallel.placement import ModelToPlace, partition_plan

GOLDENS = Path(__file__).parents[1] / "goldens"
TYPE = jnp.dtype(jnp.float32)
CARD = HARDWARE["rtx4090"]


def planned(
    room: float,
    host: float = 1e9,
    tokens: int = 512,
    change: dict[str, Any] | None = None,
    **keys: Any,
) -> MemoryPlan:
    """The plan of a golden on a device with so much memory, with other tables of its settings."""
    spec, model = golden()
    engine = replace(spec.engine, kv_tokens=tokens)
    spec = replace(spec, **{"partition": PartitionSpec(**keys), "engine": engine, **(change or {})})
    whole = ModelToPlace(spec, model, 256, TYPE, TYPE)

    def free(name: str) -> float:
        return host if name in (CPU, HOST) else room

    return memory_planner(partition_plan(whole, dry_run=True), whole, free).requested()


@cache
def golden() -> tuple[ModelSpec, AbstractModel]:
    opened = open_model(GOLDENS / "llama2", {"dtype": "float32"})
    model = build_abstract_model(opened.spec, TYPE)
    found = plan_weights(model, opened.spec, opened.checkpoint, opened.activations)
    return opened.spec, found.model


def test_bytes_move_to_the_host() -> None:
    (whole,) = planned(1e9).places
    device, host = planned(1e9, host_kv_cache=0.75).places
    assert (device.cache, host.cache) == (whole.cache / 4, whole.cache * 3 / 4)
    assert device.weights == whole.weights
    device, host = planned(1e9, streamed_layers=3).places
    assert device.weights + host.streamed == whole.weights
    assert device.streamed == 2 * host.streamed / 3
    device, host = planned(1e9, host_embeddings=True).places
    assert (device.tables, host.tables) == (0, whole.tables)


def test_the_least_change_that_fits() -> None:
    (whole,) = planned(1e9).places
    room = whole.together - whole.cache / 2
    found = planned(room).problem
    assert found.startswith("device 0 would hold ")
    # Of eight blocks four, which 0.45 comes to.
    assert found.endswith("; set partition.host_kv_cache = 0.45")
    assert not planned(room, host_kv_cache=0.45).problem
    assert planned(room, host_kv_cache=0.4).problem
    room = whole.together - whole.cache - whole.weights / 5
    told = planned(room).problem
    assert told.endswith("set partition.host_kv_cache = 1.0; partition.streamed_layers = 3")
    assert not planned(room, host_kv_cache=1.0, streamed_layers=3).problem
    assert "quantize to fewer bits (quantization.weights)" in planned(1000).problem
    assert planned(1e9, host=1000, host_kv_cache=0.5).problem.startswith("host would hold")


def test_nothing_that_is_refused_is_advised() -> None:
    (whole,) = planned(1e9).places
    room = whole.together - whole.cache / 2
    spec, _ = golden()
    drafts = {"speculation": replace(spec.speculation, draft=(DraftSpec("ngram"),))}
    kept = {"engine": replace(spec.engine, kv_tokens=512, cache_ram=1.0)}
    for change in (drafts, kept):
        told = planned(room, change=change).problem
        assert told.startswith("device 0 would hold ")
        assert "host_kv_cache" not in told


@pytest.mark.parametrize(
    ("golden", "keys", "reason"),
    [
        ("llama2", {"host_kv_cache": 1.5}, "a number from 0 to 1"),
        ("llama2", {"streamed_layers": 2}, "2 saves nothing: a device keeps room for two"),
        ("llama2", {"streamed_layers": 4}, "4 are more than the 3 layers on devices"),
        ("bert", {"host_kv_cache": 0.5}, "an encoder keeps no cache"),
        ("llama2", {"host_kv_cache": 0.5, "devices": "cpu"}, "so is all of the cache"),
    ],
)
def test_refusals(golden: str, keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError, match=reason) as error:
        LLM(GOLDENS / golden, **{f"partition.{key}": value for key, value in keys.items()})
    assert "\n" not in str(error.value)
    assert f"partition.{next(iter(keys))}" in str(error.value)


def test_no_drafts_beside_a_cache_on_the_host() -> None:
    with pytest.raises(SpecError, match=r"partition\.host_kv_cache: drafts are not verified"):
        LLM(GOLDENS / "llama2", partition={"host_kv_cache": 0.5}, speculation={"draft": "ngram"})


def test_what_a_plan_of_a_card_says(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--partition", "0", "--set", "partition.host_kv_cache=0.5"]
    assert inspect([str(GOLDENS / "llama2"), *more]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^host +0 B +0 B +0 B +[\d.]+ [KM]iB ", out, re.MULTILINE)
    assert re.search(r"^room for [\d,]+ tokens in the cache, [\d,]+ of them on", out, re.MULTILINE)
    assert inspect([str(GOLDENS / "llama2"), "--partition", "0&1", *more[2:]]) == 2
    error = capsys.readouterr().err
    assert "host_kv_cache: a stage of several devices has its cache on them" in error
    assert error.count("\n") == 1


def test_it_is_printed_before_loading(capsys: pytest.CaptureFixture[str]) -> None:
    keys: dict[str, Any] = {"partition.streamed_layers": 3, "engine.kv_tokens": 256}
    LLM(GOLDENS / "llama2", progress=True, **keys).close()
    told = capsys.readouterr().err
    assert re.search(
        r"^memory +weights +tables +streamed +cache +together +of$", told, re.MULTILINE
    )


def found(room: float, count: int = 1, machine: Hardware = CARD) -> list[OffloadOption]:
    """What fits on devices with so much memory."""
    spec, model = golden()
    spec = replace(spec, engine=replace(spec.engine, kv_tokens=512))

    def free(name: str) -> float:
        return 1e9 if name in (CPU, HOST) else room

    whole = ModelToPlace(spec, model, 256, TYPE, TYPE)
    every = offload_options(whole, machine, count, free)
    for option in every:  # each does what it promises
        own = whole.with_partition(**option.keys)
        assert not memory_planner(partition_plan(own, dry_run=True), own, free).requested().problem
    return every


def kinds(every: list[OffloadOption]) -> set[tuple[str, ...]]:
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
    free = replace(CARD, latency=0.0, read=1e15, flops=1e18)
    quick = replace(free, host_link=1e15)
    slow = replace(free, host_link=1e3)
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

    monkeypatch.setattr(memory_plan, "free_memories", memories)
    monkeypatch.setattr(memory_plan, "has_own_memory", lambda devices: True)
    with LLM(GOLDENS / "llama2", progress=True, **auto) as llm:
        assert [each.token_ids for each in llm.generate(prompts, params)] == plain
    report = capsys.readouterr().err
    assert 'devices = "auto": the model alone does not fit on ' in report
    assert "ms a token, taken" in report
    assert report.index("taken") < report.index("memory ")
