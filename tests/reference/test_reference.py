"""The reference must itself be right: it is compared with what other implementations gave."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from .numpy_families import bloom, falcon7b, gpt2, phi2
from .numpy_llama import Llama, numpy_llama
from .numpy_positions import (
    Floats,
    linear_frequencies,
    llama3_frequencies,
    rope_frequencies,
    yarn_attention_factor,
    yarn_frequencies,
)
from .numpy_tensors import Tensors, read_safetensors

TOLERANCE = 2e-4  # goldens/README.md says why


def check_logits(folder: Path, logits: Callable[[Floats], Floats]) -> None:
    """Compare with all three prompts of a golden folder."""
    expected = np.load(folder / "expected.npz")
    for ids, mask, wanted in zip(
        expected["input_ids"], expected["attention_mask"], expected["logits"], strict=True
    ):
        length = mask.sum()
        assert_allclose(logits(ids[:length]), wanted[:length], rtol=0, atol=TOLERANCE)
    actual = logits(expected["long_input_ids"][0])
    assert_allclose(actual[3::4], expected["long_logits"][0], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["llama2c_v0", "llama2c_v0_tied"])
def test_llama2c(goldens: Path, name: str) -> None:
    path = goldens / name / "model.bin"
    check_logits(goldens / name, lambda tokens: numpy_llama(path, tokens))


LLAMAS: dict[str, dict[str, Any]] = {
    "llama2": {"kv_heads": 4, "inv_freq": rope_frequencies(16)},
    "llama31": {"inv_freq": llama3_frequencies(rope_frequencies(16, 5e5), 8.0, 1.0, 4.0, 64)},
    "llama_rope_linear": {"kv_heads": 4, "inv_freq": linear_frequencies(rope_frequencies(16), 4.0)},
    "mistral": {"inv_freq": rope_frequencies(16), "window": 16},
    "qwen25_yarn": {
        "inv_freq": yarn_frequencies(16, 1e6, factor=4.0, original_context=32),
        "attention_factor": yarn_attention_factor(4.0),
        "eps": 1e-6,
    },
}


@pytest.mark.parametrize("name", LLAMAS)
def test_llama_and_its_rotations(goldens: Path, name: str) -> None:
    model = Llama(**({"layers": 3, "heads": 4, "kv_heads": 2} | LLAMAS[name]))
    tensors = read_safetensors(goldens / name)
    check_logits(goldens / name, lambda tokens: model.logits(tensors, tokens))


def test_hidden_states_of_llama(goldens: Path) -> None:
    model = Llama(layers=3, heads=4, kv_heads=4, inv_freq=rope_frequencies(16))
    expected = np.load(goldens / "llama2/expected.npz")
    states = model.hidden(read_safetensors(goldens / "llama2"), expected["input_ids"][0])
    assert_allclose(states[-1:], expected["hidden_states_row0"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "forward"),
    [
        ("gpt2", lambda tensors, tokens: gpt2(tensors, tokens, 4)),
        ("bloom", lambda tensors, tokens: bloom(tensors, tokens, 6)),
        ("phi2", lambda tensors, tokens: phi2(tensors, tokens, 4, rotary_dim=8)),
        ("falcon7b", lambda tensors, tokens: falcon7b(tensors, tokens, 4)),
    ],
)
def test_other_families(
    goldens: Path, name: str, forward: Callable[[Tensors, Floats], Floats]
) -> None:
    tensors = read_safetensors(goldens / name)
    check_logits(goldens / name, lambda tokens: forward(tensors, tokens))
