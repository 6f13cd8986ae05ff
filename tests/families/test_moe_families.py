"""Families with a mixture of experts of which there is no golden, against passes in NumPy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reference import numpy_moe
from tests.reference.numpy_blocks import (
    attention,
    linear,
    mask,
    rms_norm,
    sigmoid,
    silu,
    softmax,
    swiglu_clamped,
)
from tests.reference.numpy_moe import Routed
from tests.reference.numpy_positions import (
    Floats,
    rope,
    rope_frequencies,
    yarn_attention_factor,
    yarn_frequencies,
)
from tests.reference.numpy_tensors import Tensors, centre, dense, heads, layers_of, merged, within

from .llama_line import (
    KV_HEADS,
    LLAMA,
    TOKENS,
    affine,
    attend,
    check,
    llama_shapes,
    turn,
)
from .tiny import DIM, HEADS, HIDDEN, INNER, Shapes

EXPERTS, TOP_K, WIDTH, SHARED, EPS = 6, 3, 12, 20, 1e-5
LENGTH = len(TOKENS)
MOE = LLAMA | {"rms_norm_eps": EPS, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
LOCAL = MOE | {"num_local_experts": EXPERTS, "num_experts": None}


def moe_shapes(names: Shapes, bias: str = "", norms: dict[str, bool] | None = None) -> Shapes:
    """The llama line's names with `names` in each layer, in the feed-forward's place."""
    kept = llama_shapes(bias=bias, norms=norms, head=True)
    kept = {name: shape for name, shape in kept.items() if ".mlp." not in name}
    return kept | {f"model.layers.{i}.{n}": shape for i in range(2) for n, shape in names.items()}


def one_by_one(prefix: str, width: int, gate: str, up: str, down: str) -> Shapes:
    shapes: Shapes = {}
    for e in range(EXPERTS):
        for name in (gate, up):
            shapes |= affine(f"{prefix}.{e}.{name}", width, HIDDEN)
        shapes |= affine(f"{prefix}.{e}.{down}", HIDDEN, width)
    return shapes


def rms(x: Floats, t: Tensors, name: str) -> Floats:
    return rms_norm(x, t[f"{name}.weight"], EPS)


def decoder(
    tensors: Tensors,
    block: Callable[[Floats, Tensors], Floats],
    attended: Callable[[Floats, Tensors, int], Floats],
    norm: Callable[[Floats, Tensors, str], Floats] = rms,
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> Floats:
    """Llama with another attention and feed-forward; scales of embedding, branches and logits."""
    x = tensors["model.embed_tokens.weight"][TOKENS] * scales[0]
    for i, t in enumerate(layers_of(tensors)):
        x = x + scales[1] * attended(norm(x, t, "input_layernorm"), t, i)
        x = x + scales[1] * block(norm(x, t, "post_attention_layernorm"), t)
    return dense(norm(x, tensors, "model.norm"), tensors, "lm_head") * scales[2]


def swiglu(x: Floats, t: Tensors, gate: str, up: str, down: str) -> Floats:
    return dense(silu(dense(x, t, gate)) * dense(x, t, up), t, down)


def routed(x: Floats, t: Tensors, router: str, rule: Callable[[Floats], Routed]) -> list[Routed]:
    return [rule(row) for row in dense(x, t, router)]


QWEN2 = MOE | {
    "architectures": ["Qwen2MoeForCausalLM"], "moe_intermediate_size": WIDTH,
    "shared_expert_intermediate_size": SHARED, "norm_topk_prob": False, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "use_sliding_window": False, "sliding_window": 16,
    "max_window_layers": 1,
}  # fmt: skip


def qwen2_shapes(dense_layers: list[int]) -> Shapes:
    names: Shapes = affine("mlp.gate", EXPERTS, HIDDEN)
    names |= one_by_one("mlp.experts", WIDTH, "gate_proj", "up_proj", "down_proj")
    names |= affine("mlp.shared_expert.gate_proj", SHARED, HIDDEN)
    names |= affine("mlp.shared_expert.up_proj", SHARED, HIDDEN)
    names |= affine("mlp.shared_expert.down_proj", HIDDEN, SHARED)
    names |= affine("mlp.shared_expert_gate", 1, HIDDEN)
    shapes = moe_shapes(names, bias="qkv")
    for i in dense_layers:
        shapes = {n: s for n, s in shapes.items() if f"layers.{i}.mlp." not in n}
        shapes |= {n: s for n, s in llama_shapes().items() if f"layers.{i}.mlp." in n}
    return shapes


@pytest.mark.parametrize("dense_layers", [[], [1]])
def test_qwen2_moe(tmp_path: Path, dense_layers: list[int]) -> None:
    """Shares of all experts, not made to sum to 1; a shared expert with a gate of its own."""
    parts = ("gate_proj", "up_proj", "down_proj")

    def block(x: Floats, t: Tensors) -> Floats:
        if "mlp.gate.weight" not in t:
            return swiglu(x, within(t, "mlp."), *parts)
        chosen = routed(x, t, "mlp.gate", lambda row: numpy_moe.softmax_then_top_k(row, TOP_K))
        out = numpy_moe.mixture(
            x, chosen, lambda e, row: swiglu(row, within(t, f"mlp.experts.{e}."), *parts)
        )
        shared = swiglu(x, within(t, "mlp.shared_expert."), *parts)
        return out + sigmoid(dense(x, t, "mlp.shared_expert_gate")) * shared

    config = QWEN2 | {"mlp_only_layers": dense_layers}
    check(tmp_path, config, qwen2_shapes(dense_layers), lambda t: decoder(t, block, turned))


def turned(x: Floats, t: Tensors, layer: int) -> Floats:
    return attend(x, t, turn())


def test_olmoe(tmp_path: Path) -> None:
    """One norm over all heads of q, one over those of k; shares not made to sum to 1."""
    names: Shapes = affine("mlp.gate", EXPERTS, HIDDEN)
    names |= one_by_one("mlp.experts", INNER, "gate_proj", "up_proj", "down_proj")
    names |= {
        "self_attn.q_norm.weight": (HEADS * DIM,),
        "self_attn.k_norm.weight": (KV_HEADS * DIM,),
    }

    def attended(x: Floats, t: Tensors, layer: int) -> Floats:
        q, k, v = (dense(x, t, f"self_attn.{n}_proj") for n in "qkv")
        q = rms_norm(q, t["self_attn.q_norm.weight"], EPS)
        k = rms_norm(k, t["self_attn.k_norm.weight"], EPS)
        out = attention(turn()(heads(q, HEADS)), turn()(heads(k, KV_HEADS)), heads(v, KV_HEADS))
        return dense(merged(out), t, "self_attn.o_proj")

    def block(x: Floats, t: Tensors) -> Floats:
        chosen = routed(x, t, "mlp.gate", lambda row: numpy_moe.softmax_then_top_k(row, TOP_K))
        parts = ("gate_proj", "up_proj", "down_proj")
        return numpy_moe.mixture(
            x, chosen, lambda e, row: swiglu(row, within(t, f"mlp.experts.{e}."), *parts)
        )

    config = MOE | {"architectures": ["OlmoeForCausalLM"], "norm_topk_prob": False}
    check(tmp_path, config, moe_shapes(names), lambda t: decoder(t, block, attended))


GRANITE = LOCAL | {
    "architectures": ["GraniteMoeForCausalLM"], "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0,
}  # fmt: skip
GRANITE_SHAPES = moe_shapes(
    {
        "block_sparse_moe.router.layer.weight": (EXPERTS, HIDDEN),
        "block_sparse_moe.input_linear.weight": (EXPERTS, 2 * INNER, HIDDEN),
        "block_sparse_moe.output_linear.weight": (EXPERTS, HIDDEN, INNER),
    }
)


def test_granite_moe(tmp_path: Path) -> None:
    """The softmax of the chosen scores; all experts in two tensors, gate before up; scalings."""

    def block(x: Floats, t: Tensors) -> Floats:
        t = within(t, "block_sparse_moe.")

        def expert(e: int, row: Floats) -> Floats:
            gate, up = np.split(linear(row, t["input_linear.weight"][e]), 2)
            return linear(silu(gate) * up, t["output_linear.weight"][e])

        rule = routed(x, t, "router.layer", lambda row: numpy_moe.top_k_then_softmax(row, TOP_K))
        return numpy_moe.mixture(x, rule, expert)

    def attended(x: Floats, t: Tensors, layer: int) -> Floats:
        return attend(x, t, turn(), scale=0.2)

    scales = (3.0, 0.4, 0.5)
    check(
        tmp_path,
        GRANITE,
        GRANITE_SHAPES,
        lambda t: decoder(t, block, attended, scales=scales),
    )


@pytest.mark.parametrize("jitter", [0.01, 0.4])
def test_phi3_5_moe(tmp_path: Path, jitter: float) -> None:
    """Experts picked one by one; layer norms under rms_norm_eps; biases but on the experts.

    The context, 128, is longer than trained: longrope's long factors and their mscale hold.
    """
    long = [1.0, 1.3, 2.0, 4.0]
    longrope = {
        "type": "longrope", "short_factor": [1.0] * 4, "long_factor": long, "short_mscale": 1.2,
        "long_mscale": 1.2, "original_max_position_embeddings": 64,
    }  # fmt: skip
    frequencies = rope_frequencies(DIM, 5000.0) / np.array(long)

    def attended(x: Floats, t: Tensors, layer: int) -> Floats:
        positions = np.arange(LENGTH)
        return attend(
            x, t, lambda y: rope(y, positions, inv_freq=frequencies, attention_factor=1.2)
        )

    prefix = "block_sparse_moe"
    names: Shapes = affine(f"{prefix}.gate", EXPERTS, HIDDEN)
    names |= one_by_one(f"{prefix}.experts", INNER, "w1", "w3", "w2")
    norms = {"input_layernorm": True, "post_attention_layernorm": True}
    shapes: Shapes = moe_shapes(names, bias="qkvo", norms=norms)
    shapes |= {"lm_head.bias": (int(LLAMA["vocab_size"]),)}

    def block(x: Floats, t: Tensors) -> Floats:
        t = within(t, f"{prefix}.")
        chosen = routed(x, t, "gate", lambda row: numpy_moe.sparsemixer(row, 2, jitter))
        return numpy_moe.mixture(
            x, chosen, lambda e, row: swiglu(row, within(t, f"experts.{e}."), "w1", "w3", "w2")
        )

    config = LOCAL | {
        "architectures": ["PhiMoEForCausalLM"], "num_experts_per_tok": 2, "attention_bias": True,
        "lm_head_bias": True, "router_jitter_noise": jitter, "sliding_window": 128,
        "rope_scaling": longrope,
    }  # fmt: skip
    check(tmp_path, config, shapes, lambda t: decoder(t, block, attended, centre))


TRAINED, FACTOR, WINDOW = 16, 4.0, 5
GPT_OSS: dict[str, Any] = LOCAL | {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"], "swiglu_limit": 7.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": FACTOR, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": TRAINED, "truncate": False,
    },
}  # fmt: skip
GPT_OSS_SHAPES = moe_shapes(
    affine("mlp.router", EXPERTS, HIDDEN, bias=True)
    | {
        "mlp.experts.gate_up_proj": (EXPERTS, HIDDEN, 2 * INNER),
        "mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * INNER),
        "mlp.experts.down_proj": (EXPERTS, INNER, HIDDEN),
        "mlp.experts.down_proj_bias": (EXPERTS, HIDDEN),
        "self_attn.sinks": (HEADS,),
    },
    bias="qkvo",
)


def test_gpt_oss(tmp_path: Path) -> None:
    """Gates and ups in turn, clamped; sinks; a window on the first layer; YaRN between pairs."""
    frequencies = yarn_frequencies(DIM, 5000.0, FACTOR, TRAINED, truncate=False)

    def rotate(x: Floats) -> Floats:
        scale = yarn_attention_factor(FACTOR)
        return rope(x, np.arange(LENGTH), inv_freq=frequencies, attention_factor=scale)

    def attended(x: Floats, t: Tensors, layer: int) -> Floats:
        t = within(t, "self_attn.")
        counts = (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        q, k, v = (heads(dense(x, t, f"{n}_proj"), count) for n, count in counts)
        k, v = (np.repeat(each, HEADS // KV_HEADS, axis=1) for each in (rotate(k), v))
        scores = np.einsum("qhd,khd->hqk", rotate(q), k) / np.sqrt(DIM)
        seen = mask(LENGTH, LENGTH, window=None if layer % 2 else WINDOW)
        sinks = np.broadcast_to(t["sinks"][:, None, None], (HEADS, LENGTH, 1))
        shares = softmax(np.concatenate([np.where(seen, scores, -np.inf), sinks], axis=-1))
        return dense(merged(np.einsum("hqk,khd->qhd", shares[..., :-1], v)), t, "o_proj")

    def block(x: Floats, t: Tensors) -> Floats:
        t = within(t, "mlp.")

        def expert(e: int, row: Floats) -> Floats:
            both = row @ t["experts.gate_up_proj"][e] + t["experts.gate_up_proj_bias"][e]
            inner = swiglu_clamped(both[0::2], both[1::2], limit=0.4)
            return inner @ t["experts.down_proj"][e] + t["experts.down_proj_bias"][e]

        rule = routed(x, t, "router", lambda row: numpy_moe.top_k_then_softmax(row, TOP_K))
        return numpy_moe.mixture(x, rule, expert)

    config = GPT_OSS | {"swiglu_limit": 0.4}
    check(tmp_path, config, GPT_OSS_SHAPES, lambda t: decoder(t, block, attended))
