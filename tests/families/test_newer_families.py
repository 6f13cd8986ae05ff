"""Decoders of 2025 of which there is no golden here, against passes in NumPy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jinfer import LLM
from tests.reference.numpy_blocks import (
    gelu_tanh,
    layer_norm,
    linear,
    mask,
    relu_squared,
    rms_norm,
    sigmoid,
    softmax,
)
from tests.reference.numpy_positions import Floats
from tests.reference.numpy_tensors import Tensors, dense, heads, layers_of, merged, within

from .llama_line import KV_HEADS, TOKENS, affine, llama_shapes, norm, turn
from .newer_parts import (
    BEFORE,
    CONFIG,
    EPS,
    EXPERTS,
    OTHER,
    ROUTED,
    TYPES,
    WIDTH,
    WINDOW,
    Layer,
    adjacent,
    attend,
    dense_or_moe,
    expert_layer,
    gated,
    in_layers,
    moe,
    plain,
    qk,
    rms,
    routed,
    sandwiched,
    shared,
    sub_normed,
    windowed,
    without,
    xielu,
)
from .tiny import DIM, HEADS, HIDDEN, INNER, Shapes, written


class Case(NamedTuple):
    config: dict[str, Any]
    shapes: Shapes
    layer: Layer
    stem: Callable[[Floats], Floats] = lambda x: x
    head: Callable[[Floats], Floats] = lambda x: x
    norm: Callable[[Floats, Tensors, str], Floats] | None = None


AROUND = ("input_layernorm", "pre_mlp_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
KOLIBRI = ("input_layernorm", "post_attention_layernorm", "post_attn_norm", "post_ffn_norm")
GEMMA = ("input_layernorm", "pre_feedforward_layernorm")


def gate_of_output(out: Floats, t: Tensors) -> Floats:
    return out * sigmoid(dense(t["given"], t, "self_attn.gate_proj"))


def afmoe(x: Floats, t: Tensors, i: int) -> Floats:
    def attn(n: Floats, t: Tensors) -> Floats:
        return windowed(i, normed="head", before=gate_of_output)(n, {**t, "given": n})

    def ffn(n: Floats, t: Tensors) -> Floats:
        if i == 0:
            return gated(n, t)
        how = {"router": "mlp.router.gate", "correct": "mlp.expert_bias", "scale": 2.0}
        return routed(n, t, **how) + shared(n, t)  # type: ignore[arg-type]

    return sandwiched(x, t, AROUND, attn, ffn)


def kolibri(x: Floats, t: Tensors, i: int) -> Floats:
    def ffn(n: Floats, t: Tensors) -> Floats:
        bias = "moe.router.expert_bias"
        y = routed(n, t, scale=1.0, renormalize=False, correct=bias, on_logits=True)
        return y + shared(n, t)

    return sandwiched(x, t, KOLIBRI, windowed(i, normed="head"), ffn)


def hyperclova(x: Floats, t: Tensors, i: int) -> Floats:
    attn = attend(rms(x, t, BEFORE[0]), t, turn(), scale=0.3)
    x = x + 0.8 * rms(attn, t, "post_norm1")
    return x + 0.8 * rms(gated(rms(x, t, BEFORE[1]), t), t, "post_norm2")


def granite_swa(x: Floats, t: Tensors, i: int) -> Floats:
    rotate, window = turn(theta=(500.0, 90000.0)[i]), (WINDOW, None)[i]
    x = x + 0.6 * attend(rms(x, t, BEFORE[0]), t, rotate, window=window, scale=0.3)
    return x + 0.6 * gated(rms(x, t, BEFORE[1]), t)


def plus_one(x: Floats, t: Tensors, name: str) -> Floats:
    return rms_norm(x, 1 + t[f"{name}.weight"], EPS)


def vaultgemma(x: Floats, t: Tensors, i: int) -> Floats:
    n = plus_one(x, t, GEMMA[0])
    x = x + attend(n, t, turn(), window=(WINDOW, None)[i], scale=24**-0.5, cap=50.0)
    return x + gated(plus_one(x, t, GEMMA[1]), t, act=gelu_tanh)


def mimo(x: Floats, t: Tensors, i: int) -> Floats:
    rotate = turn(theta=(5000.0, 90000.0)[i], dim=4)
    x = x + 0.7 * attend(rms(x, t, BEFORE[0]), t, rotate, window=(WINDOW, None)[i])
    n = rms(x, t, BEFORE[1])
    return x + (gated(n, t) if i == 0 else routed(n, t, scale=1.0))


def minimax(x: Floats, t: Tensors, i: int) -> Floats:
    how: Any = {
        "scale": 1.0, "router": "block_sparse_moe.gate", "names": ("w1", "w3", "w2"),
        "correct": "block_sparse_moe.e_score_correction_bias",
        "experts": "block_sparse_moe.experts",
    }  # fmt: skip
    x = x + attend(rms(x, t, BEFORE[0]), t, turn(dim=4), "width")
    return x + routed(rms(x, t, BEFORE[1]), t, **how)


def cohere(x: Floats, t: Tensors, i: int) -> Floats:
    n = layer_norm(x, t["input_layernorm.weight"], 0.0, EPS)
    how: Any = {"window": WINDOW, "rotate": turn(pairs="adjacent")} if i == 0 else {}
    ffn = gated(n, t) if i == 0 else 0.5 * (routed(n, t, scale=1.0) + shared(n, t))
    return x + attend(n, t, **how) + ffn


def exaone(x: Floats, t: Tensors, i: int) -> Floats:
    how = {"correct": "mlp.e_score_correction_bias"}
    return expert_layer(x, t, windowed(i, normed="head"), **how)


def youtu(x: Floats, t: Tensors, i: int) -> Floats:
    return sandwiched(x, t, BEFORE, latent, gated)


def latent(x: Floats, t: Tensors, beta: float = 0.0) -> Floats:
    """Queries are scaled by 1 + beta ln(1 + floor(position / 4))."""
    t = within(t, "self_attn.")
    small = rms_norm(dense(x, t, "q_a_proj"), t["q_a_layernorm.weight"], 1e-6)
    q, both = heads(dense(small, t, "q_b_proj"), HEADS), dense(x, t, "kv_a_proj_with_mqa")
    kv = rms_norm(both[:, :12], t["kv_a_layernorm.weight"], 1e-6)
    kv = heads(linear(kv, t["kv_b_proj.weight"]), HEADS)
    rotate = turn(pairs="adjacent", dim=4)
    q = np.concatenate([q[..., :DIM], rotate(q[..., DIM:])], axis=-1)
    shared_key = np.repeat(rotate(both[:, None, 12:]), HEADS, axis=1)
    k, v = np.concatenate([kv[..., :DIM], shared_key], axis=-1), kv[..., DIM:]
    q = q * (1 + beta * np.log1p(np.arange(len(x)) // 4))[:, None, None]
    scores = np.einsum("qhd,khd->hqk", q, k) * (DIM + 4) ** -0.5
    scores = np.where(mask(len(x), len(x)), scores, -np.inf)
    return dense(merged(np.einsum("hqk,khd->qhd", softmax(scores), v)), t, "o_proj")


def latent_shapes(layer: str, i: int) -> Shapes:
    attn = f"{layer}self_attn."
    shapes = affine(f"{attn}q_a_proj", 10, HIDDEN) | affine(f"{attn}q_b_proj", HEADS * 12, 10)
    shapes |= affine(f"{attn}kv_a_proj_with_mqa", 16, HIDDEN)
    shapes |= affine(f"{attn}kv_b_proj", HEADS * 2 * DIM, 12)
    return shapes | {f"{attn}q_a_layernorm.weight": (10,), f"{attn}kv_a_layernorm.weight": (12,)}


def dots_layer(x: Floats, t: Tensors, i: int) -> Floats:
    return expert_layer(x, t, lambda n, t: attend(n, t, turn(), "head"))


def solar_layer(x: Floats, t: Tensors, i: int) -> Floats:
    return expert_layer(x, t, lambda n, t: attend(n, t, turn()), scale=1.0)


def arch(name: str, config: dict[str, Any], **more: Any) -> dict[str, Any]:
    return config | {"architectures": [name]} | more


LINE = llama_shapes(head=True)
GATES = in_layers(lambda layer, i: affine(f"{layer}self_attn.gate_proj", HEADS * DIM, HIDDEN))
ALL_QK = in_layers(lambda layer, i: qk(layer))
SINKS = in_layers(lambda layer, i: {f"{layer}self_attn.sinks": (HEADS,)})
XIELU = in_layers(lambda layer, i: {f"{layer}mlp.act_fn.alpha_{s}": (1,) for s in "pn"})
SUB = in_layers(
    lambda layer, i: {
        f"{layer}self_attn.attn_sub_norm.weight": (HEADS * DIM,),
        f"{layer}mlp.ffn_sub_norm.weight": (INNER,),
    }
)
APERTUS = ("attention_layernorm", "feedforward_layernorm")
CASES = {
    "ernie4_5": Case(
        arch("Ernie4_5ForCausalLM", CONFIG, use_bias=False, tie_word_embeddings=False),
        LINE, plain(adjacent, gated),
    ),
    "helium": Case(arch("HeliumForCausalLM", CONFIG), LINE, plain(adjacent, gated)),
    "arcee": Case(
        arch("ArceeForCausalLM", CONFIG, hidden_act="relu2"),
        without(LINE, "gate_proj"),
        plain(
            lambda x, t: attend(x, t, turn()),
            lambda x, t: dense(relu_squared(dense(x, t, "mlp.up_proj")), t, "mlp.down_proj"),
        ),
    ),
    "apertus": Case(
        arch("ApertusForCausalLM", CONFIG, hidden_act="xielu"),
        without(llama_shapes(head=True, norms=dict.fromkeys(APERTUS, False)), "gate_proj")
        | ALL_QK | XIELU,
        plain(lambda x, t: attend(x, t, turn(), "head"), xielu, APERTUS),
    ),
    "bitnet": Case(
        arch("BitNetForCausalLM", CONFIG, hidden_act="relu2"), LINE | SUB,
        plain(
            lambda x, t: attend(
                x, t, turn(), before=lambda out, t: rms(out, t, "self_attn.attn_sub_norm")
            ),
            sub_normed,
        ),
    ),
    "hyperclovax": Case(
        arch(
            "HyperCLOVAXForCausalLM", CONFIG, embedding_multiplier=3.0, logits_scaling=0.5,
            residual_multiplier=0.8, attention_multiplier=0.3, use_post_norm=True,
        ),
        LINE | in_layers(lambda layer, i: norm(f"{layer}post_norm1") | norm(f"{layer}post_norm2")),
        hyperclova, lambda x: 3.0 * x, lambda x: 0.5 * x,
    ),
    "granite_swa": Case(
        arch(
            "GraniteSWAForCausalLM", CONFIG | TYPES, rope_theta=500.0,
            embedding_multiplier=3.0, logits_scaling=0.5,
            residual_multiplier=0.6, attention_multiplier=0.3, layer_rope_theta=[500.0, 90000.0],
        ),
        LINE | SINKS, granite_swa, lambda x: 3.0 * x, lambda x: 2.0 * x,
    ),
    "vaultgemma": Case(
        arch(
            "VaultGemmaForCausalLM", CONFIG | TYPES, hidden_act="gelu_pytorch_tanh",
            query_pre_attn_scalar=24,
            final_logit_softcapping=4.0, attn_logit_softcapping=50.0,
            hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=False,
        ),
        llama_shapes(head=True, norms=dict.fromkeys(GEMMA, False)), vaultgemma,
        lambda x: x * np.sqrt(HIDDEN), lambda x: 4.0 * np.tanh(x / 4.0), plus_one,
    ),
    "minimax_m2": Case(
        arch(
            "MiniMaxM2ForCausalLM", CONFIG, intermediate_size=WIDTH, rotary_dim=4,
            num_local_experts=EXPERTS, num_experts_per_tok=2, scoring_func="sigmoid",
            use_routing_bias=True, use_qk_norm=True,
        ),
        without(LINE, ".mlp.") | in_layers(
            lambda layer, i: qk(layer, HEADS * DIM, KV_HEADS * DIM) | moe(
                layer, router="block_sparse_moe.gate", shared=False, names=("w1", "w3", "w2"),
                correct="block_sparse_moe.e_score_correction_bias",
                experts="block_sparse_moe.experts",
            )
        ),
        minimax,
    ),
    "dots1": Case(arch("Dots1ForCausalLM", ROUTED), dense_or_moe() | ALL_QK, dots_layer),
    "solar_open": Case(
        arch("SolarOpenForCausalLM", ROUTED, first_k_dense_replace=0, routed_scaling_factor=1.0),
        dense_or_moe(0), solar_layer,
    ),
    "exaone_moe": Case(
        arch("ExaoneMoEForCausalLM", ROUTED | TYPES, num_experts=EXPERTS, num_shared_experts=1),
        dense_or_moe(correct="mlp.e_score_correction_bias") | ALL_QK, exaone,
    ),
    "cohere2_moe": Case(
        arch(
            "Cohere2MoeForCausalLM", OTHER | TYPES, num_experts=EXPERTS, num_shared_experts=1,
            layer_norm_eps=EPS, logit_scale=0.5, intermediate_size=WIDTH,
            prefix_dense_intermediate_size=INNER, mlp_layer_types=["dense", "sparse"],
            expert_selection_fn="sigmoid", tie_word_embeddings=False,
        ),
        without(dense_or_moe(correct=""), "post_attention_layernorm"), cohere,
        head=lambda x: 0.5 * x,
        norm=lambda x, t, name: layer_norm(x, t[f"{name}.weight"], 0.0, EPS),
    ),
    "afmoe": Case(
        arch(
            "AfmoeForCausalLM", OTHER | TYPES, num_experts=EXPERTS, num_shared_experts=1,
            num_dense_layers=1, route_norm=True, route_scale=2.0, score_func="sigmoid",
            mup_enabled=True,
        ),
        dense_or_moe(norms=AROUND, router="mlp.router.gate", correct="mlp.expert_bias")
        | ALL_QK | GATES,
        afmoe, lambda x: x * np.sqrt(HIDDEN),
    ),
    "kolibri1": Case(
        arch(
            "Kolibri1ForCausalLM", OTHER | TYPES, num_local_experts=EXPERTS,
            shared_expert_intermediate_size=WIDTH,
        ),
        dense_or_moe(0, norms=KOLIBRI, correct="moe.router.expert_bias") | ALL_QK, kolibri,
    ),
    "mimo_v2_flash": Case(
        arch(
            "MiMoV2FlashForCausalLM", ROUTED | TYPES, routed_scaling_factor=1.0,
            attention_value_scale=0.7, v_head_dim=6,
            layernorm_epsilon=EPS, mlp_layer_types=["dense", "sparse"], swa_num_key_value_heads=4,
            rope_parameters={
                "full_attention": {"rope_theta": 90000.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_theta": 5000.0, "partial_rotary_factor": 0.5},
            },
        ),
        dense_or_moe(shared=False)
        | affine("model.layers.0.self_attn.k_proj", HEADS * DIM, HIDDEN)
        | affine("model.layers.0.self_attn.v_proj", HEADS * 6, HIDDEN)
        | affine("model.layers.1.self_attn.v_proj", KV_HEADS * 6, HIDDEN)
        | {"model.layers.0.self_attn.attention_sink_bias": (HEADS,)}
        | in_layers(lambda layer, i: affine(f"{layer}self_attn.o_proj", HIDDEN, HEADS * 6)),
        mimo,
    ),
    "youtu": Case(
        arch(
            "YoutuForCausalLM", CONFIG, kv_lora_rank=12, q_lora_rank=10, qk_nope_head_dim=DIM,
            qk_rope_head_dim=4, v_head_dim=DIM, rope_interleave=True, tie_word_embeddings=False,
        ),
        without(LINE, "q_proj", "k_proj", "v_proj") | in_layers(latent_shapes), youtu,
    ),
    "mistral4": Case(
        arch(
            "Mistral4ForCausalLM", CONFIG, kv_lora_rank=12, q_lora_rank=10, qk_nope_head_dim=DIM,
            qk_rope_head_dim=4, v_head_dim=DIM, first_k_dense_replace=2, rope_parameters={
                "rope_type": "default", "rope_theta": 5000.0, "llama_4_scaling_beta": 0.5,
                "original_max_position_embeddings": 4,
            },
        ),
        without(LINE, "q_proj", "k_proj", "v_proj") | in_layers(latent_shapes),
        plain(lambda x, t: latent(x, t, beta=0.5), gated),
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", CASES)
def test_family(tmp_path: Path, family: str) -> None:
    case = CASES[family]

    def forward(tensors: Tensors) -> Floats:
        x = case.stem(tensors["model.embed_tokens.weight"][TOKENS])
        for i, t in enumerate(layers_of(tensors)):
            x = case.layer(x, t, i)
        x = (case.norm or rms)(x, tensors, "model.norm")
        return case.head(dense(x, tensors, "lm_head"))

    tensors = written(tmp_path, case.config, case.shapes)
    got, wanted = LLM(tmp_path, dtype="float32").logits([TOKENS.tolist()])[0], forward(tensors)
    assert wanted.std() > 0.1
    np.testing.assert_allclose(got, wanted, rtol=0, atol=5e-5)
