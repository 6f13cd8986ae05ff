"""CodeGen and XGLM, against passes in NumPy."""

from pathlib import Path

import numpy as np

from tests.reference.numpy_blocks import gelu_erf, gelu_tanh, linear, mask, softmax
from tests.reference.numpy_positions import Floats, rope, sinusoids_fairseq
from tests.reference.numpy_tensors import Tensors, centre, dense, layers_of, merged

from .llama_line import TOKENS, affine, check, norm
from .newer_parts import attend
from .tiny import DIM, HEADS, HIDDEN, INNER, VOCAB, Shapes


def codegen_layer(x: Floats, t: Tensors) -> Floats:
    """Queries, values and keys in four groups of heads; both branches from one norm."""
    n = centre(x, t, "ln_1")
    fused = dense(n, t, "attn.qkv_proj").reshape(len(x), 4, 3, HEADS // 4, DIM)
    q, v, k = (fused[:, :, part].reshape(len(x), HEADS, DIM) for part in range(3))
    at = np.arange(len(x))
    q, k = (rope(y, at, 10000.0, "adjacent", 4) for y in (q, k))
    scores = np.einsum("qhd,khd->hqk", q, k) * DIM**-0.5
    scores = np.where(mask(len(x), len(x)), scores, -np.inf)
    out = merged(np.einsum("hqk,khd->qhd", softmax(scores), v))
    inner = gelu_tanh(dense(n, t, "mlp.fc_in"))
    return x + dense(out, t, "attn.out_proj") + dense(inner, t, "mlp.fc_out")


def test_codegen(tmp_path: Path) -> None:
    shapes: Shapes = {"transformer.wte.weight": (VOCAB, HIDDEN)}
    for i in range(2):
        layer = f"transformer.h.{i}."
        shapes |= norm(f"{layer}ln_1", bias=True) | affine(f"{layer}attn.qkv_proj", 96, HIDDEN)
        shapes |= affine(f"{layer}attn.out_proj", HIDDEN, HIDDEN)
        shapes |= affine(f"{layer}mlp.fc_in", 4 * HIDDEN, HIDDEN, bias=True)
        shapes |= affine(f"{layer}mlp.fc_out", HIDDEN, 4 * HIDDEN, bias=True)
    shapes |= norm("transformer.ln_f", bias=True) | affine("lm_head", VOCAB, HIDDEN, bias=True)
    config = {
        "architectures": ["CodeGenForCausalLM"], "vocab_size": VOCAB, "n_embd": HIDDEN,
        "n_layer": 2, "n_head": HEADS, "rotary_dim": 4, "n_positions": 128,
        "activation_function": "gelu_new", "tie_word_embeddings": False,
    }  # fmt: skip

    def forward(tensors: Tensors) -> Floats:
        x = tensors["transformer.wte.weight"][TOKENS]
        for t in layers_of(tensors, "transformer.h."):
            x = codegen_layer(x, t)
        return dense(centre(x, tensors, "transformer.ln_f"), tensors, "lm_head")

    check(tmp_path, config, shapes, forward)


def test_xglm(tmp_path: Path) -> None:
    shapes: Shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(2):
        layer = f"model.layers.{i}."
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= affine(f"{layer}self_attn.{part}", HIDDEN, HIDDEN, bias=True)
        shapes |= norm(f"{layer}self_attn_layer_norm", bias=True)
        shapes |= norm(f"{layer}final_layer_norm", bias=True)
        shapes |= affine(f"{layer}fc1", INNER, HIDDEN, bias=True)
        shapes |= affine(f"{layer}fc2", HIDDEN, INNER, bias=True)
    shapes |= norm("model.layer_norm", bias=True)
    config = {
        "architectures": ["XGLMForCausalLM"], "vocab_size": VOCAB, "d_model": HIDDEN,
        "ffn_dim": INNER, "num_layers": 2, "attention_heads": HEADS, "scale_embedding": True,
        "activation_function": "gelu", "max_position_embeddings": 128,
    }  # fmt: skip

    def forward(tensors: Tensors) -> Floats:
        table = tensors["model.embed_tokens.weight"]
        x = table[TOKENS] * np.sqrt(HIDDEN) + sinusoids_fairseq(np.arange(len(TOKENS)) + 2, HIDDEN)
        for t in layers_of(tensors):
            named = {n.replace("out_proj", "o_proj"): values for n, values in t.items()}
            x = x + attend(centre(x, t, "self_attn_layer_norm"), named)
            inner = gelu_erf(dense(centre(x, t, "final_layer_norm"), t, "fc1"))
            x = x + dense(inner, t, "fc2")
        return linear(centre(x, tensors, "model.layer_norm"), table)

    check(tmp_path, config, shapes, forward)
