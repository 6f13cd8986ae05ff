"""DeepSeek-V3 as GGUF files have it, against the same model in safetensors.

Older converters leave what unfolds the latent whole; newer ones write keys and values apart, a
matrix a head, the keys' transposed, and sizes under names of their own.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer import LLM

from .gguf_files import write_gguf
from .llama_line import TOKENS
from .test_moe_families import EPS, WIDTH
from .test_moe_gguf import converted, gguf_keys
from .test_scaled_families import (
    FACTOR,
    GROUPS,
    KEPT,
    KV_RANK,
    LATENT,
    NOPE,
    Q_RANK,
    ROPE,
    SCALE,
    TRAINED,
    VALUE,
    latent_shapes,
)
from .tiny import HEADS, random_tensors, write

NAMES = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
KEYS: dict[str, Any] = {
    "context_length": 128, "rope.freq_base": 5000.0, "attention.layer_norm_rms_epsilon": EPS,
    "attention.q_lora_rank": Q_RANK, "attention.kv_lora_rank": KV_RANK,
    "rope.dimension_count": ROPE, "expert_feed_forward_length": WIDTH, "expert_shared_count": 2,
    "leading_dense_block_count": 1, "expert_group_count": GROUPS, "expert_group_used_count": KEPT,
    "expert_weights_scale": SCALE, "expert_weights_norm": True, "expert_gating_func": 2,
    "rope.scaling.type": "yarn", "rope.scaling.factor": FACTOR,
    "rope.scaling.original_context_length": TRAINED, "rope.scaling.yarn_log_multiplier": 0.1,
}  # fmt: skip
WHOLE = {"attention.key_length": NOPE + ROPE, "attention.value_length": VALUE}
APART = {
    "attention.key_length": KV_RANK + ROPE, "attention.value_length": KV_RANK,
    "attention.key_length_mla": NOPE + ROPE, "attention.value_length_mla": VALUE,
    "attention.head_count_kv": 1,
}  # fmt: skip


@pytest.mark.parametrize("apart", [False, True])
def test_deepseek_v3(tmp_path: Path, apart: bool) -> None:
    tensors = random_tensors(latent_shapes(), seed=11)
    write(tmp_path, LATENT, tensors)
    correction = "model.layers.1.mlp.gate.e_score_correction_bias"
    file = converted({n: v for n, v in tensors.items() if n != correction}, NAMES)
    file["blk.1.exp_probs_b.bias"] = tensors[correction]
    for i in range(2) if apart else ():
        both = file.pop(f"blk.{i}.attn_kv_b.weight").reshape(HEADS, NOPE + VALUE, KV_RANK)
        file[f"blk.{i}.attn_k_b.weight"] = both[:, :NOPE].swapaxes(1, 2)
        file[f"blk.{i}.attn_v_b.weight"] = both[:, NOPE:]
    keys = gguf_keys(KEYS | (APART if apart else WHOLE))
    write_gguf(tmp_path / "model.gguf", "deepseek2", keys, file)
    wanted = LLM(tmp_path / "model.safetensors", dtype="float32").logits([TOKENS.tolist()])[0]
    got = LLM(tmp_path / "model.gguf", dtype="float32").logits([TOKENS.tolist()])[0]
    assert wanted.std() > 0.1
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-4)
