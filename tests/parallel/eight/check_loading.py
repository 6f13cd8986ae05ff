"""Weights of several formats: GGUF's blocks, converted folders, fused matrices."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jinfer.cli.inspect.inspect_partition import view
from jinfer.cli.quantize.quantize_checkpoint import main as convert
from jinfer.engine.requests import EngineError
from tests.parallel.eight.models import (
    GOLDENS,
    check_answers,
    check_results,
    opened,
    plain,
    prompts,
)
from tests.test_goldens import CAUSAL

# Norms of all heads together, heads of experts, and sparsity over a whole width.
UNDIVIDED = {"gemma3n", "jetmoe", "olmo2", "olmo3"}
QUANTIZED = {"dtype": "float32", "quantization": {"weights": "q8"}}


@pytest.mark.parametrize(
    ("golden", "devices"),
    [
        ("gguf_llama_mixed", "0&1"),  # blocks of several formats
        pytest.param("gguf_mixtral", "0&1;2&3", marks=pytest.mark.soak),
        pytest.param(
            "baichuan2_7b", "0&1", marks=pytest.mark.soak
        ),  # a head whose rows have length 1
        pytest.param("chatglm2", "0&1", marks=pytest.mark.soak),  # fused projections
        pytest.param("gpt2", "0&1&2&3", marks=pytest.mark.soak),  # transposed ones, with biases
        ("flan_t5", "0&1"),  # relative biases of heads
        pytest.param("flan_t5", "0&1;2&3", marks=pytest.mark.soak),
        pytest.param("gpt_oss", "0&1", marks=pytest.mark.soak),  # sinks, and biases of experts
        pytest.param("gemma2", "0;1", marks=pytest.mark.soak),
        pytest.param("qwen3", "0&1", marks=pytest.mark.soak),  # norms of heads
    ],
)
def test_families(golden: str, devices: str) -> None:
    check_answers(golden, devices=devices)


@pytest.mark.soak
@pytest.mark.parametrize("golden", sorted(CAUSAL.keys() - UNDIVIDED))
def test_every_decoder(golden: str) -> None:
    with opened(golden) as llm:
        prompt = prompts(llm)[1]
        (whole,) = llm.logits([prompt])
    with opened(golden, devices="0&1") as llm:
        np.testing.assert_allclose(llm.logits([prompt])[0], whole, rtol=0, atol=1e-4)


def test_a_converted_folder(tmp_path: Path) -> None:
    folder = tmp_path / "converted"
    arguments = [str(GOLDENS / "llama2"), str(folder), "--set", "quantization.weights=q4"]
    assert convert(arguments) == 0
    with opened("llama2", **{"quantization.weights": "q4"}) as llm:
        whole = plain(llm)
    with opened(str(folder), devices="0&1;2&3") as llm:
        check_results(plain(llm), whole)


def test_each_device_has_its_own_part() -> None:
    """Devices hold as much as the plan says, and together hardly more than the whole."""
    with opened("llama2", **{"quantization.weights": "q8"}) as llm:
        whole = sum(leaf.nbytes for leaf in llm.session.engine.runner.leaves)
    with opened("llama2", devices="0&1;2&3", **{"quantization.weights": "q8"}) as llm:
        held: dict[jax.Device, int] = {}
        for leaf in llm.session.engine.runner.leaves:
            for shard in leaf.addressable_shards:
                held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    plan = view(str(GOLDENS / "llama2"), QUANTIZED, "0&1;2&3", "a100")
    planned = [stage.weights for stage in plan.stages for _ in stage.devices]
    assert [held[device] for device in jax.devices()[:4]] == planned
    assert len(held) == 4
    # Norms are on both devices of a stage, and feed-forwards of 112 columns end in padding.
    assert whole <= sum(held.values()) <= 1.2 * whole


def test_no_tool_takes_parts_for_the_whole() -> None:
    with opened("llama2", devices="0&1") as llm, pytest.raises(EngineError, match="in parts on"):
        _ = llm.session.engine.runner.parameters
