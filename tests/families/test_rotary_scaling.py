"""Families whose positions are scaled, of which there is no golden, against passes in NumPy.

Each test writes a tiny checkpoint with the tensor names and the config.json of a published one, and
computes its logits from the reference blocks, as the family's code or paper says.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.reference.numpy_blocks import (
    attention,
    rms_norm,
    silu,
)
from tests.reference.numpy_positions import (
    Floats,
    dynamic_ntk_theta,
    llama3_frequencies,
    longrope_attention_factor,
    rope,
    rope_frequencies,
)
from tests.reference.numpy_tensors import Tensors, dense, heads, layers_of, merged

from .llama_line import (
    KV_HEADS,
    LLAMA,
    TOKENS,
    affine,
    by_groups,
    check,
    embedded,
    llama_shapes,
    norm,
    projected,
    turn,
)
from .tiny import DIM, HEADS, HIDDEN, INNER, VOCAB, Shapes

FUSED = ("q_proj", "k_proj", "v_proj")


@pytest.mark.parametrize(("trained", "served"), [(128, None), (32, 64)])
def test_internlm2(tmp_path: Path, trained: int, served: int | None) -> None:
    """q, k and v of each group of heads in one tensor, and theta that grows with the text."""
    group = HEADS // KV_HEADS
    total = max(len(TOKENS), trained)
    theta = dynamic_ntk_theta(5000.0, DIM, 2.0, total, trained)

    def forward(tensors: Tensors) -> Floats:
        x, rotate = tensors["model.tok_embeddings.weight"][TOKENS], turn(theta)
        for t in layers_of(tensors):
            n = rms_norm(x, t["attention_norm.weight"], 1e-5)
            q, k, v = by_groups(dense(n, t, "attention.wqkv"))
            x = x + dense(merged(attention(rotate(q), rotate(k), v)), t, "attention.wo")
            n = rms_norm(x, t["ffn_norm.weight"], 1e-5)
            inner = silu(dense(n, t, "feed_forward.w1")) * dense(n, t, "feed_forward.w3")
            x = x + dense(inner, t, "feed_forward.w2")
        return dense(rms_norm(x, tensors["model.norm.weight"], 1e-5), tensors, "output")

    shapes: Shapes = {
        "model.tok_embeddings.weight": (VOCAB, HIDDEN),
        "output.weight": (VOCAB, HIDDEN),
    }
    for i in range(2):
        layer = f"model.layers.{i}."
        shapes |= norm(layer + "attention_norm") | norm(layer + "ffn_norm")
        shapes |= affine(layer + "attention.wqkv", KV_HEADS * (group + 2) * DIM, HIDDEN)
        shapes |= affine(layer + "attention.wo", HIDDEN, HEADS * DIM)
        shapes |= affine(layer + "feed_forward.w1", INNER, HIDDEN)
        shapes |= affine(layer + "feed_forward.w3", INNER, HIDDEN)
        shapes |= affine(layer + "feed_forward.w2", HIDDEN, INNER)
    config = LLAMA | {
        "architectures": ["InternLM2ForCausalLM"], "bias": False, "rms_norm_eps": 1e-5,
        "rope_scaling": {"type": "dynamic", "factor": 2.0}, "tie_word_embeddings": False,
        "max_position_embeddings": trained,
    }  # fmt: skip
    asked = {} if served is None else {"engine.context": served}
    check(tmp_path, config, shapes | norm("model.norm"), forward, asked)


@pytest.mark.parametrize(("served", "list_name"), [(64, "short_factor"), (65, "long_factor")])
def test_phi4_mini(tmp_path: Path, served: int, list_name: str) -> None:
    """LongRoPE on three quarters of each head: another list for contexts longer than trained."""
    lists = {"short_factor": [1.0, 1.2, 1.9], "long_factor": [1.5, 4.0, 9.0]}
    frequencies = rope_frequencies(6, 5000.0) / lists[list_name]
    factor = longrope_attention_factor(128 / 64, 64)

    def rotate(x: Floats) -> Floats:
        at = np.arange(len(x))
        return rope(x, at, rotary_dim=6, inv_freq=frequencies, attention_factor=factor)

    def forward(tensors: Tensors) -> Floats:
        x = embedded(tensors)
        for t in layers_of(tensors):
            n = dense(rms_norm(x, t["input_layernorm.weight"], 1e-5), t, "self_attn.qkv_proj")
            q, k, v = np.split(heads(n, HEADS + 2 * KV_HEADS), [HEADS, HEADS + KV_HEADS], axis=1)
            attended = attention(rotate(q), rotate(k), v, window=20)
            x = x + dense(merged(attended), t, "self_attn.o_proj")
            n = rms_norm(x, t["post_attention_layernorm.weight"], 1e-5)
            gate, up = np.split(dense(n, t, "mlp.gate_up_proj"), 2, axis=-1)
            x = x + dense(silu(gate) * up, t, "mlp.down_proj")
        x = rms_norm(x, tensors["model.norm.weight"], 1e-5)
        return x @ tensors["model.embed_tokens.weight"].T

    shapes = llama_shapes(mlp=False)
    shapes = {name: s for name, s in shapes.items() if name.split(".")[-2] not in FUSED}
    for i in range(2):
        qkv = (HEADS + 2 * KV_HEADS) * DIM
        shapes |= affine(f"model.layers.{i}.self_attn.qkv_proj", qkv, HIDDEN)
        shapes |= affine(f"model.layers.{i}.mlp.gate_up_proj", 2 * INNER, HIDDEN)
    config = LLAMA | {
        "architectures": ["Phi3ForCausalLM"], "rms_norm_eps": 1e-5, "sliding_window": 20,
        "partial_rotary_factor": 0.75, "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope", **lists}, "tie_word_embeddings": True,
    }  # fmt: skip
    check(tmp_path, config, shapes, forward, {"engine.context": served})


def test_exaone(tmp_path: Path) -> None:
    """Llama's layer under other names, with Llama 3.1's scaling."""
    frequencies = llama3_frequencies(rope_frequencies(DIM, 5000.0), 8.0, 1.0, 4.0, 16)

    def rotate(x: Floats) -> Floats:
        return rope(x, np.arange(len(x)), inv_freq=frequencies)

    def forward(tensors: Tensors) -> Floats:
        x = tensors["transformer.wte.weight"][TOKENS]
        for t in layers_of(tensors, "transformer.h."):
            n = rms_norm(x, t["ln_1.weight"], 1e-5)
            q, k, v = projected(n, t, "attn.attention")
            out = merged(attention(rotate(q), rotate(k), v))
            x = x + dense(out, t, "attn.attention.out_proj")
            n = rms_norm(x, t["ln_2.weight"], 1e-5)
            inner = silu(dense(n, t, "mlp.c_fc_0")) * dense(n, t, "mlp.c_fc_1")
            x = x + dense(inner, t, "mlp.c_proj")
        return dense(rms_norm(x, tensors["transformer.ln_f.weight"], 1e-5), tensors, "lm_head")

    shapes: Shapes = {"transformer.wte.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    shapes |= norm("transformer.ln_f")
    for i in range(2):
        layer = f"transformer.h.{i}."
        shapes |= norm(layer + "ln_1") | norm(layer + "ln_2")
        for part, width in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes |= affine(f"{layer}attn.attention.{part}_proj", width * DIM, HIDDEN)
        shapes |= affine(layer + "attn.attention.out_proj", HIDDEN, HEADS * DIM)
        shapes |= affine(layer + "mlp.c_fc_0", INNER, HIDDEN)
        shapes |= affine(layer + "mlp.c_fc_1", INNER, HIDDEN)
        shapes |= affine(layer + "mlp.c_proj", HIDDEN, INNER)
    config = {name: value for name, value in LLAMA.items() if name != "num_hidden_layers"} | {
        "architectures": ["ExaoneForCausalLM"], "num_layers": 2, "layer_norm_epsilon": 1e-5,
        "activation_function": "silu", "head_dim": DIM, "tie_word_embeddings": False,
        "rope_scaling": {
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 16, "rope_type": "llama3",
        },
    }  # fmt: skip
    check(tmp_path, config, shapes, forward)
