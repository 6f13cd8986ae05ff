"""Decoders in the line of GPT-2 and Falcon of which there is no golden, against passes in NumPy.

Each test writes a tiny checkpoint with the tensor names and the config.json of a published one, and
computes its logits from the reference blocks, as the family's code or paper says.
"""

from pathlib import Path

import numpy as np

from tests.reference.numpy_blocks import (
    attention,
    gelu_erf,
    gelu_tanh,
    layer_norm,
    linear,
)
from tests.reference.numpy_families import gptj
from tests.reference.numpy_positions import (
    Floats,
    alibi_slopes_ceil,
    alibi_slopes_floor,
)
from tests.reference.numpy_tensors import Tensors, centre, dense, heads, layers_of, merged, within

from .gptj import gptj_shapes
from .llama_line import (
    KV_HEADS,
    TOKENS,
    affine,
    by_groups,
    check,
    norm,
    turn,
)
from .tiny import DIM, HEADS, HIDDEN, VOCAB, Shapes

GPT = {"vocab_size": VOCAB, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}


def test_gptj(tmp_path: Path) -> None:
    """Side by side from one norm; some dimensions rotated as neighbours; a bias at the head."""
    config = GPT | {
        "architectures": ["GPTJForCausalLM"], "n_embd": HIDDEN, "n_head": HEADS, "n_layer": 2,
        "n_positions": 64, "n_inner": None, "rotary_dim": 4, "tie_word_embeddings": False,
    }  # fmt: skip
    check(tmp_path, config, gptj_shapes(config), lambda t: gptj(t, TOKENS, HEADS, 4))


def test_gpt_neo(tmp_path: Path) -> None:
    """Scores without a scale; every other layer has a window."""

    def forward(tensors: Tensors) -> Floats:
        tensors = within(tensors, "transformer.")
        x = tensors["wte.weight"][TOKENS] + tensors["wpe.weight"][: len(TOKENS)]
        for i, t in enumerate(layers_of(tensors, "h.")):
            n = centre(x, t, "ln_1")
            q, k, v = (heads(dense(n, t, f"attn.attention.{p}_proj"), HEADS) for p in "qkv")
            out = attention(q, k, v, scale=1.0, window=5 if i else None)
            x = x + dense(merged(out), t, "attn.attention.out_proj")
            x = x + dense(gelu_tanh(dense(centre(x, t, "ln_2"), t, "mlp.c_fc")), t, "mlp.c_proj")
        return centre(x, tensors, "ln_f") @ tensors["wte.weight"].T

    shapes: Shapes = {
        "transformer.wte.weight": (VOCAB, HIDDEN),
        "transformer.wpe.weight": (64, HIDDEN),
    }
    shapes |= norm("transformer.ln_f", True)
    for i in range(2):
        layer = f"transformer.h.{i}."
        shapes |= norm(layer + "ln_1", True) | norm(layer + "ln_2", True)
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            bias = part == "out_proj"
            shapes |= affine(f"{layer}attn.attention.{part}", HIDDEN, HIDDEN, bias)
        shapes |= affine(layer + "mlp.c_fc", 4 * HIDDEN, HIDDEN, True)
        shapes |= affine(layer + "mlp.c_proj", HIDDEN, 4 * HIDDEN, True)
    config = GPT | {
        "architectures": ["GPTNeoForCausalLM"], "hidden_size": HIDDEN, "num_heads": HEADS,
        "num_layers": 2, "max_position_embeddings": 64, "intermediate_size": None,
        "attention_layers": ["global", "local"], "window_size": 5,
    }  # fmt: skip
    check(tmp_path, config, shapes, forward)


