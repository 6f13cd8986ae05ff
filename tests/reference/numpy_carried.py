"""A transformer that nobody ships, in which values outlive their layer.

Two layers run three times, each use with a low-rank part of its own. Three streams of hidden states
stand side by side; a layer reads a weighted sum of them and adds to each of them. It has two
attentions: one with a window, whose values are its normed keys, and one whose keys and values the
last two layers take from those two before. Every layer sees the embedding, an embedding of its own
and what the first layer gave; some gates of the feed-forward are cut off below a threshold.
"""

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .numpy_blocks import attention, rms_norm, silu
from .numpy_tensors import Floats, Tensors, dense, heads, merged, within

VOCAB, HIDDEN, LAYERS, STREAMS = 64, 16, 6, 3
HEADS, KV_HEADS, HEAD_DIM, INNER = 4, 2, 8, 24
OWN, RANK, WINDOW, THETA, EPS = 6, 2, 5, 100.0, 1e-3
TURNING, SPARSITY = 0.5, 0.6

SPEC = """
weights = "model.safetensors"

[dims]
vocab        = 64
hidden       = 16
layers       = 6
heads        = 4
kv_heads     = 2
head_dim     = 8
intermediate = 24
context      = 128
streams      = 3
own          = 6

[modules]
embed  = { kind = "embedding" }
logits = { kind = "head" }

[decoder]
stem    = \"\"\"
e = embed(tokens)
x = concat(e, alike(spread(twice(e)), e))
\"\"\"
pattern = "first if i == 0 else later"
head    = \"\"\"
x = x[:hidden] + total(x[hidden:]) / (streams - 1)
logits(norm(x))
\"\"\"

[decoder.variants.first]
layer = \"\"\"
u = read(x, read_weights(x))
n = attn_norm(u)
y = attn(n) + local(n)
y = y + ffn(ffn_norm(u + y)) + lora_up(lora_down(y))
y = y + own_up(own_gate(y) * (own_table(tokens) + own_project(e)))
first = y
x = x + write(y, write_weights(x))
\"\"\"

[decoder.variants.later]
layer = \"\"\"
u = read(x, read_weights(x))
n = attn_norm(u)
y = attn(n) + local(n)
y = y + ffn(ffn_norm(u + y)) + lora_up(lora_down(y))
y = y + own_up(own_gate(y) * (own_table(tokens) + own_project(e)))
x = x + write(y + 0.5 * first, write_weights(x))
\"\"\"

[decoder.modules]
concat        = { kind = "concat" }
twice         = { kind = "repeat", times = "streams - 1" }
spread        = { kind = "block_linear", blocks = "streams - 1", inputs = 32, outputs = 32 }
alike         = { kind = "rescale", parts = "streams - 1" }
total         = { kind = "sum", parts = "streams - 1" }
read          = { kind = "mix", inputs = "streams", outputs = 1 }
read_weights  = { kind = "linear", inputs = "hidden * streams", outputs = "streams" }
write         = { kind = "mix", inputs = 1, outputs = "streams" }
write_weights = { kind = "linear", inputs = "hidden * streams", outputs = "streams" }
attn_norm     = { kind = "rms", eps = 1e-3 }
ffn_norm      = { kind = "rms", eps = 1e-3 }
norm          = { kind = "rms", eps = 1e-3 }
ffn           = { kind = "gated", sparsity = "0.6 if i < 3 else 0" }
lora_down     = { kind = "linear", outputs = 2 }
lora_up       = { kind = "linear", inputs = 2 }
own_table     = { kind = "embedding", width = "own" }
own_project   = { kind = "linear", outputs = "own" }
own_gate      = { kind = "linear", outputs = "own" }
own_up        = { kind = "linear", inputs = "own" }

[decoder.modules.attn]
kind     = "attention"
kv_layer = "i - 2 if i >= 4 else none"

[decoder.modules.attn.position]
kind    = "rope"
theta   = 100
scaling = { rope_type = "proportional", partial_rotary_factor = 0.5 }

[decoder.modules.local]
kind        = "attention"
window      = 5
tied_values = true
v_norm      = { kind = "rms", eps = 1e-3, weight = false }

[tensors]
"embed"                     = "embed"
"logits"                    = "logits"
"decoder.spread"            = "spread.{e}"
"decoder.norm"              = "norm"
"decoder.{i}.own_table"     = { from = "own_table", layers = "layers", axis = 1 }
"decoder.{i}.own_project"   = { from = "own_project", layers = "layers" }
"decoder.{i}.lora_down"     = "uses.{i}.down"
"decoder.{i}.lora_up"       = "uses.{i}.up"
"decoder.{i}.read_weights"  = "layers.{i % 2}.read"
"decoder.{i}.write_weights" = "layers.{i % 2}.write"
"decoder.{i}.attn_norm"     = "layers.{i % 2}.attn_norm"
"decoder.{i}.ffn_norm"      = "layers.{i % 2}.ffn_norm"
"decoder.{i}.attn.q"        = "layers.{i % 2}.attn.q"
"decoder.{i}.attn.k"        = "layers.{i % 2}.attn.k"
"decoder.{i}.attn.v"        = "layers.{i % 2}.attn.v"
"decoder.{i}.attn.o"        = "layers.{i % 2}.attn.o"
"decoder.{i}.local.q"       = "layers.{i % 2}.local.q"
"decoder.{i}.local.k"       = "layers.{i % 2}.local.k"
"decoder.{i}.local.o"       = "layers.{i % 2}.local.o"
"decoder.{i}.ffn.gate"      = "layers.{i % 2}.gate"
"decoder.{i}.ffn.up"        = "layers.{i % 2}.up"
"decoder.{i}.ffn.down"      = "layers.{i % 2}.down"
"decoder.{i}.own_gate"      = "layers.{i % 2}.own_gate"
"decoder.{i}.own_up"        = "layers.{i % 2}.own_up"
"""


