"""Gates, scales and norms that a specification can put into a layer, against NumPy, and in whatever
chunks a prompt is computed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer import LLM
from tests.reference import numpy_moe
from tests.reference.numpy_blocks import (
    Floats,
    attention,
    chosen_keys,
    layer_norm,
    linear,
    rms_norm,
    sigmoid,
    silu,
    tanh,
)
from tests.reference.numpy_positions import rope
from tests.reference.numpy_tensors import Tensors, dense, heads, layers_of, merged, within

from .llama_line import KV_HEADS, LLAMA, TOKENS, affine, llama_shapes
from .tiny import DIM, HEADS, HIDDEN, INNER, Shapes, close, written

EPS, VALUE, CHUNK = 1e-5, 6, 16
CONFIG = LLAMA | {"rms_norm_eps": EPS, "heads_of_layers": [4, 2], "rotated_layers": [1, 0]}
AT = np.arange(len(TOKENS))
ATTN, MLP = "model.layers.{i}.self_attn.", "model.layers.{i}.mlp."

type Block = Callable[[Floats, Tensors, int], Floats]


def l2(x: Floats) -> Floats:
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + EPS)


def bare(x: Floats) -> Floats:
    return rms_norm(x, 1.0, EPS)


def in_chunks(q: Floats, k: Floats, v: Floats) -> Floats:
    parts = [slice(begin, begin + CHUNK) for begin in range(0, len(q), CHUNK)]
    return np.concatenate([attention(q[part], k[part], v[part]) for part in parts])


def mlp(x: Floats, t: Tensors, i: int) -> Floats:
    inner = silu(dense(x, t, "mlp.gate_proj")) * dense(x, t, "mlp.up_proj")
    return dense(inner, t, "mlp.down_proj")


def attn(x: Floats, t: Tensors, i: int) -> Floats:
    q, k, v = (dense(x, t, f"self_attn.{part}_proj") for part in "qkv")
    q, k, v = heads(q, HEADS), heads(k, KV_HEADS), heads(v, KV_HEADS)
    out = attention(rope(q, AT, 5000.0), rope(k, AT, 5000.0), v)
    return dense(merged(out), t, "self_attn.o_proj")


GATED = """
[decoder]
layer = '''
x = x + scale(attn(attn_norm(x)))
x = x + scalar(ffn(ffn_norm(x)))
'''
[decoder.modules]
scale  = { kind = "scale" }
scalar = { kind = "scale", size = 1, plus_one = true }
[decoder.modules.attn]
value_dim   = 6
low_rank    = 3
temperature = { beta = 0.5, span = 8, offset = 1 }
out_norm    = { kind = "rms", eps = 1e-5 }
gate        = { per = "element", bias = true }
[tensors]
"decoder.{i}.scale"         = "model.layers.{i}.scale"
"decoder.{i}.scalar"        = "model.layers.{i}.scalar"
"decoder.{i}.attn.out_norm" = "model.layers.{i}.self_attn.out_norm"
"decoder.{i}.attn.gate"     = "model.layers.{i}.self_attn.gate"
"decoder.{i}.attn.q_low.down" = "model.layers.{i}.self_attn.q_low.0"
"decoder.{i}.attn.q_low.up"   = "model.layers.{i}.self_attn.q_low.1"
"decoder.{i}.attn.k_low.down" = "model.layers.{i}.self_attn.k_low.0"
"decoder.{i}.attn.k_low.up"   = "model.layers.{i}.self_attn.k_low.1"
"decoder.{i}.attn.v_low.down" = "model.layers.{i}.self_attn.v_low.0"
"decoder.{i}.attn.v_low.up"   = "model.layers.{i}.self_attn.v_low.1"
"""


def gated_shapes(layer: str) -> Shapes:
    shapes = affine(f"{layer}self_attn.v_proj", KV_HEADS * VALUE, HIDDEN)
    shapes |= affine(f"{layer}self_attn.o_proj", HIDDEN, HEADS * VALUE)
    shapes |= affine(f"{layer}self_attn.gate", HEADS * VALUE, HIDDEN, bias=True)
    for name, rows in (("q", HEADS * DIM), ("k", KV_HEADS * DIM), ("v", KV_HEADS * VALUE)):
        shapes |= affine(f"{layer}self_attn.{name}_low.0", 3, HIDDEN)
        shapes |= affine(f"{layer}self_attn.{name}_low.1", rows, 3)
    norms: Shapes = {f"{layer}scale.weight": (HIDDEN,), f"{layer}scalar.weight": (1,)}
    return shapes | norms | {f"{layer}self_attn.out_norm.weight": (VALUE,)}


def low_rank(x: Floats, t: Tensors, part: str) -> Floats:
    return dense(dense(x, t, f"self_attn.{part}_low.0"), t, f"self_attn.{part}_low.1")


def gated(x: Floats, t: Tensors, i: int) -> Floats:
    q, k, v = (dense(x, t, f"self_attn.{part}_proj") + low_rank(x, t, part) for part in "qkv")
    q, k, v = heads(q, HEADS), heads(k, KV_HEADS), heads(v, KV_HEADS)
    q = rope(q, AT, 5000.0) * (1 + 0.5 * np.log1p((AT + 1) // 8))[:, None, None]
    out = rms_norm(attention(q, rope(k, AT, 5000.0), v), t["self_attn.out_norm.weight"], EPS)
    out = merged(out) * sigmoid(dense(x, t, "self_attn.gate"))
    return t["scale.weight"] * dense(out, t, "self_attn.o_proj")


def scaled_mlp(x: Floats, t: Tensors, i: int) -> Floats:
    return (1 + t["scalar.weight"]) * mlp(x, t, i)


CHUNKED = """
[decoder]
layer = '''
x = x + per_head(attn(length(attn_norm(x))))
x = x + ffn(ffn_norm(x))
'''
[decoder.modules]
length    = { kind = "l2", eps = 1e-5 }
per_head  = { kind = "scale", size = "heads" }
attn_norm = { weight = false }
[decoder.modules.attn]
chunk   = 16
qk_norm = { kind = "l2", eps = 1e-5, rotated = true, weight = false }
scale   = 2.0
gate    = { per = "head", activation = "tanh", scale = 2.0 }
[tensors]
"decoder.{i}.per_head"       = "model.layers.{i}.per_head"
"decoder.{i}.attn.{q,gate}"  = { from = "model.layers.{i}.self_attn.q_gate", groups = "heads" }
"""


def chunked_shapes(layer: str) -> Shapes:
    shapes = affine(f"{layer}self_attn.q_gate", HEADS * (DIM + 1), HIDDEN)
    return shapes | {f"{layer}per_head.weight": (HEADS,)}


def chunked(x: Floats, t: Tensors, i: int) -> Floats:
    x = l2(x)
    both = heads(dense(x, t, "self_attn.q_gate"), HEADS)
    k, v = (heads(dense(x, t, f"self_attn.{part}_proj"), KV_HEADS) for part in "kv")
    q, k = (l2(rope(each, AT, 5000.0)) for each in (both[..., :DIM], k))
    out = in_chunks(q * 2.0 * np.sqrt(DIM), k, v) * 2.0 * tanh(both[..., DIM:])
    y = dense(merged(out), t, "self_attn.o_proj")
    return merged(heads(y, HEADS) * t["per_head.weight"][:, None])


PER_LAYER = """
[decoder.modules.attn]
heads    = "$heads_of_layers[i]"
position = { backward = true, when = "$rotated_layers[i] == 1" }
out_norm = { kind = "layer", over = "heads", eps = 1e-5, bias = true }
[decoder.modules.ffn]
kind       = "mlp"
activation = "xielu"
[tensors]
"decoder.{i}.attn.out_norm" = "model.layers.{i}.self_attn.out_norm"
"decoder.{i}.ffn.alpha_p"   = "model.layers.{i}.mlp.alpha_p"
"decoder.{i}.ffn.alpha_n"   = "model.layers.{i}.mlp.alpha_n"
"""


def per_layer_shapes(layer: str) -> Shapes:
    count = CONFIG["heads_of_layers"][int(layer.split(".")[2])]  # type: ignore[index]
    shapes = affine(f"{layer}self_attn.q_proj", count * DIM, HIDDEN)
    shapes |= affine(f"{layer}self_attn.o_proj", HIDDEN, count * DIM)
    norms: Shapes = {f"{layer}self_attn.out_norm.{n}": (count, DIM) for n in ("weight", "bias")}
    return shapes | norms | {f"{layer}mlp.alpha_{sign}": (1,) for sign in "pn"}


def per_layer(x: Floats, t: Tensors, i: int) -> Floats:
    q, k, v = (dense(x, t, f"self_attn.{part}_proj") for part in "qkv")
    q, k, v = heads(q, (4, 2)[i]), heads(k, KV_HEADS), heads(v, KV_HEADS)
    if i == 0:
        q, k = (rope(each, -AT, 5000.0) for each in (q, k))
    weight, bias = (t[f"self_attn.out_norm.{leaf}"] for leaf in ("weight", "bias"))
    out = layer_norm(attention(q, k, v), weight, bias, EPS)
    return dense(merged(out), t, "self_attn.o_proj")


def xielu(x: Floats, t: Tensors, i: int) -> Floats:
    y = dense(x, t, "mlp.up_proj")
    a, b = (np.log1p(np.exp(t[f"mlp.alpha_{sign}"])) for sign in "pn")
    y = 0.5 * y + np.where(y > 0, a * y * y, (0.5 + b) * (np.expm1(np.minimum(y, 0)) - y))
    return dense(y, t, "mlp.down_proj")


MOE = """
[dims]
experts             = 4
top_k               = 3
expert_intermediate = "intermediate"
[decoder.modules.ffn]
kind = "moe"
{keys}
[tensors]
"decoder.{i}.ffn.router"            = "model.layers.{i}.mlp.router"
"decoder.{i}.ffn.router.correction" = "model.layers.{i}.mlp.correction"
"decoder.{i}.ffn.experts.gate"      = "model.layers.{i}.mlp.experts.{e}.gate_proj"
"decoder.{i}.ffn.experts.up"        = "model.layers.{i}.mlp.experts.{e}.up_proj"
"decoder.{i}.ffn.experts.down"      = "model.layers.{i}.mlp.experts.{e}.down_proj"
"""
IDENTITY = MOE.replace(
    "{keys}", 'scoring = "softmax"\ncorrection_bias = "logits"\nidentity_experts = 2\nscale = 1.5'
)
WEIGHTED = MOE.replace("{keys}", 'scoring = "sigmoid"\nweighted = "input"')


def moe_shapes(count: int, correction: bool) -> Callable[[str], Shapes]:
    def shapes(layer: str) -> Shapes:
        shapes = affine(f"{layer}mlp.router", count, HIDDEN)
        for e in range(4):
            for name in ("gate_proj", "up_proj"):
                shapes |= affine(f"{layer}mlp.experts.{e}.{name}", INNER, HIDDEN)
            shapes |= affine(f"{layer}mlp.experts.{e}.down_proj", HIDDEN, INNER)
        return shapes | ({f"{layer}mlp.correction": (count,)} if correction else {})

    return shapes


def expert(e: int, x: Floats, t: Tensors) -> Floats:
    t = within(t, f"mlp.experts.{e}.")
    return dense(silu(dense(x, t, "gate_proj")) * dense(x, t, "up_proj"), t, "down_proj")


def identity(x: Floats, t: Tensors, i: int) -> Floats:
    routed = []
    for row in dense(x, t, "mlp.router"):
        scores = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        best = numpy_moe.best(row + t["mlp.correction"], 3)
        routed.append({e: 1.5 * scores[e] for e in best})
    return numpy_moe.mixture(x, routed, lambda e, row: row if e >= 4 else expert(e, row, t))


def weighted(x: Floats, t: Tensors, i: int) -> Floats:
    rows = []
    for row, logits in zip(x, dense(x, t, "mlp.router"), strict=True):
        best = numpy_moe.best(logits, 3)
        rows.append(sum(expert(e, row * sigmoid(logits[e]), t) for e in best))
    return np.stack(rows)


LATENT = """
[dims]
latent_rank = 12
nope_dim    = 8
rope_dim    = 4
value_dim   = 8
[decoder.modules.attn]
kind     = "latent_attention"
position = "none"
[tensors]
"decoder.{i}.attn.kv_a"      = "model.layers.{i}.self_attn.kv_a"
"decoder.{i}.attn.kv_a_norm" = "model.layers.{i}.self_attn.kv_a_norm"
"decoder.{i}.attn.kv_b"      = "model.layers.{i}.self_attn.kv_b"
"""


def latent_shapes(layer: str) -> Shapes:
    shapes = affine(f"{layer}self_attn.q_proj", HEADS * 12, HIDDEN)
    shapes |= affine(f"{layer}self_attn.kv_a", 16, HIDDEN)
    shapes |= affine(f"{layer}self_attn.kv_b", HEADS * 16, 12)
    return shapes | {f"{layer}self_attn.kv_a_norm.weight": (12,)}


def latent(x: Floats, t: Tensors, i: int) -> Floats:
    q = heads(dense(x, t, "self_attn.q_proj"), HEADS)
    both = dense(x, t, "self_attn.kv_a")
    small = rms_norm(both[:, :12], t["self_attn.kv_a_norm.weight"], 1e-6)
    kv = heads(linear(small, t["self_attn.kv_b.weight"]), HEADS)
    shared = np.repeat(both[:, None, 12:], HEADS, axis=1)
    out = attention(q, np.concatenate([kv[..., :8], shared], axis=-1), kv[..., 8:])
    return dense(merged(out), t, "self_attn.o_proj")


DIFFERENTIAL = """
[decoder.modules.attn]
differential = { init = "0.8 - 0.6 * 2.718281828459045 ** (-0.3 * i)", eps = 1e-5 }
[tensors]
"decoder.{i}.attn.differential.lambda_q1" = "model.layers.{i}.self_attn.lambda_q1"
"decoder.{i}.attn.differential.lambda_k1" = "model.layers.{i}.self_attn.lambda_k1"
"decoder.{i}.attn.differential.lambda_q2" = "model.layers.{i}.self_attn.lambda_q2"
"decoder.{i}.attn.differential.lambda_k2" = "model.layers.{i}.self_attn.lambda_k2"
"""


def differential_shapes(layer: str) -> Shapes:
    return {f"{layer}self_attn.lambda_{name}": (DIM,) for name in ("q1", "k1", "q2", "k2")}


def differential(x: Floats, t: Tensors, i: int) -> Floats:
    """Query heads 0 and 1 less 2 and 3, of which each half reads one head of keys."""
    q, k, v = (dense(x, t, f"self_attn.{part}_proj") for part in "qkv")
    q, k = rope(heads(q, HEADS), AT, 5000.0), rope(heads(k, KV_HEADS), AT, 5000.0)
    q1, k1, q2, k2 = (t[f"self_attn.lambda_{name}"] for name in ("q1", "k1", "q2", "k2"))
    init = 0.8 - 0.6 * np.exp(-0.3 * i)
    both = v.reshape(len(x), 1, 2 * DIM)
    first, second = (attention(q[:, h : h + 2], k[:, h // 2][:, None], both) for h in (0, 2))
    out = bare(first - (np.exp(q1 @ k1) - np.exp(q2 @ k2) + init) * second) * (1 - init)
    return dense(merged(out), t, "self_attn.o_proj")


INDEXED = """
[decoder.modules.attn.indexer]
top_k    = 9
heads    = 5
head_dim = 12
eps      = 1e-4
position = { kind = "rope", dim = 6, theta = 300, pairs = "adjacent" }
[tensors]
"decoder.{i}.attn.indexer.{q,k,head_weights}" = "model.layers.{i}.self_attn.index"
"decoder.{i}.attn.indexer.k_norm"             = "model.layers.{i}.self_attn.index_norm"
"""


def indexed_shapes(layer: str) -> Shapes:
    shapes = affine(f"{layer}self_attn.index", 5 * 12 + 12 + 5, HIDDEN)
    return shapes | {f"{layer}self_attn.index_norm.{leaf}": (12,) for leaf in ("weight", "bias")}


def indexed(x: Floats, t: Tensors, i: int) -> Floats:
    index = dense(x, t, "self_attn.index")
    weight, bias = (t[f"self_attn.index_norm.{leaf}"] for leaf in ("weight", "bias"))
    index_k = layer_norm(index[:, None, 60:72], weight, bias, 1e-4)
    index_q, index_k = (
        rope(each, AT, 300.0, "adjacent", 6) for each in (heads(index[:, :60], 5), index_k)
    )
    q, k, v = (dense(x, t, f"self_attn.{part}_proj") for part in "qkv")
    q, k, v = heads(q, HEADS), heads(k, KV_HEADS), heads(v, KV_HEADS)
    q, k, out = rope(q, AT, 5000.0), rope(k, AT, 5000.0), []
    for at in AT:
        chosen = chosen_keys(index_q[at], index[at, 72:], index_k[: at + 1, 0], 9)
        out.append(attention(q[at : at + 1], k[chosen], v[chosen]))
    return dense(merged(np.concatenate(out)), t, "self_attn.o_proj")


def weighted_norm(x: Floats, t: Tensors) -> Floats:
    return rms_norm(x, t["input_layernorm.weight"], EPS)


CASES: dict[str, tuple[str, Callable[[str], Shapes], tuple[str, ...], Block, Block]] = {
    "gated": (GATED, gated_shapes, (), gated, scaled_mlp),
    "chunked": (CHUNKED, chunked_shapes, ("q_proj", "input_layernorm"), chunked, mlp),
    "per layer": (PER_LAYER, per_layer_shapes, ("gate_proj",), per_layer, xielu),
    "identity": (IDENTITY, moe_shapes(6, True), (".mlp.",), attn, identity),
    "weighted": (WEIGHTED, moe_shapes(4, False), (".mlp.",), attn, weighted),
    "differential": (DIFFERENTIAL, differential_shapes, (), differential, mlp),
    "indexed": (INDEXED, indexed_shapes, (), indexed, mlp),
    "latent": (LATENT, latent_shapes, ("k_proj", "v_proj"), latent, mlp),
}


@pytest.mark.parametrize("case", CASES)
def test_against_numpy(tmp_path: Path, case: str) -> None:
    text, more, dropped, attention_block, feed_forward = CASES[case]
    shapes = {n: s for n, s in llama_shapes(head=True).items() if not any(d in n for d in dropped)}
    for i in range(2):
        shapes |= more(f"model.layers.{i}.")
    tensors = written(tmp_path / "weights", CONFIG, shapes)
    spec = tmp_path / "own.toml"
    spec.write_text(f'family = "llama"\nweights = "{tmp_path / "weights"}"\n{text}')
    x = tensors["model.embed_tokens.weight"][TOKENS]
    for i, t in enumerate(layers_of(tensors)):
        normed = weighted_norm(x, t) if "input_layernorm.weight" in t else bare(x)
        x = x + attention_block(normed, t, i)
        x = x + feed_forward(rms_norm(x, t["post_attention_layernorm.weight"], EPS), t, i)
    wanted = dense(rms_norm(x, tensors["model.norm.weight"], EPS), tensors, "lm_head")
    passes = []
    hosted: dict[str, Any] = {"partition.host_kv_cache": 0.5} if case == "chunked" else {}
    for chunk, settings in ((len(TOKENS), {}), (7, {}), (1, hosted)):
        settings |= {"engine.prefill_chunk": chunk, "engine.mixed_chunk": 1, "engine.slots": 1}
        with LLM(spec, dtype="float32", **settings) as llm:
            passes.append(llm.logits([TOKENS.tolist()])[0])
        close(passes[-1], wanted)
