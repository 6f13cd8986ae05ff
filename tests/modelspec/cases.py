"""Checkpoints that the families are resolved for: those of the golden files, and made-up ones."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jinfer.loader.checkpoint import open_checkpoint
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.resolve_spec import CheckpointFacts
from jinfer.modelspec.spec_files import families, find_family, read_toml
from jinfer.nn.abstract_model import build_abstract_model
from tests.families.gguf_headers import headers

from .helpers import facts, gguf_facts

GOLDENS = Path(__file__).parents[1] / "goldens"

LLAMA = {
    "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 112, "max_position_embeddings": 256,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip
BERT = {
    "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "max_position_embeddings": 256,
}  # fmt: skip
BART = {
    "vocab_size": 320, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128, "max_position_embeddings": 256, "scale_embedding": True,
}  # fmt: skip
MOE = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4}
HYBRID = ["linear_attention", "full_attention"] * 2
MAMBA2 = {"mamba_d_state": 16, "mamba_expand": 2, "mamba_d_conv": 4}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
# Keys of a config.json for families of which there is no golden.
MADE_UP: dict[str, dict[str, Any]] = {
    "afmoe": LLAMA | MOE | {
        "moe_intermediate_size": 24, "num_shared_experts": 1, "num_dense_layers": 1,
        "sliding_window": 16, "mup_enabled": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "apertus": LLAMA,
    "bamba": LLAMA | MAMBA2 | {
        "mamba_n_heads": 8, "mamba_n_groups": 1, "attn_layer_indices": [1], "attn_rotary_emb": 8,
    },
    "falcon_mamba": {
        "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128,
        "state_size": 8, "time_step_rank": 4, "conv_kernel": 4, "layer_norm_epsilon": 1e-5,
        "model_type": "falcon_mamba",
    },
    "glm4_moe_lite": LLAMA | {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 24, "kv_lora_rank": 16, "q_lora_rank": 24,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    },
    "jamba": LLAMA | MOE | MAMBA2 | {
        "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_dt_rank": 4,
    },
    "lfm2_moe": LLAMA | MOE | {
        "norm_eps": 1e-5, "moe_intermediate_size": 24, "num_dense_layers": 1, "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention"] * 2,
    },
    "olmo_hybrid": LLAMA | DELTA | {"layer_types": HYBRID, "linear_allow_neg_eigval": True},
    "qwen3_5_moe": LLAMA | MOE | DELTA | {
        "head_dim": 16, "layer_types": HYBRID, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24, "partial_rotary_factor": 0.25,
    },
    "zamba2": LLAMA | MAMBA2 | {
        "n_mamba_heads": 8, "mamba_ngroups": 1, "num_mem_blocks": 2, "adapter_rank": 4,
        "layers_block_type": ["mamba", "hybrid", "hybrid", "hybrid"], "num_key_value_heads": 4,
        "hybrid_layer_ids": [1, 2, 3], "use_mem_rope": True,
    },
    "arcee": LLAMA | {"hidden_act": "relu2"},
    "bitnet": LLAMA | {"hidden_act": "relu2"},
    "dots1": LLAMA | MOE | {
        "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "moe_intermediate_size": 24, "routed_scaling_factor": 2.5,
    },
    "ernie4_5": LLAMA,
    "exaone_moe": LLAMA | MOE | {
        "moe_intermediate_size": 24, "num_shared_experts": 1, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "sliding_window_pattern": "LG",
    },
    "hyperclovax": LLAMA | {"attention_multiplier": 0.2, "use_post_norm": True},
    "minimax_m2": LLAMA | MOE | {"head_dim": 16, "rotary_dim": 8},
    "vaultgemma": LLAMA | {
        "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "albert": BERT | {"embedding_size": 32},
    "cohere": LLAMA | {"logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": LLAMA | {"logit_scale": 0.25, "sliding_window": 16, "sliding_window_pattern": 4},
    "deberta_v2": BERT | {"position_buckets": 32, "type_vocab_size": 0},
    "electra": BERT | {"embedding_size": 32},
    "deepseek_v3": LLAMA | {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 4,
        "topk_group": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
        "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 8, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    },
    "qwen2_encoder": LLAMA | {"auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}},
    "t5_encoder": {
        "vocab_size": 320, "d_model": 64, "num_layers": 2, "num_heads": 4, "d_kv": 16, "d_ff": 128,
    },
    "eagle3": LLAMA | {"draft_vocab_size": 64, "norm_before_residual": True},
    "exaone": LLAMA | {"num_layers": 4, "activation_function": "silu"},
    "gemma_embedding": LLAMA | {"use_bidirectional_attention": True, "sliding_window": 16},
    "gemma3": LLAMA | {"head_dim": 16, "sliding_window": 16, "sliding_window_pattern": 2},
    "glm": LLAMA | {"partial_rotary_factor": 0.5, "attention_bias": True, "head_dim": 16},
    "glm4": LLAMA | {"partial_rotary_factor": 0.5, "attention_bias": True, "head_dim": 16},
    "glm4_moe": LLAMA | MOE | {
        "partial_rotary_factor": 0.5, "attention_bias": True, "n_routed_experts": 4,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 24,
    },
    "gpt_neo": {
        "vocab_size": 320, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "window_size": 16,
        "attention_layers": ["global", "local"], "activation_function": "gelu_new",
    },
    "gpt_oss": LLAMA | MOE | {"sliding_window": 16, "head_dim": 16},
    "gptj": {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "granite": LLAMA | {"embedding_multiplier": 3.0, "attention_multiplier": 0.2},
    "granite_moe": LLAMA | MOE | {"residual_multiplier": 0.4, "logits_scaling": 1.7},
    "internlm2": LLAMA | {"bias": False},
    "marian": BART | {"activation_function": "swish"},
    "mbart": BART,
    "mimo": LLAMA,
    "modernbert": BERT | {"local_attention": 16},
    "mpt": {
        "vocab_size": 320, "d_model": 64, "n_layers": 2, "n_heads": 4, "no_bias": True,
        "attn_config": {"alibi": True, "clip_qkv": 4.0, "kv_n_heads": 1},
    },
    "nemotron": LLAMA | {"hidden_act": "relu2", "partial_rotary_factor": 0.5},
    "nomic_bert": BERT | {"rotary_emb_base": 1000},
    "olmo": LLAMA | {"clip_qkv": 8.0},
    "olmoe": LLAMA | MOE | {"norm_topk_prob": False},
    "pegasus": BART,
    "phi3_5_moe": LLAMA | MOE | {"router_jitter_noise": 0.01, "lm_head_bias": True},
    "qwen2_moe": LLAMA | MOE | {"moe_intermediate_size": 32, "mlp_only_layers": [0]},
    "smollm3": LLAMA | {"no_rope_layers": [1, 1, 1, 0]},
    "stablelm": LLAMA | {"partial_rotary_factor": 0.25, "use_parallel_residual": True},
    "umt5": {
        "vocab_size": 320, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    },
}  # fmt: skip
GGUF = {
    "vocab_size": 320, "embedding_length": 64, "block_count": 2, "attention.head_count": 4,
    "feed_forward_length": 128, "context_length": 256, "attention.layer_norm_epsilon": 1e-5,
}  # fmt: skip
GGUF_MOE = {"expert_count": 4, "expert_used_count": 2, "expert_shared_count": 1}
GGUF_LATENT = {
    "attention.kv_lora_rank": 16, "attention.key_length": 24, "attention.value_length": 16,
    "rope.dimension_count": 8,
}  # fmt: skip
GGUF_INDEXER = {
    "attention.indexer.top_k": 12, "attention.indexer.head_count": 2,
    "attention.indexer.key_length": 16,
}  # fmt: skip
GGUF_LAYERS = [
    f"blk.{i}.{name}.weight"
    for i in (0, 1)
    for name in ("attn_norm", "attn_q", "ffn_norm", "ffn_up")
]
LLAMA2C = {
    "vocab_size": 320, "dim": 64, "hidden_dim": 112, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2,
    "max_seq_len": 256, "shared_classifier": True,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A checkpoint: its name, the family that serves it, what it says of itself and its names."""

    name: str
    family: str
    facts: CheckpointFacts
    architectures: tuple[str, ...]


