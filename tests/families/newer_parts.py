"""Parts of the newer decoders in NumPy, and the shapes of their tensors."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.reference import numpy_moe
from tests.reference.numpy_blocks import mask, relu_squared, rms_norm, sigmoid, silu, softmax
from tests.reference.numpy_positions import Floats
from tests.reference.numpy_tensors import Tensors, dense, heads, merged, within

from .llama_line import LLAMA, Rotate, affine, llama_shapes, turn
from .tiny import DIM, HEADS, HIDDEN, Shapes

EPS, WINDOW, WIDTH, EXPERTS = 1e-5, 12, 20, 6
TYPES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
CONFIG = LLAMA | {"rms_norm_eps": EPS, "head_dim": DIM, "hidden_act": "silu"}
ROUTED = CONFIG | {
    "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH, "n_routed_experts": EXPERTS,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
}  # fmt: skip
# Where the router's keys have other names.
_OWN = ("n_routed_experts", "first_k_dense_replace", "routed_scaling_factor", "norm_topk_prob")
OTHER = {name: value for name, value in ROUTED.items() if name not in _OWN}
BEFORE = ("input_layernorm", "post_attention_layernorm")

type Part = Callable[[Floats, Tensors], Floats]
type Layer = Callable[[Floats, Tensors, int], Floats]


def rms(x: Floats, t: Tensors, name: str) -> Floats:
    return rms_norm(x, t[f"{name}.weight"], EPS)


def attend(
    x: Floats,
    t: Tensors,
    rotate: Rotate = lambda x: x,
    normed: str = "",
    window: int | None = None,
    scale: float = DIM**-0.5,
    cap: float = 0.0,
    before: Callable[[Floats, Tensors], Floats] = lambda out, t: out,
) -> Floats:
    """Self-attention with sinks if there are any; `before` is what comes before `o`."""
    q, k, v = (dense(x, t, f"self_attn.{part}_proj") for part in "qkv")
    if normed == "width":
        q, k = rms(q, t, "self_attn.q_norm"), rms(k, t, "self_attn.k_norm")
    q, k = heads(q, HEADS), k.reshape(len(x), -1, DIM)
    v = heads(v, k.shape[1])
    if normed == "head":
        q, k = rms(q, t, "self_attn.q_norm"), rms(k, t, "self_attn.k_norm")
    q, k, v = (np.repeat(y, HEADS // y.shape[1], axis=1) for y in (rotate(q), rotate(k), v))
    scores = np.einsum("qhd,khd->hqk", q, k) * scale
    scores = cap * np.tanh(scores / cap) if cap else scores
    scores = np.where(mask(len(x), len(x), True, window), scores, -np.inf)
    sinks = [t[name] for name in t if name in ("self_attn.sinks", "self_attn.attention_sink_bias")]
    for sink in sinks:
        column = np.broadcast_to(sink[:, None, None], (HEADS, len(x), 1))
        scores = np.concatenate([scores, column], axis=-1)
    out = np.einsum("hqk,khd->qhd", softmax(scores)[..., : len(x)], v)
    return dense(before(merged(out), t), t, "self_attn.o_proj")


def gated(x: Floats, t: Tensors, name: str = "mlp", act: Any = silu) -> Floats:
    inner = act(dense(x, t, f"{name}.gate_proj")) * dense(x, t, f"{name}.up_proj")
    return dense(inner, t, f"{name}.down_proj")


def routed(
    x: Floats,
    t: Tensors,
    scale: float = 2.5,
    renormalize: bool = True,
    correct: str = "mlp.gate.e_score_correction_bias",
    router: str = "mlp.gate",
    on_logits: bool = False,
    experts: str = "mlp.experts",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Floats:
    """Two experts of a token by the sigmoids of their scores, and a bias for the choice."""
    choices = []
    for logits in dense(x, t, router):
        scores = sigmoid(logits)
        bias = t.get(correct, 0.0)
        best = numpy_moe.best((logits if on_logits else scores) + bias, 2)
        total = sum(scores[e] for e in best) if renormalize else 1.0
        choices.append({e: scale * scores[e] / total for e in best})

    def expert(e: int, row: Floats) -> Floats:
        one = within(t, f"{experts}.{e}.")
        inner = silu(dense(row, one, names[0])) * dense(row, one, names[1])
        return dense(inner, one, names[2])

    return numpy_moe.mixture(x, choices, expert)


def sandwiched(x: Floats, t: Tensors, names: tuple[str, ...], attn: Part, ffn: Part) -> Floats:
    """Norms before both branches, and after them where four are named."""
    x = x + rms_of(attn(rms(x, t, names[0]), t), t, names[2:3])
    return x + rms_of(ffn(rms(x, t, names[1]), t), t, names[3:4])


def rms_of(x: Floats, t: Tensors, names: tuple[str, ...]) -> Floats:
    return rms(x, t, names[0]) if names else x


def in_layers(shapes: Callable[[str, int], Shapes]) -> Shapes:
    found: Shapes = {}
    for i in range(2):
        found |= shapes(f"model.layers.{i}.", i)
    return found


def moe(
    layer: str,
    width: int = WIDTH,
    router: str = "mlp.gate",
    correct: str = "mlp.gate.e_score_correction_bias",
    shared: bool = True,
    experts: str = "mlp.experts",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Shapes:
    shapes = affine(layer + router, EXPERTS, HIDDEN)
    shapes |= {layer + correct: (EXPERTS,)} if correct else {}
    where = [f"{layer}{experts}.{e}" for e in range(EXPERTS)]
    where += [f"{layer}mlp.shared_experts"] if shared else []
    for one in where:
        for name in names[:2]:
            shapes |= affine(f"{one}.{name}", width, HIDDEN)
        shapes |= affine(f"{one}.{names[2]}", HIDDEN, width)
    return shapes


def qk(layer: str, q: int = DIM, k: int = DIM) -> Shapes:
    return {f"{layer}self_attn.q_norm.weight": (q,), f"{layer}self_attn.k_norm.weight": (k,)}


def dense_or_moe(dense_layers: int = 1, norms: Any = BEFORE, **how: Any) -> Shapes:
    """The llama line's names; experts from a layer on."""
    shapes = llama_shapes(head=True, norms=dict.fromkeys(norms, False))
    for i in range(dense_layers, 2):
        layer = f"model.layers.{i}."
        shapes = {n: s for n, s in shapes.items() if not n.startswith(f"{layer}mlp.")}
        shapes |= moe(layer, **how)
    return shapes


