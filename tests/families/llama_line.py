"""What tests of decoders share: the names of the llama line, and its parts in NumPy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jinfer import LLM
from tests.reference.numpy_blocks import attention, silu
from tests.reference.numpy_positions import Floats, Pairs, rope
from tests.reference.numpy_tensors import Tensors, dense, heads, merged

from . import tiny
from .tiny import DIM, HEADS, HIDDEN, INNER, VOCAB, Shapes, close, written

KV_HEADS = 2
TOKENS = np.random.default_rng(5).integers(0, VOCAB, 40)
LLAMA = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 128,
    "rope_theta": 5000.0,
}  # fmt: skip

type Rotate = Callable[[Floats], Floats]


def check(
    folder: Path,
    config: dict[str, Any],
    shapes: Shapes,
    forward: Callable[[Tensors], Floats],
    overrides: dict[str, Any] | None = None,
) -> None:
    """Serves random tensors of these shapes, and compares the logits."""
    tensors = written(folder, config, shapes)
    got = LLM(folder, dtype="float32", **overrides or {}).logits([TOKENS.tolist()])[0]
    close(got, forward(tensors))


def affine(name: str, outputs: int, inputs: int, bias: bool = False) -> Shapes:
    """A projection's shapes; in this line most have no bias."""
    return tiny.linear(name, outputs, inputs, bias)


def norm(name: str, bias: bool = False) -> Shapes:
    """A norm's shapes."""
    return tiny.norm(name, bias=bias)


def llama_shapes(
    layers: int = 2,
    bias: str = "",
    norms: dict[str, bool] | None = None,
    mlp: bool = True,
    head: bool = False,
) -> Shapes:
    """The names of the llama line.

    Args:
        bias: which of q, k, v and o have one.
        norms: those of a layer and whether they have a bias; the final one has the first's.
        mlp: the feed-forward is gated, and its two projections are not fused.
        head: the vocabulary head is stored.
    """
    if norms is None:
        norms = {"input_layernorm": False, "post_attention_layernorm": False}
    shapes: Shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(layers):
        layer = f"model.layers.{i}."
        widths = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM, "o": HIDDEN}
        for part, width in widths.items():
            inputs = HEADS * DIM if part == "o" else HIDDEN
            shapes |= affine(f"{layer}self_attn.{part}_proj", width, inputs, part in bias)
        for name, biased in norms.items():
            shapes |= norm(layer + name, biased)
        for name in ("gate_proj", "up_proj") if mlp else ():
            shapes |= affine(f"{layer}mlp.{name}", INNER, HIDDEN)
        shapes |= affine(f"{layer}mlp.down_proj", HIDDEN, INNER)
    if norms:
        shapes |= norm("model.norm", next(iter(norms.values())))
    return shapes | ({"lm_head.weight": (VOCAB, HIDDEN)} if head else {})


def turn(theta: float = 5000.0, pairs: Pairs = "halves", dim: int = DIM) -> Rotate:
    """What rotates queries and keys."""
    return lambda x: rope(x, np.arange(len(x)), theta, pairs, dim)


def projected(x: Floats, t: Tensors, module: str = "self_attn") -> tuple[Floats, Floats, Floats]:
    """Queries, keys and values [length, heads, dim] by the names q_proj, k_proj, v_proj."""
    q, k, v = (dense(x, t, f"{module}.{part}_proj") for part in "qkv")
    return heads(q, HEADS), heads(k, KV_HEADS), heads(v, KV_HEADS)


def by_groups(fused: Floats) -> tuple[Floats, Floats, Floats]:
    """Queries, keys and values of a tensor that has them group of heads by group of heads."""
    group = HEADS // KV_HEADS
    fused = fused.reshape(len(fused), KV_HEADS, group + 2, DIM)
    return fused[:, :, :group].reshape(len(fused), HEADS, DIM), fused[:, :, -2], fused[:, :, -1]


def attend(x: Floats, t: Tensors, rotate: Rotate = lambda x: x, **how: Any) -> Floats:
    """Attention with the names q_proj, k_proj, v_proj, o_proj."""
    q, k, v = projected(x, t)
    return dense(merged(attention(rotate(q), rotate(k), v, **how)), t, "self_attn.o_proj")


def swiglu(x: Floats, t: Tensors) -> Floats:
    """The gated feed-forward."""
    inner = silu(dense(x, t, "mlp.gate_proj")) * dense(x, t, "mlp.up_proj")
    return dense(inner, t, "mlp.down_proj")


def embedded(tensors: Tensors, name: str = "model.embed_tokens.weight") -> Floats:
    """The vectors of TOKENS."""
    return tensors[name][TOKENS]