def golden_folders(file: str = "config.json") -> list[str]:
    return sorted(path.parent.name for path in GOLDENS.glob(f"*/{file}"))


@cache
def golden(folder: str, file: str = "config.json") -> Case:
    """A golden checkpoint, as one of its config files describes it."""
    config = json.loads((GOLDENS / folder / file).read_text())
    tensors = open_checkpoint(GOLDENS / folder).tensors
    known = facts(config, {name: tensor.shape for name, tensor in tensors.items()})
    family = find_family(known, config["architectures"], Path(folder)).stem
    return Case(folder, family, known, tuple(config["architectures"]))


def architectures(family: str) -> tuple[str, ...]:
    """The names by which checkpoints ask for a family."""
    return tuple(read_toml(families()[family]).get("match", {}).get("architectures", ()))


def made_up(family: str) -> Case:
    """The made-up checkpoint of a family."""
    return Case(family, family, facts(MADE_UP[family]), architectures(family)[:1])


def cases() -> list[Case]:
    """Every golden with a config.json, and the made-up ones."""
    return [*map(golden, golden_folders()), *map(made_up, MADE_UP)]


def gguf_like(architecture: str, *tensors: str, **more: Any) -> CheckpointFacts:
    """The least metadata of a GGUF file of any architecture."""
    metadata = {f"{architecture}.{key}": value for key, value in (GGUF | more).items()}
    return gguf_facts(
        {"general.architecture": architecture, **metadata},
        dict.fromkeys(("output.weight", *tensors)),
    )