def _turned(x: Floats) -> Floats:
    """Halves of each head rotated: of the pairs the first share, at the frequencies of them all."""
    frequencies = THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    frequencies[int(TURNING * HEAD_DIM // 2) :] = 0
    angles = np.outer(np.arange(len(x)), frequencies)[:, None]
    a, b = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _feed_forward(x: Floats, t: Tensors, sparse: bool) -> Floats:
    gate = dense(x, t, "gate")
    if sparse:
        mean, deviation = gate.mean(-1, keepdims=True), gate.std(-1, keepdims=True)
        gate = np.maximum(gate - mean - deviation * NormalDist().inv_cdf(SPARSITY), 0)
    return dense(silu(gate) * dense(x, t, "up"), t, "down")


def _local(x: Floats, t: Tensors) -> Floats:
    q, k = heads(dense(x, t, "q"), HEADS), heads(dense(x, t, "k"), KV_HEADS)
    values = k / np.sqrt((k * k).mean(-1, keepdims=True) + EPS)
    return dense(merged(attention(q, k, values, window=WINDOW)), t, "o")


def numpy_carried(params: dict[str, np.ndarray], tokens: ArrayLike) -> Floats:
    """Logits [length, vocab] of tokens [length]."""
    tensors = {name: np.asarray(array, np.float64) for name, array in params.items()}
    ids = np.asarray(tokens)
    e = tensors["embed.weight"][ids]
    streams = [e]
    for j in range(STREAMS - 1):
        y = e @ tensors[f"spread.{j}.weight"].T
        square = np.maximum((y * y).mean(-1, keepdims=True), 1e-5)
        streams.append(y * np.sqrt((e * e).mean(-1, keepdims=True) / square))
    kept: list[tuple[Floats, Floats]] = []
    first = np.zeros_like(e)
    for i in range(LAYERS):
        t, use = within(tensors, f"layers.{i % 2}."), within(tensors, f"uses.{i}.")
        x = np.concatenate(streams, axis=-1)
        reading, writing = dense(x, t, "read"), dense(x, t, "write")
        u = sum(reading[:, j : j + 1] * streams[j] for j in range(STREAMS))
        n = rms_norm(u, t["attn_norm.weight"], EPS)
        at = within(t, "attn.")
        own = heads(dense(n, at, "k"), KV_HEADS), heads(dense(n, at, "v"), KV_HEADS)
        kept.append((_turned(own[0]), own[1]) if i < 4 else kept[i - 2])
        attended = attention(_turned(heads(dense(n, at, "q"), HEADS)), *kept[i])
        y = dense(merged(attended), at, "o") + _local(n, within(t, "local."))
        fed = _feed_forward(rms_norm(u + y, t["ffn_norm.weight"], EPS), t, i < 3)
        y = y + fed + dense(dense(y, use, "down"), use, "up")
        table = tensors["own_table.weight"][ids][:, i * OWN : (i + 1) * OWN]
        projected = e @ tensors["own_project.weight"][i * OWN : (i + 1) * OWN].T
        y = y + dense(dense(y, t, "own_gate") * (table + projected), t, "own_up")
        added = y + 0.5 * first
        first = y if i == 0 else first
        streams = [streams[j] + writing[:, j : j + 1] * added for j in range(STREAMS)]
    x = streams[0] + sum(streams[1:]) / (STREAMS - 1)
    return rms_norm(x, tensors["norm.weight"], EPS) @ tensors["logits.weight"].T


def carried_params(seed: int) -> dict[str, NDArray[np.float32]]:
    """Parameters large enough that any mistake in the wiring shows in the logits."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (VOCAB, HIDDEN), "logits": (VOCAB, HIDDEN), "norm": (HIDDEN,),
        "own_table": (VOCAB, LAYERS * OWN), "own_project": (LAYERS * OWN, HIDDEN),
    }  # fmt: skip
    shapes |= {f"spread.{j}": (HIDDEN, HIDDEN) for j in range(STREAMS - 1)}
    for i in range(LAYERS):
        shapes |= {f"uses.{i}.down": (RANK, HIDDEN), f"uses.{i}.up": (HIDDEN, RANK)}
    wide, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for i in range(2):
        own = {
            "read": (STREAMS, STREAMS * HIDDEN), "write": (STREAMS, STREAMS * HIDDEN),
            "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,),
            "attn.q": (wide, HIDDEN), "attn.k": (keys, HIDDEN), "attn.v": (keys, HIDDEN),
            "attn.o": (HIDDEN, wide), "local.q": (wide, HIDDEN), "local.k": (keys, HIDDEN),
            "local.o": (HIDDEN, wide), "gate": (INNER, HIDDEN), "up": (INNER, HIDDEN),
            "down": (HIDDEN, INNER), "own_gate": (OWN, HIDDEN), "own_up": (HIDDEN, OWN),
        }  # fmt: skip
        shapes |= {f"layers.{i}.{name}": shape for name, shape in own.items()}
    rng = np.random.default_rng(seed)
    params = {}
    for name, shape in shapes.items():
        scale = 1.0 if name in ("embed", "own_table") else 0.7 / math.sqrt(shape[-1])
        values = rng.normal(0, scale, shape) if len(shape) == 2 else rng.normal(1, 0.3, shape)
        params[f"{name}.weight"] = values.astype(np.float32)
    return params
