"""Gemma 3's layers, with and without windows, against a forward pass in NumPy."""

import math
from pathlib import Path

import numpy as np

from tests.reference.numpy_blocks import attention, gelu_tanh, rms_norm
from tests.reference.numpy_positions import Floats, rope, rope_frequencies
from tests.reference.numpy_tensors import Tensors, dense, heads, merged, within

from .tiny import DIM, HEADS, HIDDEN, INNER, TEXTS, VOCAB, close, linear, norm, served

LAYERS, KV_HEADS, WINDOW, EVERY, EPS, SCALAR = 4, 2, 6, 3, 1e-3, 12.0
CONFIG = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "max_position_embeddings": 128,
    "rms_norm_eps": EPS,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": SCALAR,
    "sliding_window": WINDOW,
    "sliding_window_pattern": EVERY,
    "rope_theta": 50000.0,
    "rope_local_base_freq": 500.0,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
}


def shapes() -> dict[str, tuple[int, ...]]:
    found = {"model.embed_tokens.weight": (VOCAB, HIDDEN), **norm("model.norm", bias=False)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        for name, outputs, inputs in [
            ("self_attn.q_proj", HEADS * DIM, HIDDEN),
            ("self_attn.k_proj", KV_HEADS * DIM, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * DIM, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * DIM),
            ("mlp.gate_proj", INNER, HIDDEN),
            ("mlp.up_proj", INNER, HIDDEN),
            ("mlp.down_proj", HIDDEN, INNER),
        ]:
            found |= linear(layer + name, outputs, inputs, bias=False)
        for name in ("q_norm", "k_norm"):
            found |= norm(f"{layer}self_attn.{name}", DIM, bias=False)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            found |= norm(f"{layer}{name}_layernorm", bias=False)
    return found


def scaled(x: Floats, t: Tensors, name: str) -> Floats:
    """The norm that multiplies by one more than its weight."""
    return rms_norm(x, 1 + t[f"{name}.weight"], EPS)


def attend(x: Floats, t: Tensors, is_global: bool) -> Floats:
    q, k, v = (
        heads(dense(x, t, f"self_attn.{n}_proj"), count)
        for n, count in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    )
    frequencies = rope_frequencies(DIM, 50000.0) / 4 if is_global else rope_frequencies(DIM, 500.0)
    at = np.arange(len(x))
    q = rope(scaled(q, t, "self_attn.q_norm"), at, inv_freq=frequencies)
    k = rope(scaled(k, t, "self_attn.k_norm"), at, inv_freq=frequencies)
    out = attention(q, k, v, SCALAR**-0.5, window=None if is_global else WINDOW)
    return dense(merged(out), t, "self_attn.o_proj")


def forward(t: Tensors, tokens: list[int]) -> Floats:
    x = t["model.embed_tokens.weight"][tokens] * math.sqrt(HIDDEN)
    for i in range(LAYERS):
        layer = within(t, f"model.layers.{i}.")
        attended = attend(scaled(x, layer, "input_layernorm"), layer, (i + 1) % EVERY == 0)
        x = x + scaled(attended, layer, "post_attention_layernorm")
        n = scaled(x, layer, "pre_feedforward_layernorm")
        gate, up = (dense(n, layer, f"mlp.{name}_proj") for name in ("gate", "up"))
        fed = dense(gelu_tanh(gate) * up, layer, "mlp.down_proj")
        x = x + scaled(fed, layer, "post_feedforward_layernorm")
    return scaled(x, t, "model.norm") @ t["model.embed_tokens.weight"].T


def test_gemma3(tmp_path: Path) -> None:
    llm, tensors = served(tmp_path, CONFIG, shapes())
    for text, got in zip(TEXTS, llm.logits(TEXTS), strict=True):
        close(got, forward(tensors, text))
