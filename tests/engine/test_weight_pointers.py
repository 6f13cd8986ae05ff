"""Layers are told where their weights are, and what they compute stays the same to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jinfer import LLM, SamplingParams
from jinfer.cpu import build_library
from jinfer.engine.runner.compiled_programs import CompiledPrograms
from jinfer.engine.runner.executable import Executable
from jinfer.engine.runner.step_key import StepKey

GOLDENS = Path(__file__).parents[1] / "goldens"
IDS = [5, 9, 2, 77, 31]
Q4: dict[str, Any] = {"quantization.weights": "q4"}
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)

pytestmark = pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")


def results(golden: str, overrides: Mapping[str, Any]) -> tuple[list[Any], int, int]:
    """What a model gives; the most arrays of it that a program reads, of how many."""
    with LLM(GOLDENS / golden, **{"engine.slots": 2, **overrides}) as llm:
        engine = llm.session.engine
        found: list[Any] = []
        if llm.spec.decoder is not None:
            found.append(llm.generate([IDS], GREEDY)[0].token_ids)
        if llm.spec.type != "encoder-decoder":
            found += llm.logits([IDS])
        made = [each.result() for each in engine.runner.programs._futures.values()]
        read = [len(each.read) for each in made if isinstance(each, Executable) and each.read]
        return found, max(read), len(engine.runner.leaves)


@pytest.mark.parametrize(
    ("golden", "overrides"),
    [
        ("llama2", {"quantization.weights": "q4"}),
        ("gemma2", {"quantization.weights": "q3.5"}),
        ("gpt2", {}),
        ("bert", {"quantization.weights": "q8"}),
        ("flan_t5", {"quantization.weights": "q4"}),
        ("gguf_mixtral", {}),
        ("deepseek_v2", {"dtype": "bfloat16"}),
    ],
)
def test_bits_and_arrays(
    golden: str, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told, few, given = results(golden, overrides)
    monkeypatch.setattr(CompiledPrograms, "pointer_layers", {})
    wanted, many, without = results(golden, overrides)
    assert few < many
    assert given > without
    for a, b in zip(told, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_layer_of_products_is_given_nothing_but_its_table() -> None:
    with LLM(GOLDENS / "llama2", **Q4) as llm:
        engine = llm.session.engine
        program = engine.runner.programs.get(StepKey("logits", 1, 1))
        count = len(jax.tree.leaves(engine.runner.parameters))
        told = engine.runner.programs.pointer_layers
        own = [i for layer in told.values() for i in range(layer.start, layer.stop)]
        assert llm.spec.decoder is not None
        assert len(told) == len(llm.spec.decoder.layers)
        assert not set(own) & set(program.read)
        assert set(range(count, len(engine.runner.leaves))) <= set(program.read)
