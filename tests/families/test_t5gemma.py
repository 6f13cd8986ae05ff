"""T5Gemma, against a pass in NumPy: cross-attention with shared heads and bounded scores."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.reference.numpy_blocks import gelu_tanh, mask, rms_norm, softmax
from tests.reference.numpy_positions import Floats, rope
from tests.reference.numpy_tensors import Tensors, dense, heads, layers_of, merged, within

from .llama_line import KV_HEADS, affine, norm
from .tiny import DIM, HEADS, HIDDEN, INNER, TEXTS, VOCAB, Shapes, close, served

EPS, CAP, LOGITS_CAP, WINDOW = 1e-6, 5.0, 4.0, 8
STACK: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "head_dim": DIM,
    "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128, "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": EPS, "rope_theta": 10000.0, "query_pre_attn_scalar": 24,
    "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"],
    "final_logit_softcapping": LOGITS_CAP, "attn_logit_softcapping": CAP,
}  # fmt: skip
CONFIG = {
    "architectures": ["T5GemmaForConditionalGeneration"], "vocab_size": VOCAB, "encoder": STACK,
    "decoder": STACK, "is_encoder_decoder": True, "tie_word_embeddings": True,
    "decoder_start_token_id": 2,
}  # fmt: skip


def shapes() -> Shapes:
    found: Shapes = {}
    for stack in ("encoder", "decoder"):
        found |= {f"model.{stack}.embed_tokens.weight": (VOCAB, HIDDEN)}
        found |= norm(f"model.{stack}.norm")
        for i in range(2):
            layer = f"model.{stack}.layers.{i}."
            attentions = ("self_attn", "cross_attn")[: 1 if stack == "encoder" else 2]
            for attn in attentions:
                found |= affine(f"{layer}{attn}.q_proj", HEADS * DIM, HIDDEN)
                found |= affine(f"{layer}{attn}.o_proj", HIDDEN, HEADS * DIM)
                for part in "kv":
                    found |= affine(f"{layer}{attn}.{part}_proj", KV_HEADS * DIM, HIDDEN)
            for part in (*attentions, "feedforward"):
                for when in ("pre", "post"):
                    found |= norm(f"{layer}{when}_{part}_layernorm")
            for part in ("gate_proj", "up_proj"):
                found |= affine(f"{layer}mlp.{part}", INNER, HIDDEN)
            found |= affine(f"{layer}mlp.down_proj", HIDDEN, INNER)
    return found


def normed(x: Floats, t: Tensors, name: str) -> Floats:
    return rms_norm(x, 1 + t[f"{name}.weight"], EPS)


def attend(x: Floats, t: Tensors, over: Floats, seen: Any, rotated: bool) -> Floats:
    q, k, v = (dense(y, t, f"{part}_proj") for y, part in zip((x, over, over), "qkv", strict=True))
    q, k, v = heads(q, HEADS), heads(k, KV_HEADS), heads(v, KV_HEADS)
    if rotated:
        q, k = (rope(y, np.arange(len(y))) for y in (q, k))
    k, v = (np.repeat(y, HEADS // KV_HEADS, axis=1) for y in (k, v))
    scores = CAP * np.tanh(np.einsum("qhd,khd->hqk", q, k) * 24**-0.5 / CAP)
    out = np.einsum("hqk,khd->qhd", softmax(np.where(seen, scores, -np.inf)), v)
    return dense(merged(out), t, "o_proj")


def stack(tokens: list[int], tensors: Tensors, encoded: Floats | None = None) -> Floats:
    x = tensors["embed_tokens.weight"][tokens] * np.sqrt(HIDDEN)
    causal = encoded is not None
    for i, t in enumerate(layers_of(tensors, "layers.")):
        window = (WINDOW if causal else WINDOW + 1) if i == 0 else None
        n = normed(x, t, "pre_self_attn_layernorm")
        seen = mask(len(x), len(x), causal, window)
        y = attend(n, within(t, "self_attn."), n, seen, rotated=True)
        x = x + normed(y, t, "post_self_attn_layernorm")
        if encoded is not None:
            n = normed(x, t, "pre_cross_attn_layernorm")
            y = attend(n, within(t, "cross_attn."), encoded, True, rotated=False)
            x = x + normed(y, t, "post_cross_attn_layernorm")
        n = normed(x, t, "pre_feedforward_layernorm")
        inner = gelu_tanh(dense(n, t, "mlp.gate_proj")) * dense(n, t, "mlp.up_proj")
        x = x + normed(dense(inner, t, "mlp.down_proj"), t, "post_feedforward_layernorm")
    return normed(x, tensors, "norm")


def test_logits(tmp_path: Path) -> None:
    llm, tensors = served(tmp_path, CONFIG, shapes())
    answers = [[2, *text[:11]] for text in reversed(TEXTS)]
    for got, text, answer in zip(
        llm.logits(answers, encoder_ids=TEXTS), TEXTS, answers, strict=True
    ):
        encoded = stack(text, within(tensors, "model.encoder."))
        x = stack(answer, within(tensors, "model.decoder."), encoded)
        logits = x @ tensors["model.decoder.embed_tokens.weight"].T
        close(got, LOGITS_CAP * np.tanh(logits / LOGITS_CAP))
