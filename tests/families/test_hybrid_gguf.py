"""Hybrids as GGUF files have them, written here from their goldens: the logits are the reference's.

The layouts are those of llama.cpp's converter: decays are a itself, not its logarithm; vectors of
groups have two axes; 1 is added to the norms; experts stand apart; Llama's rows of q and k are
reordered; heads of values are tiled; Falcon-H1's multipliers are in the weights.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer import LLM
from jinfer.loader.checkpoint import open_checkpoint

from .gguf_files import write_gguf
from .test_moe_gguf import side_by_side

GOLDENS = Path(__file__).parents[1] / "goldens"

type Config = Mapping[str, Any]
type Values = np.ndarray

WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.final_layernorm.weight": "output_norm.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight",
    "lm_head.weight": "output.weight",
}
ATTENTION = {
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"self_attn.{part}_layernorm": f"attn_{part}_norm" for part in "qk"},
    "self_attn.o_proj": "attn_output", "self_attn.out_proj": "attn_output",
    "input_layernorm": "attn_norm", "operator_norm": "attn_norm",
}  # fmt: skip
MAMBA = {
    "mamba.in_proj": "ssm_in", "mamba.conv1d": "ssm_conv1d", "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
}  # fmt: skip
# Of a layer: the checkpoint's names of modules, then GGUF's.
NAMES: dict[str, dict[str, str]] = {
    "lfm2": {
        "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down",
        "ffn_norm": "ffn_norm", "conv.in_proj": "shortconv.in_proj",
        "conv.conv": "shortconv.conv", "conv.out_proj": "shortconv.out_proj",
    },
    "granitehybrid": MAMBA | {
        "post_attention_layernorm": "ffn_norm", "block_sparse_moe.router.layer": "ffn_gate_inp",
        "block_sparse_moe.output_linear": "ffn_down_exps", "shared_mlp.output_linear":
        "ffn_down_shexp",
    },
    "falcon-h1": MAMBA | {f"feed_forward.{p}_proj": f"ffn_{p}" for p in ("gate", "up", "down")},
    "qwen35": {
        **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
        "post_attention_layernorm": "post_attention_norm", "linear_attn.in_proj_qkv": "attn_qkv",
        "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta",
        "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.conv1d": "ssm_conv1d",
        "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    },
}  # fmt: skip
# Tensors with names of their own.
BARE = {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias"}
# Tensors with two parts of rows.
HALVES = {
    "block_sparse_moe.input_linear": ("ffn_gate_exps", "ffn_up_exps"),
    "shared_mlp.input_linear": ("ffn_gate_shexp", "ffn_up_shexp"),
}


def tiled(values: Values, config: Config, axis: int = 0) -> Values:
    """Heads of values in another order: the first of every key head, then the second ones."""
    keys = config["linear_num_key_heads"]
    each = config["linear_num_value_heads"] // keys
    shape = (*values.shape[:axis], keys, each, -1, *values.shape[axis + 1 :])
    return values.reshape(shape).swapaxes(axis, axis + 1).reshape(values.shape)


def granite(name: str, values: Values, config: Config) -> Values:
    if name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
        heads = "num_attention_heads" if ".q_" in name else "num_key_value_heads"
        return side_by_side(values, config[heads])
    return mamba(name, values, config)


def mamba(name: str, values: Values, config: Config) -> Values:
    if name.endswith(("A_log", ".D")):
        return (-np.exp(values) if name.endswith("A_log") else values)[:, None]
    if name == "mamba.norm.weight":
        return values.reshape(config["mamba_n_groups"], -1)
    return values


def falcon_h1(name: str, values: Values, config: Config) -> Values:
    gate, down = config["mlp_multipliers"]
    into = config["attention_in_multiplier"]
    factors = {
        "self_attn.q_proj.weight": into, "self_attn.v_proj.weight": into,
        "self_attn.k_proj.weight": into * config["key_multiplier"],
        "self_attn.o_proj.weight": config["attention_out_multiplier"],
        "mamba.out_proj.weight": config["ssm_out_multiplier"],
        "feed_forward.gate_proj.weight": gate, "feed_forward.down_proj.weight": down,
        "lm_head.weight": config["lm_head_multiplier"],
        "model.embed_tokens.weight": config["embedding_multiplier"],
    }  # fmt: skip
    if name == "mamba.in_proj.weight":
        width, heads = config["mamba_d_ssm"], config["mamba_n_heads"]
        states = config["mamba_n_groups"] * config["mamba_d_state"]
        each = np.repeat(config["ssm_multipliers"], [width, width, states, states, heads])
        return values * (config["ssm_in_multiplier"] * each[:, None]).astype(np.float32)
    return mamba(name, values * np.float32(factors.get(name, 1)), config)


def qwen35(name: str, values: Values, config: Config) -> Values:
    if name.endswith("norm.weight") and name != "linear_attn.norm.weight":
        return values + 1
    match name.removeprefix("linear_attn."):
        case "in_proj_qkv.weight" | "conv1d.weight":
            keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
            return np.concatenate([values[:keys], tiled(values[keys:], config)])
        case "in_proj_z.weight" | "in_proj_a.weight" | "in_proj_b.weight" | "dt_bias":
            return tiled(values, config)
        case "A_log":
            return tiled(-np.exp(values), config)
        case "out_proj.weight":
            return tiled(values, config, axis=1)
    return values


def _rotary(config: Config) -> Config:
    return config.get("rope_parameters") or config


def keys(config: Config, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": config["vocab_size"], "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"], "context_length": 256,
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "rope.freq_base": float(_rotary(config)["rope_theta"]),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps") or config["norm_eps"],
    } | {key.replace("__", "."): value for key, value in more.items()}  # fmt: skip


def of_attention(config: Config, kind: str) -> list[int]:
    """Key-value heads of each layer: none where it is another kind's."""
    heads = config["num_key_value_heads"]
    return [heads if each == kind else 0 for each in config["layer_types"]]


