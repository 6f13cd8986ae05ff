"""Tiny checkpoints of heads, and what these are by their publications, in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.families.gguf_files import write_gguf
from tests.families.llama_line import (
    KV_HEADS,
    LLAMA,
    TOKENS,
    affine,
    attend,
    llama_shapes,
    norm,
    projected,
    swiglu,
    turn,
)
from tests.families.test_moe_families import EPS, EXPERTS, TOP_K, WIDTH, one_by_one
from tests.families.test_moe_families import swiglu as experts_swiglu
from tests.families.test_scaled_families import (
    LATENT,
    PARTS,
    SCALE,
    latent_attention,
    latent_block,
    latent_shapes,
)
from tests.families.test_sparse_families import CONFIG as SPARSE
from tests.families.test_sparse_families import shapes as sparse_shapes
from tests.families.test_sparse_families import sparse_attention
from tests.families.tiny import DIM, HEADS, HIDDEN, INNER, VOCAB, Shapes, written
from tests.reference import numpy_moe
from tests.reference.numpy_blocks import attention, rms_norm
from tests.reference.numpy_tensors import Floats, Tensors, dense, layers_of, merged, within

LAYERS, SOME = 8, 60
AHEAD = np.concatenate([TOKENS[1:], TOKENS[:1]])  # the token after each; after the last one, any
TARGET = LLAMA | {"num_hidden_layers": LAYERS, "architectures": ["LlamaForCausalLM"]}


def rms(x: Floats, tensors: Tensors, name: str) -> Floats:
    return rms_norm(x, tensors[f"{name}.weight"], 1e-6)


def outputs(tensors: Tensors) -> list[Floats]:
    """What each layer of the target gives of TOKENS."""
    x, each = tensors["model.embed_tokens.weight"][TOKENS], []
    for t in layers_of(tensors):
        x = x + attend(rms(x, t, "input_layernorm"), t, turn())
        x = x + swiglu(rms(x, t, "post_attention_layernorm"), t)
        each.append(x)
    return each


def eagle_shapes() -> Shapes:
    """The names of an EAGLE-3 head for a reduced vocabulary."""
    shapes: Shapes = affine("fc", HIDDEN, 3 * HIDDEN) | norm("norm")
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        shapes |= norm(f"midlayer.{name}")
    widths = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
    for part, width in widths.items():
        shapes |= affine(f"midlayer.self_attn.{part}_proj", width, 2 * HIDDEN)
    shapes |= affine("midlayer.self_attn.o_proj", HIDDEN, HEADS * DIM)
    for name in ("gate_proj", "up_proj"):
        shapes |= affine(f"midlayer.mlp.{name}", INNER, HIDDEN)
    shapes |= affine("midlayer.mlp.down_proj", HIDDEN, INNER)
    return shapes | {"lm_head.weight": (SOME, HIDDEN), "d2t": (SOME,), "t2d": (VOCAB,)}


def write_eagle(folder: Path, **config: Any) -> Tensors:
    """A head of random numbers; the tokens that it knows are spread over the vocabulary."""
    known = np.sort(np.random.default_rng(4).choice(VOCAB, SOME, replace=False))
    given = {"d2t": known - np.arange(SOME), "t2d": np.isin(np.arange(VOCAB), known)}
    own = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    return written(folder, LLAMA | own | {"draft_vocab_size": SOME} | config, eagle_shapes(), given)


def eagle(t: Tensors, embedding: Floats, vectors: Floats, early: bool = False) -> Floats:
    """The logits of a head in places 0, 1, ...: of token i + 1, with the vectors of token i."""
    hidden = dense(vectors, t, "fc")
    layer = {k.removeprefix("midlayer."): v for k, v in t.items() if k.startswith("midlayer.")}
    normed = rms(hidden, layer, "hidden_norm")
    both = np.concatenate([rms(embedding[AHEAD], layer, "input_layernorm"), normed], axis=-1)
    x = (normed if early else hidden) + attend(both, layer, turn())
    x = x + swiglu(rms(x, layer, "post_attention_layernorm"), layer)
    logits = np.full((len(x), VOCAB), -np.inf)
    logits[:, np.arange(SOME) + t["d2t"].astype(int)] = dense(rms(x, t, "norm"), t, "lm_head")
    return logits


@dataclass
class Case:
    """A head and its target.

    Attributes:
        source, draft: of the target, and what drafts.
        family: of a head in the target's own checkpoint.
        vectors: what the head is given of TOKENS.
        logits: what it makes of it.
    """

    source: Path
    draft: Any
    family: str | None
    vectors: Floats
    logits: Floats


def deepseek_case(
    folder: Path,
    family: str = "deepseek_v3_head",
    config: dict[str, Any] = LATENT,
    shapes: Shapes | None = None,
    attended: Callable[[Floats, Tensors, int], Floats] = latent_attention,
) -> Case:
    """The layer after the last one, with its own copies of the embedding and the head."""
    shapes, layer = shapes or latent_shapes(), "model.layers.2."
    copied = {n: s for n, s in shapes.items() if n.startswith("model.layers.1.")}
    shapes |= {n.replace(".1.", ".2.", 1): s for n, s in copied.items()}
    shapes |= affine(f"{layer}eh_proj", HIDDEN, 2 * HIDDEN) | norm(f"{layer}shared_head.norm")
    shapes |= norm(f"{layer}enorm") | norm(f"{layer}hnorm")
    for name in ("embed_tokens", "shared_head.head"):
        shapes |= {f"{layer}{name}.weight": (VOCAB, HIDDEN)}
    tensors = written(folder, config, shapes)

    def normed(x: Floats, t: Tensors, name: str) -> Floats:
        return rms_norm(x, t[f"{name}.weight"], config["rms_norm_eps"])

    def through(x: Floats, t: Tensors, number: int) -> Floats:
        x = x + attended(normed(x, t, "input_layernorm"), t, number)
        return x + latent_block(normed(x, t, "post_attention_layernorm"), t)

    *layers, head = layers_of(tensors)
    x = tensors["model.embed_tokens.weight"][TOKENS]
    for number, t in enumerate(layers):
        x = through(x, t, number)
    given = normed(normed(x, tensors, "model.norm"), head, "hnorm")
    token = normed(tensors["model.embed_tokens.weight"][AHEAD], head, "enorm")
    y = through(dense(np.concatenate([token, given], axis=-1), head, "eh_proj"), head, 2)
    logits = dense(normed(y, head, "shared_head.norm"), tensors, "lm_head")
    return Case(folder, "head", family, x, logits)


def sparse_case(folder: Path) -> Case:
    """DeepSeek's with an indexer, in GLM-5 (`glm_moe_dsa_head`, over "deepseek_v32_head")."""
    return deepseek_case(folder, "glm_moe_dsa_head", SPARSE, sparse_shapes(), sparse_attention)


