"""Checkpoints that other packages quantized and wrote: see make_quantized.py.

Llama's are computed by the NumPy forward pass, which compiles nothing.
"""

from pathlib import Path

import numpy as np
import pytest

from jinfer import LLM
from jinfer.loader.open_model import open_model
from tests.reference.numpy_llama import Llama
from tests.reference.numpy_positions import rope_frequencies

QUANTIZED = Path(__file__).parent / "quantized"
COMPILED = ("gptqmodel_4_desc_act", "gptqmodel_mixtral", "llmcompressor_mixtral", "mlx_mixtral")
REST = sorted({path.name for path in QUANTIZED.iterdir()} - {*COMPILED})


def expected(name: str) -> tuple[list[list[int]], np.ndarray]:
    """The tokens, and logits that have to come out."""
    with np.load(QUANTIZED / name / "expected.npz") as arrays:
        assert arrays["logits"].std() > 0.3
        return arrays["input_ids"].tolist(), arrays["logits"]


@pytest.mark.parametrize("name", REST)
def test_weights(name: str) -> None:
    (ids,), target = expected(name)
    stored = open_model(QUANTIZED / name, {}).checkpoint.tensors.items()
    tensors = {each: tensor.read().astype(np.float64) for each, tensor in stored}
    kv_heads = len(tensors["model.layers.0.self_attn.k_proj.weight"]) // 16
    model = Llama(1, 4, kv_heads, rope_frequencies(16), eps=1e-6)
    np.testing.assert_allclose(model.logits(tensors, ids), target, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", [*COMPILED, "mlx_mxfp8", "llmcompressor_fp8_dynamic"])
def test_models(name: str) -> None:
    """Sorted inputs, experts by the names that they have there, and FP8 in blocks and rows."""
    ids, target = expected(name)
    with LLM(QUANTIZED / name, dtype="float32") as llm:
        np.testing.assert_allclose(llm.logits(ids)[0], target, rtol=0, atol=2e-4)
