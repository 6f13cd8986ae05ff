"""A transformer that nobody ships, to show that a wiring needs a spec and no code.

Four layers, each adding attention and a scaled feed-forward network of its input x:

    even: x + attn(rms(x)) + s ffn(ln(x))    rotation of half of each head, gated tanh-gelu
    odd:  x + rms(attn(x)) + s ffn(ln(x))    ALiBi in a window of 7, plain squared relu with biases

with s = 0.3 sqrt(2 / layers). The embedding is scaled by sqrt(hidden) and layer-normed; the head is
untied, has a bias, and its logits are divided by 1.7. Every norm has an eps that shows.
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .numpy_blocks import attention, gelu_tanh, relu_squared, rms_norm
from .numpy_positions import Floats, alibi_slopes_floor, rope
from .numpy_tensors import Tensors, centre, dense, heads, merged, within

VOCAB, HIDDEN, INNER, LAYERS = 96, 32, 48, 4
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
ROPE_THETA, ROTARY_DIM, WINDOW = 5000.0, HEAD_DIM // 2, 7
FFN_SCALE, LOGITS_DIVISOR, EPS = 0.3 * math.sqrt(2 / LAYERS), 1.7, 1e-3


def attend(x: Floats, t: Tensors, even: bool) -> Floats:
    """Attention of four query heads on two key heads."""
    q, k, v = (
        heads(dense(x, t, n), c) for n, c in zip("qkv", (HEADS, KV_HEADS, KV_HEADS), strict=True)
    )
    if even:
        positions = np.arange(len(x))
        q, k = (rope(y, positions, ROPE_THETA, rotary_dim=ROTARY_DIM) for y in (q, k))
        return dense(merged(attention(q, k, v)), t, "o")
    slopes = alibi_slopes_floor(HEADS)
    return dense(merged(attention(q, k, v, window=WINDOW, slopes=slopes)), t, "o")


def feed_forward(x: Floats, t: Tensors, even: bool) -> Floats:
    """Gated in even layers, plain in odd ones."""
    up = dense(x, t, "up")
    inner = gelu_tanh(dense(x, t, "gate")) * up if even else relu_squared(up)
    return dense(inner, t, "down")


def numpy_forward(params: dict[str, np.ndarray], tokens: ArrayLike) -> Floats:
    """Logits [length, vocab] of tokens [length]."""
    tensors = {name: np.asarray(array, np.float64) for name, array in params.items()}
    x = tensors["embed.weight"][np.asarray(tokens)] * math.sqrt(HIDDEN)
    x = centre(x, tensors, "decoder.embed_norm", EPS)
    for i in range(LAYERS):
        t = within(tensors, f"decoder.{i}.")
        even = i % 2 == 0
        attended = rms_norm(x, t["attn_norm.weight"], EPS) if even else x
        attended = attend(attended, within(t, "attn."), even)
        if not even:
            attended = rms_norm(attended, t["attn_post.weight"], EPS)
        fed = feed_forward(centre(x, t, "ffn_norm", EPS), within(t, "ffn."), even)
        x = x + attended + FFN_SCALE * fed
    return (
        dense(rms_norm(x, tensors["decoder.norm.weight"], EPS), tensors, "logits") / LOGITS_DIVISOR
    )


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "embed.weight", (VOCAB, HIDDEN)
    norms = ["decoder.embed_norm.weight", "decoder.embed_norm.bias", "decoder.norm.weight"]
    for i in range(LAYERS):
        layer = f"decoder.{i}."
        norms += [layer + ("attn_post" if i % 2 else "attn_norm") + ".weight"]
        norms += [layer + "ffn_norm.weight", layer + "ffn_norm.bias"]
        yield layer + "attn.q.weight", (HEADS * HEAD_DIM, HIDDEN)
        yield layer + "attn.k.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield layer + "attn.v.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield layer + "attn.o.weight", (HIDDEN, HEADS * HEAD_DIM)
        yield layer + "ffn.up.weight", (INNER, HIDDEN)
        yield layer + "ffn.down.weight", (HIDDEN, INNER)
        if i % 2:
            yield layer + "ffn.up.bias", (INNER,)
            yield layer + "ffn.down.bias", (HIDDEN,)
        else:
            yield layer + "ffn.gate.weight", (INNER, HIDDEN)
    yield from ((name, (HIDDEN,)) for name in norms)
    yield "logits.weight", (VOCAB, HIDDEN)
    yield "logits.bias", (VOCAB,)


def random_params(seed: int) -> dict[str, NDArray[np.float32]]:
    """Parameters large enough that any mistake in the wiring shows in the logits."""
    rng = np.random.default_rng(seed)
    params = {}
    for name, shape in _shapes():
        if len(shape) == 2 and name != "embed.weight":
            values = rng.normal(0, 1.2 / math.sqrt(shape[1]), shape)
        else:
            values = rng.normal(float("norm.weight" in name or "post.weight" in name), 0.4, shape)
        params[name] = values.astype(np.float32)
    return params
