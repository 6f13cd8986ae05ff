"""What goes into which memory, and what is said where it does not fit."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jinfer import LLM
from jinfer.cli.inspect.inspect_checkpoint import main as inspect
from jinfer.loader.open_model import open_model
from jinfer.loader.weights.plan_weights import plan_weights
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.partition_table import CPU, PartitionSpec
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.speculation_table import DraftSpec
from jinfer.nn.abstract_model import AbstractModel, build_abstract_model
from jinfer.parallel.memory_budget import HOST
from jinfer.parallel.memory_plan import MemoryPlan, memory_planner
from jinfer.parallel.placement import ModelToPlace, partition_plan

GOLDENS = Path(__file__).parents[1] / "goldens"
TYPE = jnp.dtype(jnp.float32)


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

    return memory_planner(partition_plan(whole, dry_run=True), whole, free).asked()


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