MIMO = LLAMA | {"architectures": ["MiMoForCausalLM"], "use_sliding_window": False}


def mimo_shapes() -> Shapes:
    """Two layers with biases, and a head."""
    shapes = llama_shapes(bias="qkv", head=True)
    own = {n: s for n, s in shapes.items() if n.startswith("model.layers.0.")}
    shapes |= {n.replace("layers", "mtp_layers"): s for n, s in own.items()}
    head = "model.mtp_layers.0."
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        shapes |= norm(head + name)
    return shapes | affine(f"{head}input_proj", HIDDEN, 2 * HIDDEN)


def mimo_case(folder: Path) -> Case:
    """The model's vector comes before the token's."""
    tensors = written(folder, MIMO, mimo_shapes())
    x = outputs(tensors)[-1]
    (head,) = layers_of(tensors, "model.mtp_layers.")
    given = rms(rms(x, tensors, "model.norm"), head, "hidden_layernorm")
    token = rms(tensors["model.embed_tokens.weight"][AHEAD], head, "token_layernorm")
    y = dense(np.concatenate([given, token], axis=-1), head, "input_proj")
    y = y + attend(rms(y, head, "input_layernorm"), head, turn())
    y = y + swiglu(rms(y, head, "post_attention_layernorm"), head)
    logits = dense(rms(y, head, "final_layernorm"), tensors, "lm_head")
    return Case(folder, "head", "mimo_head", x, logits)


