"""Mixtures of experts as GGUF files have them, against the same model in safetensors.

The files are written here as llama.cpp's converter does: experts stacked, gate and up apart, axes
of length 1 left out, rows of q and k reordered where that architecture's are.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer import LLM

from .gguf_files import write_gguf
from .llama_line import KV_HEADS, LLAMA, TOKENS
from .test_moe_families import (
    EXPERTS,
    GPT_OSS,
    GPT_OSS_SHAPES,
    GRANITE,
    GRANITE_SHAPES,
    QWEN2,
    SHARED,
    TOP_K,
    WIDTH,
    qwen2_shapes,
)
from .tiny import HEADS, INNER, random_tensors, write

type Arrays = dict[str, np.ndarray]

COMMON = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{n}_proj": f"attn_{n}" for n in "qkv"},
    "self_attn.o_proj": "attn_output",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.output_linear": "ffn_down_exps",
    "mlp.router": "ffn_gate_inp",
}


def converted(tensors: Arrays, names: dict[str, str]) -> Arrays:
    """Renamed and put together; `names` are laid over the usual ones."""
    names = LAYER | names
    out: Arrays = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        if name in COMMON:
            out[COMMON[name]] = values
            continue
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        assert found
        block, inner = f"blk.{found[1]}.", found[2]
        if one := re.fullmatch(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight", inner):
            stacks.setdefault(f"{block}ffn_{one[2]}_exps.weight", {})[int(one[1])] = values
        elif inner == "block_sparse_moe.input_linear.weight":
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                out[f"{block}ffn_{part}_exps.weight"] = half
        elif inner.startswith("mlp.experts.gate_up_proj"):
            leaf = "bias" if inner.endswith("bias") else "weight"
            rows = values.swapaxes(1, 2) if leaf == "weight" else values
            for part, first in (("gate", 0), ("up", 1)):
                out[f"{block}ffn_{part}_exps.{leaf}"] = rows[:, first::2]
        elif inner.startswith("mlp.experts.down_proj"):
            leaf = "bias" if inner.endswith("bias") else "weight"
            down = values.swapaxes(1, 2) if leaf == "weight" else values
            out[f"{block}ffn_down_exps.{leaf}"] = down
        elif inner == "self_attn.sinks":
            out[f"{block}attn_sinks.weight"] = values
        else:
            module, leaf = inner.rsplit(".", 1)
            out[f"{block}{names[module]}.{leaf}"] = values.squeeze()
    for name, experts in stacks.items():
        out[name] = np.stack([experts[e] for e in range(len(experts))])
    return out


def side_by_side(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head reordered so that the halves of a pair stand side by side."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def gguf_keys(more: dict[str, Any]) -> dict[str, Any]:
    return {
        "block_count": 2, "context_length": LLAMA["max_position_embeddings"],
        "embedding_length": LLAMA["hidden_size"], "feed_forward_length": INNER,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS,
        "vocab_size": LLAMA["vocab_size"], "rope.freq_base": LLAMA["rope_theta"],
        "attention.layer_norm_rms_epsilon": 1e-5, "expert_count": EXPERTS,
        "expert_used_count": TOP_K, **more,
    }  # fmt: skip


CASES: dict[str, tuple[Any, Any, dict[str, str], dict[str, Any]]] = {
    "qwen2moe": (
        QWEN2, qwen2_shapes([]), {},
        {"expert_feed_forward_length": WIDTH, "expert_shared_feed_forward_length": SHARED},
    ),
    "granitemoe": (
        GRANITE, GRANITE_SHAPES, {},
        {"embedding_scale": 3.0, "residual_scale": 0.4, "attention.scale": 0.2, "logit_scale": 2.0},
    ),
    "gpt-oss": (
        GPT_OSS, GPT_OSS_SHAPES, {"post_attention_layernorm": "post_attention_norm"},
        {"expert_feed_forward_length": INNER, "attention.sliding_window": GPT_OSS["sliding_window"],
         "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
         "rope.scaling.original_context_length": 16},
    ),
}  # fmt: skip


@pytest.mark.parametrize("architecture", CASES)
def test_gguf(tmp_path: Path, architecture: str) -> None:
    config, shapes, names, more = CASES[architecture]
    tensors = random_tensors(shapes, seed=11)
    write(tmp_path, config, tensors)
    file = converted(tensors, names)
    if architecture == "granitemoe":
        for name, values in file.items():
            if name.endswith(("attn_q.weight", "attn_k.weight")):
                file[name] = side_by_side(values, HEADS if "attn_q" in name else KV_HEADS)
    write_gguf(tmp_path / "model.gguf", architecture, gguf_keys(more), file)
    wanted = LLM(tmp_path / "model.safetensors", dtype="float32").logits([TOKENS.tolist()])[0]
    got = LLM(tmp_path / "model.gguf", dtype="float32").logits([TOKENS.tolist()])[0]
    assert wanted.std() > 0.1
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-4)
