"""Quantized checkpoints in whole models: logits are those of the dequantized weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jinfer import LLM
from tests.checkpoint.quantized_cases import CASES, Case
from tests.checkpoint.quantized_writers import Arrays

VOCAB, HIDDEN, INNER, KV = 96, 128, 256, 64
TOKENS = np.random.default_rng(5).integers(0, VOCAB, 40).tolist()
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB,
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rope_theta": 5000.0, "tie_word_embeddings": False,
}  # fmt: skip
PROJECTIONS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip
TABLES = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN)}


def plain(rng: np.random.Generator) -> Arrays:
    """What most writers leave as it is."""
    norms = [f"model.layers.{i}.{n}_layernorm" for i in (0, 1) for n in ("input", "post_attention")]
    arrays = {f"{name}.weight": rng.normal(0, 0.1, shape) for name, shape in TABLES.items()}
    arrays |= {f"{n}.weight": rng.normal(1, 0.1, HIDDEN) for n in [*norms, "model.norm"]}
    return {name: values.astype(np.float32) for name, values in arrays.items()}


def written(folder: Path, case: Case, tables: bool, kept: str = "") -> Path:
    """Writes a model's quantized checkpoint, and the dequantized one beside it.

    Args:
        tables: embedding and head are quantized too.
        kept: the modules that are not.
    """
    rng = np.random.default_rng(3)
    arrays = plain(rng)
    whole = dict(arrays)
    shapes = {f"model.layers.{i}.{p}": s for i in (0, 1) for p, s in PROJECTIONS.items()}
    for name, shape in (shapes | (TABLES if tables else {})).items():
        leaves, weights = case.write(rng, *shape)
        whole[f"{name}.weight"] = weights.astype(np.float32)
        arrays.pop(f"{name}.weight", None)
        if kept and kept in name:
            leaves = {"weight": whole[f"{name}.weight"]}
        arrays |= {f"{name}.{leaf}": np.ascontiguousarray(a) for leaf, a in leaves.items()}
    for place, tensors, said in (("q", arrays, {case.key: case.config}), ("plain", whole, {})):
        (folder / place).mkdir()
        save_file(tensors, folder / place / "model.safetensors")
        (folder / place / "config.json").write_text(json.dumps(CONFIG | said))
    return folder / "q"


def logits(source: Path) -> np.ndarray:
    return LLM(source, dtype="float32").logits([TOKENS])[0]


@pytest.mark.parametrize(
    ("name", "tables", "kept"),
    [
        ("gptq_128", False, "down_proj"),
        ("gptq", False, ""),
        ("gptq_reordered", False, ""),
        ("awq_128", False, "k_proj"),
        ("pack_sym", False, ""),
        ("int8", False, ""),
        ("fp8_tensor", False, ""),
        ("nf4_nested", False, ""),
        ("mlx_4", True, ""),
        ("modelopt_nvfp4", False, ""),
    ],
)
def test_logits_are_those_of_the_dequantized_model(
    tmp_path: Path, name: str, tables: bool, kept: str
) -> None:
    source = written(tmp_path, CASES[name], tables, kept)
    got, wanted = logits(source), logits(tmp_path / "plain")
    assert wanted.std() > 0.1
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-4)
