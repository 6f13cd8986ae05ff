"""Several processes give what one device gives."""

import json
from functools import cache
from typing import Any

import pytest

from jinfer import LLM
from tests.parallel.distributed.jobs import answered
from tests.parallel.eight.models import CALLS, GOLDENS, check_results

KEYS = {"engine.slots": 6, "engine.kv_tokens": 1024}


type Layout = tuple[str, list[int]]  # `devices` and `layers` of a plan


def case(golden: str, call: str, layout: Layout, **more: Any) -> dict[str, Any]:
    """What is asked of a model that is divided."""
    devices, layers = layout
    plan: dict[str, Any] = {"partition.devices": devices}
    if layers:
        plan["partition.layers"] = layers
    return {"golden": golden, "call": call, "keys": {**plan, **KEYS, **more}}


@cache
def alone(golden: str, call: str, weights: str) -> Any:
    """What one device gives, here."""
    keys: dict[str, Any] = {"dtype": "float32", **KEYS, "quantization.weights": weights}
    with LLM(GOLDENS / golden, **keys) as llm:
        return json.loads(json.dumps(CALLS[call](llm)))


def compare(cases: list[dict[str, Any]], processes: int, devices: int) -> None:
    """The same tokens, logits as near as they are in one process, no block left over."""
    for one, found in zip(cases, answered(cases, processes, devices=devices), strict=True):
        weights = one["keys"].get("quantization.weights", "auto")
        whole = alone(one["golden"], one["call"], weights)
        check_results(found, whole)


@pytest.mark.soak
def test_two_processes() -> None:
    """By layers: what is asked for in the first process is chosen in the second."""
    compare([case("llama2", "plain", ("0;1", [2, 1]))], 2, 1)


def test_both_ways_with_two_devices_each() -> None:
    """By layers and by tensors, each stage in both processes."""
    compare([case("llama2", "plain", ("0&2;1&3", [2, 1]))], 2, 2)


@pytest.mark.soak
def test_four_processes() -> None:
    compare([case("llama2", "plain", ("0&1;2&3", [2, 1]))], 4, 1)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("golden", "weights"),
    [
        *((golden, "auto") for golden in ("llama2", "mixtral", "falcon7b", "bloom", "bert")),
        ("deepseek_v2", "q3.5"),
        ("m2m100", "q8"),
    ],
)
def test_goldens(golden: str, weights: str) -> None:
    kept = {"quantization.weights": weights}
    two = 1 if golden in ("mixtral", "m2m100") else 2
    plans: list[Layout] = [("0;1", [two, 1]), ("1;0", [two, 1]), ("0&1", []), ("auto", [])]
    compare([case(golden, "plain", plan, **kept) for plan in plans], 2, 1)
    plans = [("0&2;1&3", [two, 1]), ("0;2;1;3", [1, 1, two - 1, 0])]
    compare([case(golden, "plain", plan, **kept) for plan in plans], 2, 2)
    compare([case(golden, "plain", ("0&1;2&3", [two, 1]), **kept)], 4, 1)


@pytest.mark.soak
@pytest.mark.parametrize("call", ["together", "strategies", "chances"])
def test_everything(call: str) -> None:
    plans: list[Layout] = [("0;1", []), ("1;0", []), ("0&1", [])]
    compare([case("llama2", call, plan) for plan in plans], 2, 1)
    plans = [("0&1;2&3", []), ("0&2;1&3", []), ("3;1;0;2", [1, 1, 1, 0])]
    compare([case("llama2", call, plan) for plan in plans], 2, 2)


@pytest.mark.soak
def test_a_small_cache_and_few_slots() -> None:
    """Sequences are preempted, and go on with what their samplers had come to."""
    few = {"engine.slots": 3, "engine.kv_tokens": 320, "engine.context": 160}
    compare([case("llama2", "together", (plan, []), **few) for plan in ("0;1", "1;0", "0&1")], 2, 1)