def plain(attn: Part, ffn: Part, names: tuple[str, ...] = BEFORE) -> Layer:
    return lambda x, t, i: sandwiched(x, t, names, attn, ffn)


def shared(x: Floats, t: Tensors) -> Floats:
    return gated(x, t, "mlp.shared_experts")


def expert_layer(x: Floats, t: Tensors, attn: Part, **how: Any) -> Floats:
    """A layer that is dense or has experts, as its tensors say."""
    is_sparse = "mlp.shared_experts.up_proj.weight" in t
    ffn: Part = (lambda n, t: routed(n, t, **how) + shared(n, t)) if is_sparse else gated
    return sandwiched(x, t, BEFORE, attn, ffn)


def adjacent(x: Floats, t: Tensors) -> Floats:
    return attend(x, t, turn(pairs="adjacent"))


def sub_normed(x: Floats, t: Tensors) -> Floats:
    inner = relu_squared(dense(x, t, "mlp.gate_proj")) * dense(x, t, "mlp.up_proj")
    return dense(rms(inner, t, "mlp.ffn_sub_norm"), t, "mlp.down_proj")


def xielu(x: Floats, t: Tensors) -> Floats:
    y = dense(x, t, "mlp.up_proj")
    a, b = (np.log1p(np.exp(t[f"mlp.act_fn.alpha_{sign}"])) for sign in "pn")
    y = 0.5 * y + np.where(y > 0, a * y * y, (0.5 + b) * (np.expm1(np.minimum(y, 0)) - y))
    return dense(y, t, "mlp.down_proj")


def windowed(i: int, **how: Any) -> Part:
    """A window and rotary positions in the first layer, neither in the second."""
    kind: dict[str, Any] = {"window": WINDOW, "rotate": turn()} if i == 0 else {}
    return lambda x, t: attend(x, t, **kind, **how)


def without(shapes: Shapes, *parts: str) -> Shapes:
    return {n: s for n, s in shapes.items() if not any(part in n for part in parts)}