GLM: dict[str, Any] = LLAMA | {
    "architectures": ["Glm4MoeForCausalLM"], "rms_norm_eps": EPS, "hidden_act": "silu",
    "attention_bias": True, "partial_rotary_factor": 0.5, "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K, "n_shared_experts": 2, "moe_intermediate_size": WIDTH,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": SCALE,
    "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1, "use_qk_norm": True,
}  # fmt: skip


def glm_shapes() -> Shapes:
    """A dense layer, one with experts, and the head's."""
    shapes = llama_shapes(3, bias="qkv", head=True)
    shapes = {n: s for n, s in shapes.items() if ".mlp." not in n or ".layers.0." in n}
    for i in range(3):
        for name in ("q_norm", "k_norm"):
            shapes |= {f"model.layers.{i}.self_attn.{name}.weight": (DIM,)}
    for i in (1, 2):
        mlp = f"model.layers.{i}.mlp"
        shapes |= affine(f"{mlp}.gate", EXPERTS, HIDDEN)
        shapes |= {f"{mlp}.gate.e_score_correction_bias": (EXPERTS,)}
        shapes |= one_by_one(f"{mlp}.experts", WIDTH, *PARTS)
        for part in PARTS[:2]:
            shapes |= affine(f"{mlp}.shared_experts.{part}", 2 * WIDTH, HIDDEN)
        shapes |= affine(f"{mlp}.shared_experts.{PARTS[2]}", HIDDEN, 2 * WIDTH)
    head = "model.layers.2."
    shapes |= affine(f"{head}eh_proj", HIDDEN, 2 * HIDDEN) | norm(f"{head}shared_head.norm")
    shapes |= norm(f"{head}enorm") | norm(f"{head}hnorm")
    for name in ("embed_tokens", "shared_head.head"):
        shapes |= {f"{head}{name}.weight": (VOCAB, HIDDEN)}
    return shapes


def glm_values(tensors: Tensors) -> tuple[Floats, Floats]:
    """What the last layer gives, and the head's logits."""

    def normed(x: Floats, t: Tensors, name: str) -> Floats:
        return rms_norm(x, t[f"{name}.weight"], EPS)

    def mixed(x: Floats, t: Tensors) -> Floats:
        t = within(t, "mlp.")
        if "gate.weight" not in t:
            return experts_swiglu(x, t, *PARTS)
        bias = t["gate.e_score_correction_bias"]
        rows = dense(x, t, "gate")
        chosen = [numpy_moe.deepseek_v3(row, bias, TOP_K, 1, 1, SCALE) for row in rows]
        own = [within(t, f"experts.{e}.") for e in range(EXPERTS)]
        out = numpy_moe.mixture(x, chosen, lambda e, row: experts_swiglu(row, own[e], *PARTS))
        return out + experts_swiglu(x, within(t, "shared_experts."), *PARTS)

    def through(x: Floats, t: Tensors) -> Floats:
        y, turned = normed(x, t, "input_layernorm"), turn(dim=DIM // 2)
        q, k, v = projected(y, t)
        q, k = normed(q, t, "self_attn.q_norm"), normed(k, t, "self_attn.k_norm")
        x = x + dense(merged(attention(turned(q), turned(k), v)), t, "self_attn.o_proj")
        return x + mixed(normed(x, t, "post_attention_layernorm"), t)

    *layers, head = layers_of(tensors)
    x = tensors["model.embed_tokens.weight"][TOKENS]
    for t in layers:
        x = through(x, t)
    given = normed(normed(x, tensors, "model.norm"), head, "hnorm")
    token = normed(tensors["model.embed_tokens.weight"][AHEAD], head, "enorm")
    y = through(dense(np.concatenate([token, given], axis=-1), head, "eh_proj"), head)
    return x, dense(normed(y, head, "shared_head.norm"), tensors, "lm_head")


def glm_case(folder: Path) -> Case:
    """As DeepSeek's, in a layer with shared heads."""
    return Case(folder, "head", "glm4_moe_head", *glm_values(written(folder, GLM, glm_shapes())))


OF_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp", "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm", "hnorm": "nextn.hnorm", "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head", "embed_tokens": "nextn.embed_tokens",
}  # fmt: skip
OF_MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_case(folder: Path) -> Case:
    """The same in GGUF, which counts the head among its blocks."""
    tensors = written(folder / "plain", GLM, glm_shapes())
    named: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        module, _, leaf = name.rpartition(".")
        if module in OF_MODEL:
            named[f"{OF_MODEL[module]}.{leaf}"] = values
            continue
        number, inner = module.removeprefix("model.layers.").split(".", 1)
        if leaf == "e_score_correction_bias":
            named[f"blk.{number}.exp_probs_b.bias"] = values
        elif "experts.0." in inner:
            every = [tensors[name.replace("experts.0.", f"experts.{e}.")] for e in range(EXPERTS)]
            part = inner.rpartition(".")[2].removesuffix("_proj")
            named[f"blk.{number}.ffn_{part}_exps.{leaf}"] = np.stack(every)
        elif ".experts." not in inner:
            named[f"blk.{number}.{OF_LAYER[inner]}.{leaf}"] = values
    keys = {
        "block_count": 3, "nextn_predict_layers": 1, "context_length": 128, "vocab_size": VOCAB,
        "embedding_length": HIDDEN, "feed_forward_length": INNER, "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS, "attention.key_length": DIM,
        "attention.layer_norm_rms_epsilon": EPS, "rope.freq_base": 5000.0,
        "rope.dimension_count": DIM // 2, "expert_count": EXPERTS, "expert_used_count": TOP_K,
        "expert_shared_count": 2, "expert_feed_forward_length": WIDTH,
        "leading_dense_block_count": 1, "expert_weights_scale": SCALE,
    }  # fmt: skip
    path = folder / "model.gguf"
    write_gguf(path, "glm4moe", keys, {n: v.astype(np.float32) for n, v in named.items()})
    return Case(path, "head", "glm4_moe_head", *glm_values(tensors))


