"""Gemma 4 with experts, keys that are the values, and no embeddings of layers, in NumPy."""

from pathlib import Path
from typing import Any

import numpy as np

from jinfer import LLM
from tests.reference import numpy_moe
from tests.reference.numpy_blocks import attention, gelu_tanh, rms_norm, softmax
from tests.reference.numpy_positions import Floats
from tests.reference.numpy_tensors import Tensors, dense, heads, layers_of, merged, within

from .tiny import DIM, HEADS, HIDDEN, INNER, TEXTS, VOCAB, Shapes, close, written

EPS, WINDOW, WIDTH, EXPERTS, WIDE = 1e-4, 8, 20, 6, 12
KINDS = ("sliding_attention", "full_attention", "sliding_attention", "full_attention")
CONFIG: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"], "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "num_hidden_layers": 4, "num_attention_heads": HEADS, "num_key_value_heads": 2,
    "head_dim": DIM, "global_head_dim": WIDE, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "intermediate_size": INNER, "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": EPS, "sliding_window": WINDOW, "layer_types": list(KINDS),
    "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 0, "enable_moe_block": True,
    "num_experts": EXPERTS, "top_k_experts": 2, "moe_intermediate_size": WIDTH,
    "max_position_embeddings": 128, "final_logit_softcapping": 5.0, "use_double_wide_mlp": True,
    "use_bidirectional_attention": "vision",
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {
            "rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 9000.0,
        },
    },
}  # fmt: skip
NORMS = (
    *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm"),
    *("post_feedforward_layernorm", "post_feedforward_layernorm_1"),
    *("post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"),
)


def shapes() -> Shapes:
    found: Shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i, kind in enumerate(KINDS):
        full, inner = kind == "full_attention", INNER * (2 if i == 3 else 1)
        size, keys = (WIDE, WIDE) if full else (DIM, 2 * DIM)
        layer: Shapes = {f"{name}.weight": (HIDDEN,) for name in NORMS} | {
            "layer_scalar": (1,), "router.scale": (HIDDEN,), "router.per_expert_scale": (EXPERTS,),
            "router.proj.weight": (EXPERTS, HIDDEN), "self_attn.q_norm.weight": (size,),
            "self_attn.q_proj.weight": (HEADS * size, HIDDEN),
            "self_attn.o_proj.weight": (HIDDEN, HEADS * size),
            "experts.gate_up_proj": (EXPERTS, 2 * WIDTH, HIDDEN),
            "experts.down_proj": (EXPERTS, HIDDEN, WIDTH),
            "mlp.gate_proj.weight": (inner, HIDDEN), "mlp.up_proj.weight": (inner, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, inner),
        }  # fmt: skip
        if i < 3:
            layer |= {"self_attn.k_proj.weight": (keys, HIDDEN), "self_attn.k_norm.weight": (size,)}
        if i < 3 and not full:
            layer |= {"self_attn.v_proj.weight": (keys, HIDDEN)}
        found |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return found


def rms(x: Floats, t: Tensors, name: str) -> Floats:
    return rms_norm(x, t[f"{name}.weight"], EPS)


def turned(x: Floats, full: bool) -> Floats:
    size = x.shape[-1]
    frequencies = (9000.0 if full else 500.0) ** (-np.arange(0, size, 2) / size)
    if full:
        frequencies[int(0.5 * size // 2) :] = 0
    angles = np.outer(np.arange(len(x)), frequencies)[:, None]
    a, b = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def mixture(x: Floats, t: Tensors) -> Floats:
    unit = rms_norm(x, np.ones(HIDDEN), EPS)
    scores = softmax((unit * t["router.scale"] / np.sqrt(HIDDEN)) @ t["router.proj.weight"].T)
    choices = []
    for row in scores:
        best = numpy_moe.best(row, 2)
        total = sum(row[e] for e in best)
        choices.append({e: row[e] / total * t["router.per_expert_scale"][e] for e in best})

    def expert(e: int, row: Floats) -> Floats:
        gate, up = np.split(t["experts.gate_up_proj"][e] @ row, 2)
        return t["experts.down_proj"][e] @ (gelu_tanh(gate) * up)

    return numpy_moe.mixture(rms(x, t, NORMS[6]), choices, expert)


def forward(tensors: Tensors, tokens: list[int]) -> Floats:
    x = tensors["model.embed_tokens.weight"][tokens] * np.sqrt(HIDDEN)
    kept: dict[bool, tuple[Floats, Floats]] = {}
    for i, t in enumerate(layers_of(tensors)):
        full, n, at = KINDS[i] == "full_attention", rms(x, t, NORMS[0]), within(t, "self_attn.")
        q = turned(rms(heads(dense(n, at, "q_proj"), HEADS), at, "q_norm"), full)
        if i < 3:
            k = heads(dense(n, at, "k_proj"), 1 if full else 2)
            v = k if full else heads(dense(n, at, "v_proj"), 2)
            v = rms_norm(v, np.ones(v.shape[-1]), EPS)
            kept[full] = turned(rms(k, at, "k_norm"), full), v
        out = attention(q, *kept[full], scale=1.0, window=None if full else WINDOW)
        x = x + rms(dense(merged(out), at, "o_proj"), t, NORMS[1])
        mlp, n = within(t, "mlp."), rms(x, t, NORMS[2])
        y = dense(
            gelu_tanh(dense(n, mlp, "gate_proj")) * dense(n, mlp, "up_proj"), mlp, "down_proj"
        )
        y = rms(y, t, NORMS[4]) + rms(mixture(x, t), t, NORMS[5])
        x = (x + rms(y, t, NORMS[3])) * t["layer_scalar"]
    logits = rms(x, tensors, "model.norm") @ tensors["model.embed_tokens.weight"].T
    return 5.0 * np.tanh(logits / 5.0)


def test_gemma4_moe(tmp_path: Path) -> None:
    tensors = written(tmp_path, CONFIG, shapes())
    llm = LLM(tmp_path, dtype="float32")
    for text, got in zip(TEXTS, llm.logits(TEXTS), strict=True):
        close(got, forward(tensors, text))
