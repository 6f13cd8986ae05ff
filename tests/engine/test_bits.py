"""A token's logits are the same bits in whatever chunks its prompt is computed, and alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer import LLM
from jinfer.cpu.build_library import lowered_isa
from jinfer.cpu.isa import Isa
from tests.cpu.helpers import isas
from tests.test_smollm2 import ROOT

pytestmark = pytest.mark.usefixtures("optimized")
GOLDENS = Path(__file__).parents[1] / "goldens"
SMOLLM2 = ROOT / "specs" / "smollm2_135m_instruct.toml"
IDS = np.random.default_rng(2).integers(3, 250, 90).tolist()


def logits(source: Any, keys: dict[str, Any], chunk: int) -> np.ndarray:
    settings = {"engine.prefill_chunk": chunk, "engine.mixed_chunk": 2, "engine.slots": 1, **keys}
    with LLM(source, **settings) as llm:
        return llm.logits([IDS])[0]


def same(source: Any, keys: dict[str, Any], chunks: tuple[int, ...]) -> None:
    first, *others = (logits(source, keys, chunk) for chunk in chunks)
    assert np.isfinite(first).all()
    for chunk, other in zip(chunks[1:], others, strict=True):
        differing = np.flatnonzero((first != other).any(axis=1))
        assert not len(differing), (chunk, differing[:5], np.abs(first - other).max())


@pytest.mark.parametrize(
    ("name", "kv_cache"),
    [
        *[("llama2", "q8"), ("mixtral", "f32"), ("gemma2", "q4"), ("bloom", "f16")],
        *[("falcon7b", "f32"), ("deepseek_v2", "f32"), ("deepseek_v2", "q8")],
        *[("llama4", "f32"), ("nanochat", "q8")],
        *[("nemotron_h", "f32"), ("kimi_linear", "f32")],
    ],
)
def test_structures(name: str, kv_cache: str) -> None:
    keys = {"dtype": "float32", "quantization.kv_cache": kv_cache}
    same(GOLDENS / name, keys, (90, 7, 2))


@pytest.mark.parametrize(("weights", "activations"), [("q4", "int8"), ("q3.5", "float")])
def test_quantized_weights(weights: str, activations: str) -> None:
    keys = {
        "quantization.weights": weights,
        "quantization.threshold": 0,
        "quantization.activations": activations,
    }
    same(GOLDENS / "llama2", keys, (90, 7))


@pytest.mark.parametrize("name", ["smollm2", "mixtral"])
def test_activations_in_bfloat16(name: str) -> None:
    """Which they are rounded to where the processor multiplies them so."""
    same(GOLDENS / name, {}, (90, 7, 2))


SLOW = pytest.mark.soak  # with code for any processor this model takes half a minute


@pytest.mark.parametrize(
    ("source", "name"),
    [
        *[(GOLDENS / "smollm2", name) for name in isas()],
        *[pytest.param(SMOLLM2, n, marks=[SLOW] if n == "portable" else []) for n in isas()],
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else value,
)
def test_instructions(source: Path, name: Isa) -> None:
    with lowered_isa(name):
        same(source, {}, (90, 7))
