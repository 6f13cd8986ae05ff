"""Llama (Touvron et al., 2023), from llama2.c files and from tensors with Hugging Face's names."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from .numpy_blocks import attention, rms_norm, silu
from .numpy_positions import Floats, Pairs, rope, rope_frequencies
from .numpy_tensors import Tensors, dense, heads, merged, within


@dataclass(frozen=True)
class Llama:
    """What the tensors do not say."""

    layers: int
    heads: int
    kv_heads: int
    inv_freq: Floats
    attention_factor: float = 1.0
    pairs: Pairs = "halves"
    eps: float = 1e-5
    window: int | None = None

    def attend(self, x: Floats, t: Tensors) -> Floats:
        """Rotary attention over a sequence that starts at position 0."""
        q, k, v = (dense(x, t, f"{name}_proj") for name in "qkv")
        q, k = (
            rope(
                heads(y, count),
                np.arange(len(x)),
                pairs=self.pairs,
                inv_freq=self.inv_freq,
                attention_factor=self.attention_factor,
            )
            for y, count in ((q, self.heads), (k, self.kv_heads))
        )
        out = attention(q, k, heads(v, self.kv_heads), window=self.window)
        return dense(merged(out), t, "o_proj")

    def hidden(self, tensors: Tensors, tokens: ArrayLike) -> list[Floats]:
        """[length, hidden] after the embedding and after each layer, the last one normed."""
        x = tensors["model.embed_tokens.weight"][np.asarray(tokens)]
        states = [x]
        for i in range(self.layers):
            t = within(tensors, f"model.layers.{i}.")
            normed = rms_norm(x, t["input_layernorm.weight"], self.eps)
            x = x + self.attend(normed, within(t, "self_attn."))
            normed = rms_norm(x, t["post_attention_layernorm.weight"], self.eps)
            gate, up = dense(normed, t, "mlp.gate_proj"), dense(normed, t, "mlp.up_proj")
            x = x + dense(silu(gate) * up, t, "mlp.down_proj")
            states.append(x)
        states[-1] = rms_norm(x, tensors["model.norm.weight"], self.eps)
        return states

    def logits(self, tensors: Tensors, tokens: ArrayLike) -> Floats:
        """[length, vocab]; without a head of its own the embedding is the head."""
        head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
        return self.hidden(tensors, tokens)[-1] @ head.T


def read_llama2c(path: Path) -> tuple[Llama, dict[str, Floats]]:
    """A llama2.c file of version 0: seven integers, then each kind of weight for all layers."""
    header = np.fromfile(path, np.int32, 7).tolist()
    hidden, inner, layers, q_heads, kv_heads, vocab, context = header
    values = np.fromfile(path, np.float32, offset=28).astype(np.float64)
    head_dim = hidden // q_heads
    kv_dim = kv_heads * head_dim
    place = 0

    def take(*shape: int) -> Floats:
        nonlocal place
        place += (size := int(np.prod(shape)))
        return values[place - size : place].reshape(shape)

    tensors = {"model.embed_tokens.weight": take(abs(vocab), hidden)}
    for name, *shape in (
        ("input_layernorm", hidden),
        ("self_attn.q_proj", hidden, hidden),
        ("self_attn.k_proj", kv_dim, hidden),
        ("self_attn.v_proj", kv_dim, hidden),
        ("self_attn.o_proj", hidden, hidden),
        ("post_attention_layernorm", hidden),
        ("mlp.gate_proj", inner, hidden),
        ("mlp.down_proj", hidden, inner),
        ("mlp.up_proj", inner, hidden),
    ):
        for i, weight in enumerate(take(layers, *shape)):
            tensors[f"model.layers.{i}.{name}.weight"] = weight
    tensors["model.norm.weight"] = take(hidden)
    take(2, context, head_dim // 2)  # cosines and sines, which llama2.c itself computes anew
    if vocab < 0:  # the sign says that the head is not the embedding
        tensors["lm_head.weight"] = take(-vocab, hidden)
    assert place == len(values)
    frequencies = rope_frequencies(head_dim)
    return Llama(layers, q_heads, kv_heads, frequencies, pairs="adjacent"), tensors


def numpy_llama(path: Path, tokens: ArrayLike) -> Floats:
    """Logits [length, vocab] of a llama2.c file of version 0."""
    model, tensors = read_llama2c(path)
    return model.logits(tensors, tokens)