def eagle_case(folder: Path) -> Case:
    """By default it follows layers 1, 3 and 4 of eight."""
    target = written(folder / "target", TARGET, llama_shapes(LAYERS, head=True))
    each = outputs(target)
    vectors = np.concatenate([each[i] for i in (1, 3, 4)], axis=-1)
    head = write_eagle(folder / "head")
    logits = eagle(head, target["model.embed_tokens.weight"], vectors)
    return Case(folder / "target", str(folder / "head"), None, vectors, logits)


def named_case(folder: Path) -> Case:
    """Its configuration names the layers; the residual begins behind the norm."""
    many = TARGET | {"num_hidden_layers": 12}
    target = written(folder / "target", many, llama_shapes(12, head=True))
    each = outputs(target)
    vectors = np.concatenate([each[i] for i in (2, 9, 11)], axis=-1)
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 9, 11]}}
    head = write_eagle(folder / "head", norm_before_residual=True, **layers)
    logits = eagle(head, target["model.embed_tokens.weight"], vectors, early=True)
    return Case(folder / "target", str(folder / "head"), None, vectors, logits)


CASES: dict[str, Callable[[Path], Case]] = {
    "eagle": eagle_case,
    "named": named_case,
    "deepseek": deepseek_case,
    "sparse": sparse_case,
    "mimo": mimo_case,
    "glm": glm_case,
    "gguf": gguf_case,
}


def right_head(folder: Path) -> Path:
    """A model whose layers add nothing, so that a token follows from the one before alone; its
    head's join keeps the token alone."""
    rng = np.random.default_rng(2)
    embedding = rng.normal(0, 1, (VOCAB, HIDDEN))
    logits = 4 * np.roll(embedding, 7, axis=0)
    shapes = mimo_shapes()
    silent = {
        n: np.zeros(s)
        for n, s in shapes.items()
        if n.endswith(("o_proj.weight", "down_proj.weight"))
    }
    ones = {n: np.ones(s) for n, s in shapes.items() if "norm" in n}
    join = np.concatenate([np.zeros((HIDDEN, HIDDEN)), np.eye(HIDDEN)], axis=1)
    own = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": logits,
        "model.mtp_layers.0.input_proj.weight": join,
    }
    written(folder, MIMO, shapes, silent | ones | own)
    return folder