def test_gpt2_scores_that_are_divided_by_their_layers_number(tmp_path: Path) -> None:
    """As Mistral's GPT-2 (stanford-crfm) was trained."""

    def forward(tensors: Tensors) -> Floats:
        x = tensors["wte.weight"][TOKENS] + tensors["wpe.weight"][: len(TOKENS)]
        for i, t in enumerate(layers_of(tensors, "h.")):
            fused = centre(x, t, "ln_1") @ t["attn.c_attn.weight"] + t["attn.c_attn.bias"]
            q, k, v = np.split(heads(fused, 3 * HEADS), 3, axis=1)
            out = merged(attention(q, k, v, scale=DIM**-0.5 / (i + 1)))
            x = x + out @ t["attn.c_proj.weight"] + t["attn.c_proj.bias"]
            inner = centre(x, t, "ln_2") @ t["mlp.c_fc.weight"] + t["mlp.c_fc.bias"]
            x = x + gelu_tanh(inner) @ t["mlp.c_proj.weight"] + t["mlp.c_proj.bias"]
        return centre(x, tensors, "ln_f") @ tensors["wte.weight"].T

    shapes: Shapes = {"wte.weight": (VOCAB, HIDDEN), "wpe.weight": (64, HIDDEN)}
    shapes |= norm("ln_f", True)
    for i in range(2):
        layer = f"h.{i}."
        shapes |= norm(layer + "ln_1", True) | norm(layer + "ln_2", True)
        for name, ins, outs in (
            ("attn.c_attn", HIDDEN, 3 * HIDDEN), ("attn.c_proj", HIDDEN, HIDDEN),
            ("mlp.c_fc", HIDDEN, 4 * HIDDEN), ("mlp.c_proj", 4 * HIDDEN, HIDDEN),
        ):  # fmt: skip
            shapes |= {f"{layer}{name}.weight": (ins, outs), f"{layer}{name}.bias": (outs,)}
    config = GPT | {
        "architectures": ["GPT2LMHeadModel"], "n_embd": HIDDEN, "n_head": HEADS, "n_layer": 2,
        "n_positions": 64, "scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": True,
        "reorder_and_upcast_attn": True,
    }  # fmt: skip
    check(tmp_path, config, shapes, forward)


def test_mpt(tmp_path: Path) -> None:
    """No biases, ALiBi for a number of heads that is no power of two, clipped q, k and v."""
    head_count, width = 6, 24

    def forward(tensors: Tensors) -> Floats:
        tensors = within(tensors, "transformer.")
        x = tensors["wte.weight"][TOKENS]
        for t in layers_of(tensors, "blocks."):
            fused = np.clip(dense(layer_norm(x, t["norm_1.weight"]), t, "attn.Wqkv"), -0.9, 0.9)
            q, k, v = np.split(heads(fused, 3 * head_count), 3, axis=1)
            out = attention(q, k, v, slopes=alibi_slopes_ceil(head_count, 6.0))
            x = x + dense(merged(out), t, "attn.out_proj")
            inner = gelu_erf(dense(layer_norm(x, t["norm_2.weight"]), t, "ffn.up_proj"))
            x = x + dense(inner, t, "ffn.down_proj")
        return layer_norm(x, tensors["norm_f.weight"]) @ tensors["wte.weight"].T

    shapes: Shapes = {
        "transformer.wte.weight": (VOCAB, width),
        "transformer.norm_f.weight": (width,),
    }
    for i in range(2):
        layer = f"transformer.blocks.{i}."
        shapes |= {f"{layer}norm_1.weight": (width,), f"{layer}norm_2.weight": (width,)}
        shapes |= affine(layer + "attn.Wqkv", 3 * width, width)
        shapes |= affine(layer + "attn.out_proj", width, width)
        shapes |= affine(layer + "ffn.up_proj", 4 * width, width)
        shapes |= affine(layer + "ffn.down_proj", width, 4 * width)
    config = {
        "architectures": ["MPTForCausalLM"], "d_model": width, "n_heads": head_count, "n_layers": 2,
        "expansion_ratio": 4, "max_seq_len": 64, "vocab_size": VOCAB, "no_bias": True,
        "learned_pos_emb": True,
        "attn_config": {
            "alibi": True, "alibi_bias_max": 6, "clip_qkv": 0.9, "qk_ln": False,
            "softmax_scale": None,
        },
    }  # fmt: skip
    check(tmp_path, config, shapes, forward)