def gguf_cases() -> Iterator[Case]:
    """A GGUF file of every family that has a name there: a converted one, or the least."""
    recorded = {(header.family, header.architecture): header for header in headers()}
    for family, path in families().items():
        table = read_toml(path)
        for architecture in table.get("match", {}).get("gguf", []):
            if header := recorded.get((family, architecture)):
                keys = {f"{architecture}.{key}": value for key, value in header.keys.items()}
                known = gguf_facts({"general.architecture": architecture, **keys}, header.shapes)
                yield Case(f"{family} {architecture}", family, known, (architecture,))
                continue
            is_moe = "experts" in str(table.get("dims", {})) or "moe" in family
            is_latent = architecture in ("deepseek2", "deepseek32", "glm-dsa", "minicpm3")
            more = GGUF_MOE if is_moe or (is_latent and architecture != "minicpm3") else {}
            more = more | (GGUF_LATENT if is_latent else {})
            more = more | (GGUF_INDEXER if architecture in ("deepseek32", "glm-dsa") else {})
            more = more | ({"expert_gating_func": 2} if family == "deepseek_v3" else {})
            tensors = GGUF_LAYERS if family == "deci" else ()
            known = gguf_like(architecture, *tensors, **{"attention.sliding_window": 16}, **more)
            yield Case(f"{family} {architecture}", family, known, (architecture,))


def parameters(spec: ModelSpec) -> tuple[str, ...]:
    """The names of a model's parameters."""
    return build_abstract_model(spec, jnp.float32).names


def tensor_names(spec: ModelSpec) -> set[str]:
    """Every name that the parameters of a model may have in its checkpoint."""
    places = (spec.tensors.source_of(parameter) for parameter in parameters(spec))
    return {name for place in places if place is not None for name in place.names}
