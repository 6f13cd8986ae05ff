"""The cost model: properties that hold for any hardware."""

from types import SimpleNamespace
from typing import Any

import pytest

from jinfer.modelspec.partition_table import PartitionSpec
from jinfer.parallel.cost_model import (
    HARDWARE,
    ModelCost,
    best_layout,
    device_layouts,
    estimate_decode,
)
from jinfer.parallel.placement import hardware_of

A100 = HARDWARE["a100"]
# Llama-2-70B in 16 bits: 80 layers of width 8192, 8 key heads of 128.
WORK = ModelCost(
    *(138e9, 137.5e9, 68.7e9, 80, 2 * 8192, 4 * 80 * 8 * 128, 8), tables=2 * 32000 * 8192
)


def test_layouts_use_all_devices() -> None:
    assert list(device_layouts(8)) == [(8, 1), (4, 2), (2, 4), (1, 8)]
    assert list(device_layouts(3)) == [(3, 1), (1, 3)]


def test_one_device_reads_all_weights() -> None:
    seconds = (WORK.weights - WORK.tables) / A100.read
    assert estimate_decode(WORK, A100, 1, 1, context=0).step == pytest.approx(seconds, rel=0.01)


def test_pipeline_stages_raise_throughput_and_not_latency() -> None:
    one, four = (estimate_decode(WORK, A100, pipe, 1) for pipe in (1, 4))
    assert four.step >= one.step
    assert four.tokens == pytest.approx(4 * one.tokens, rel=0.05)


def test_tensor_parallelism_lowers_latency() -> None:
    one, four = (estimate_decode(WORK, A100, 1, tensor) for tensor in (1, 4))
    assert one.step / 4 < four.step < one.step


def test_offload_costs_time() -> None:
    whole = estimate_decode(WORK, A100, 1, 1).step
    for share in (
        PartitionSpec(host_embeddings=True),
        PartitionSpec(host_kv_cache=0.5),
        PartitionSpec(cpu_layers=2),
        PartitionSpec(streamed_layers=40),
    ):
        assert estimate_decode(WORK, A100, 1, 1, offload=share).step > whole


def test_a_device_has_its_share() -> None:
    whole = estimate_decode(WORK, A100, 1, 1, context=4096).device
    parts = estimate_decode(WORK, A100, 2, 4, context=4096).device
    assert parts == pytest.approx(WORK.weights / 8 + 4096 * WORK.cache / 4)
    assert parts < whole


def test_the_best_layout_fits_into_the_devices() -> None:
    found = best_layout(WORK, A100, [*device_layouts(1), *device_layouts(4)], context=4096)
    assert found is not None
    assert found.pipe * found.tensor == 4
    assert found.device <= A100.memory
    assert best_layout(WORK, A100, [(1, 1)], context=4096) is None


@pytest.mark.parametrize(
    ("kind", "name"), [("NVIDIA H100 80GB HBM3", "h100"), ("Tesla V100", "v100"), ("B300", "a100")]
)
def test_hardware_by_name(kind: str, name: str) -> None:
    stats = {"bytes_limit": 7e9, "bytes_in_use": 1e9}
    device: Any = SimpleNamespace(
        process_index=0, platform="gpu", device_kind=kind, memory_stats=lambda: stats
    )
    machine = hardware_of([device])
    assert (machine.memory, machine.read) == (6e9, HARDWARE[name].read)