FALCON = {
    "architectures": ["FalconForCausalLM"], "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "num_attention_heads": HEADS, "num_hidden_layers": 2, "layer_norm_epsilon": 1e-5,
}  # fmt: skip


def falcon_shapes(fused: int, norms: tuple[str, ...], bias: bool) -> Shapes:
    shapes: Shapes = {"transformer.word_embeddings.weight": (VOCAB, HIDDEN)}
    shapes |= norm("transformer.ln_f", True)
    for i in range(2):
        layer = f"transformer.h.{i}."
        for name in norms:
            shapes |= norm(layer + name, True)
        shapes |= affine(layer + "self_attention.query_key_value", fused * DIM, HIDDEN, bias)
        shapes |= affine(layer + "self_attention.dense", HIDDEN, HIDDEN, bias)
        shapes |= affine(layer + "mlp.dense_h_to_4h", 4 * HIDDEN, HIDDEN, bias)
        shapes |= affine(layer + "mlp.dense_4h_to_h", HIDDEN, 4 * HIDDEN, bias)
    return shapes


def falcon_ffn(x: Floats, t: Tensors) -> Floats:
    return dense(gelu_erf(dense(x, t, "mlp.dense_h_to_4h")), t, "mlp.dense_4h_to_h")


def test_falcon_rw(tmp_path: Path) -> None:
    """One after the other; ALiBi's biases are added before the scores are scaled."""
    slopes = alibi_slopes_floor(HEADS) / np.sqrt(DIM)

    def forward(tensors: Tensors) -> Floats:
        tensors = within(tensors, "transformer.")
        x = tensors["word_embeddings.weight"][TOKENS]
        for t in layers_of(tensors, "h."):
            fused = dense(centre(x, t, "input_layernorm"), t, "self_attention.query_key_value")
            q, k, v = np.moveaxis(fused.reshape(len(x), HEADS, 3, DIM), 2, 0)
            x = x + dense(merged(attention(q, k, v, slopes=slopes)), t, "self_attention.dense")
            x = x + falcon_ffn(centre(x, t, "post_attention_layernorm"), t)
        return centre(x, tensors, "ln_f") @ tensors["word_embeddings.weight"].T

    norms = ("input_layernorm", "post_attention_layernorm")
    config = FALCON | {
        "alibi": True, "bias": True, "multi_query": False, "new_decoder_architecture": False,
        "parallel_attn": False,
    }  # fmt: skip
    check(tmp_path, config, falcon_shapes(3 * HEADS, norms, True), forward)


def test_falcon2_11b(tmp_path: Path) -> None:
    """Grouped heads, side by side from one norm, an untied head."""
    group = HEADS // KV_HEADS

    def forward(tensors: Tensors) -> Floats:
        head = tensors["lm_head.weight"]
        tensors = within(tensors, "transformer.")
        x, rotate = tensors["word_embeddings.weight"][TOKENS], turn(5e5)
        for t in layers_of(tensors, "h."):
            n = centre(x, t, "input_layernorm")
            q, k, v = by_groups(dense(n, t, "self_attention.query_key_value"))
            out = merged(attention(rotate(q), rotate(k), v))
            x = x + dense(out, t, "self_attention.dense") + falcon_ffn(n, t)
        return linear(centre(x, tensors, "ln_f"), head)

    shapes = falcon_shapes(KV_HEADS * (group + 2), ("input_layernorm",), False)
    config = FALCON | {
        "alibi": False, "bias": False, "new_decoder_architecture": True, "num_kv_heads": KV_HEADS,
        "num_ln_in_parallel_attn": 1, "rope_theta": 5e5, "parallel_attn": True,
        "tie_word_embeddings": False,
    }  # fmt: skip
    check(tmp_path, config, shapes | {"lm_head.weight": (VOCAB, HIDDEN)}, forward)