def lfm2_keys(config: Config) -> dict[str, Any]:
    heads = of_attention(config, "full_attention")
    length = config["conv_L_cache"]
    return keys(config, attention__head_count_kv=heads, shortconv__l_cache=length)


def mamba_keys(config: Config, width: int) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config["mamba_d_conv"], "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"], "ssm.inner_size": width,
        "ssm.time_step_rank": config["mamba_n_heads"],
    }  # fmt: skip


def granite_keys(config: Config) -> dict[str, Any]:
    return keys(
        config, attention__head_count_kv=of_attention(config, "attention"),
        expert_count=config["num_local_experts"], expert_used_count=config["num_experts_per_tok"],
        expert_shared_feed_forward_length=config["shared_intermediate_size"],
        attention__scale=config["attention_multiplier"], logit_scale=config["logits_scaling"],
        embedding_scale=config["embedding_multiplier"],
        residual_scale=config["residual_multiplier"], rope__scaling__finetuned=False,
    ) | mamba_keys(config, config["mamba_n_heads"] * config["mamba_d_head"])  # fmt: skip


def falcon_h1_keys(config: Config) -> dict[str, Any]:
    length = config["head_dim"]
    known = keys(config, attention__key_length=length, attention__value_length=length)
    return known | mamba_keys(config, config["mamba_d_ssm"])


def qwen35_keys(config: Config) -> dict[str, Any]:
    values, share = config["linear_num_value_heads"], _rotary(config)["partial_rotary_factor"]
    return keys(
        config, attention__key_length=config["head_dim"], full_attention_interval=4,
        rope__dimension_count=int(config["head_dim"] * share),
        ssm__conv_kernel=config["linear_conv_kernel_dim"], ssm__time_step_rank=values,
        ssm__state_size=config["linear_key_head_dim"],
        ssm__group_count=config["linear_num_key_heads"],
        ssm__inner_size=config["linear_value_head_dim"] * values,
    )  # fmt: skip


type Change = Callable[[str, Values, Config], Values]
# golden -> GGUF's architecture, its keys, what it does with a tensor's values.
CASES: dict[str, tuple[str, Callable[[Config], dict[str, Any]], Change]] = {
    "lfm2": ("lfm2", lfm2_keys, lambda name, values, config: values),
    "granite4_h_tiny": ("granitehybrid", granite_keys, granite),
    "falcon_h1": ("falcon-h1", falcon_h1_keys, falcon_h1),
    "qwen3_5": ("qwen35", qwen35_keys, qwen35),
}


def converted(golden: str, config: Config) -> dict[str, Values]:
    """The golden's tensors, by GGUF's names."""
    architecture, _, change = CASES[golden]
    names, file = ATTENTION | NAMES[architecture], dict[str, Values]()
    for full, tensor in open_checkpoint(GOLDENS / golden).tensors.items():
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", full)
        inner, block = (found[2], f"blk.{found[1]}.") if found else (full, "")
        values = change(inner, tensor.read().astype(np.float32), config)
        module, _, leaf = inner.rpartition(".")
        if not found:
            file[WHOLE[full]] = values
        elif module in HALVES:
            for name, half in zip(HALVES[module], np.split(values, 2, axis=-2), strict=True):
                file[f"{block}{name}.weight"] = half
        elif inner == "pre_ff_layernorm.weight":
            file[f"{block}ffn_norm"] = values
        elif leaf in BARE:
            file[block + BARE[leaf]] = values
        else:
            is_conv = "conv1d.weight" in inner or "conv.conv" in inner
            file[f"{block}{names[module]}.{leaf}"] = values.squeeze() if is_conv else values
    return file


@pytest.mark.parametrize("golden", CASES)
def test_logits(tmp_path: Path, golden: str) -> None:
    config = json.loads((GOLDENS / golden / "config.json").read_text())
    architecture, known, _ = CASES[golden]
    write_gguf(tmp_path / "m.gguf", architecture, known(config), converted(golden, config))
    llm = LLM(tmp_path / "m.gguf", dtype="float32")
    with np.load(GOLDENS / golden / "expected.npz") as expected:
        got = llm.logits([expected["input_ids"][0].tolist()])[0]
        np.testing.assert_allclose(got, expected["logits"][0], rtol=0, atol=2e-4)
