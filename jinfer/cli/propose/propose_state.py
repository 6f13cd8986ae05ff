"""State blocks of a proposed spec: recurrent mixers, each recognized by the names of its tensors.

`state_blocks.toml` has their modules and formulas; here are the sizes, which shapes tell.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinfer.cli.propose.checkpoint_layers import Part
from jinfer.cli.propose.proposal import KEYS, Branch, SpecFacts, Value

type Parts = Mapping[str, Part]
# Values of the template's "@name"; None if the shapes are not such a block's.
type Values = dict[str, Value] | None

_KERNELS = (
    *("mamba_d_conv", "conv_kernel", "linear_conv_kernel_dim", "conv_L_cache"),
    "linear_attn_config.short_conv_kernel_size",
)


def state_block(parts: Parts, facts: SpecFacts) -> Branch | None:
    """Return the branch of a layer's state block; None if no known block is there."""
    prefixes = {name.rpartition(".")[0] for name in parts}
    prefixes |= {prefix.partition(".")[0] for prefix in prefixes}
    for prefix in sorted(prefixes, key=len, reverse=True):
        start = f"{prefix}." if prefix else ""
        own = {name.removeprefix(start): p for name, p in parts.items() if name.startswith(start)}
        for block in _SIZES:
            if found := _block(block, own, facts):
                return found
    return None


def channel_mixing(parts: Parts, facts: SpecFacts) -> Branch | None:
    """Return the branch of RWKV-4's channel mixing, which replaces the feed-forward."""
    start = "feed_forward."
    own = {name.removeprefix(start): p for name, p in parts.items() if name.startswith(start)}
    return _block("channel_mixing", own, facts)


@functools.cache
def _templates() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("state_blocks.toml").read_text(encoding="utf-8"))


def _block(block: str, own: Parts, facts: SpecFacts) -> Branch | None:
    """The branch of this block, if all tensors that it needs are there and their shapes fit."""
    table = _templates()[block]
    if not set(table["needs"].split()) <= own.keys():
        return None
    values = _SIZES.get(block, _width)(own, facts)
    if values is None:
        return None
    for name, text in table.get("dims", {}).items():
        facts.dims.setdefault(name, text)
    branch, absent = Branch(table["word"]), set[str]()
    modules = _modules(table, values)
    for line in table["tensors"]:
        parameter, names, *options = line.split()
        part = next((own[name] for name in names.split("|") if name in own), None)
        places = re.findall(r"\w+", parameter)
        if part is None:
            absent.update(places)
            continue
        keys = dict(option.split("=") if "=" in option else (option, True) for option in options)
        branch.take(parameter, part, **keys)
        for name in places:
            if part.bias and name in modules and "." not in parameter:
                modules[name]["bias"] = True
    absent -= {name for taken in branch.tensors for name in re.findall(r"\w+", taken)}
    branch.modules = {name: module for name, module in modules.items() if name not in absent}
    lines = table["formula"]
    for name in absent:  # a module's call becomes its argument
        lines = [re.sub(rf"\b{name}\(((?:[^()]|\([^()]*\))*)\)", r"\1", line) for line in lines]
    *branch.lines, branch.value = lines
    if note := table.get("note"):
        facts.note(note)
    return branch


def _modules(table: Mapping[str, Any], values: Mapping[str, Value]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, text in table.get("linear", {}).items():
        inputs, _, outputs = text.rpartition(" -> ")
        found[name] = {"kind": "linear"} | ({"inputs": inputs} if inputs else {})
        found[name]["outputs"] = outputs
    for name, size in table.get("conv", {}).items():
        found[name] = {"kind": "conv", "size": size, "kernel": "@kernel"}
        if "conv_activation" in table:
            found[name]["activation"] = table["conv_activation"]
    for name, function in table.get("activation", {}).items():
        found[name] = {"kind": "activation", "function": function}
    found |= {name: dict(module) for name, module in table.get("modules", {}).items()}
    return {
        name: {key: values.get(v[1:]) if str(v).startswith("@") else v for key, v in module.items()}
        for name, module in found.items()
    }


def _mamba2(own: Parts, facts: SpecFacts) -> Values:
    heads, width = own["A_log"].vector, own["out_proj"].shape[1]
    groups = facts.get("mamba_n_groups", "n_groups", "mamba_ngroups", "num_groups") or 1
    states = (own["conv1d"].shape[0] - width) // (2 * groups)
    facts.set_size("ssm_heads", heads, "mamba_n_heads", "mamba_num_heads", "num_heads")
    whole = facts.size(width, "mamba_d_ssm", "mamba_intermediate_size")
    head = facts.size(width // heads, "mamba_d_head", "mamba_head_dim", "head_dim")
    facts.dims.setdefault("ssm_width", f"ssm_heads * {head}" if whole == width else whole)
    facts.set_size("ssm_groups", groups, "mamba_n_groups", "n_groups", "mamba_ngroups")
    facts.set_size("ssm_states", states, "mamba_d_state", "ssm_state_size", "state_size")
    # A norm over all groups together, where there are experts (Granite).
    over = 1 if facts.get("num_local_experts") is not None else "ssm_groups"
    return {"kernel": facts.size(own["conv1d"].shape[-1], *_KERNELS), "groups": over}


def _mamba(own: Parts, facts: SpecFacts) -> Values:
    width, states = own["A_log"].shape
    facts.set_size("ssm_width", width, "intermediate_size", "mamba_d_ssm")
    facts.set_size("ssm_states", states, "state_size", "mamba_d_state")
    rank = own["x_proj"].shape[0] - 2 * states
    facts.set_size("dt_rank", rank, "time_step_rank", "mamba_dt_rank")
    return {"kernel": facts.size(own["conv1d"].shape[-1], *_KERNELS)}


def _delta(own: Parts, facts: SpecFacts) -> Values:
    out, conv = own.get("out_proj", own.get("o_proj")), own.get("conv1d", own.get("q_conv1d"))
    if out is None or conv is None or not {"norm", "o_norm"} & own.keys() or "D" in own:
        return None
    heads, width = own["A_log"].vector, out.shape[1]
    keys = (conv.shape[0] - width) // 2 if "conv1d" in own else conv.shape[0]
    of_keys = ("linear_num_key_heads", "linear_attn_config.num_heads")
    key_heads = facts.get(*of_keys)
    key_heads = key_heads if isinstance(key_heads, int) and keys % key_heads == 0 else heads
    facts.set_size("delta_heads", heads, "linear_num_value_heads", of_keys[1])
    facts.set_size("delta_key_heads", key_heads, *of_keys)
    dim = "linear_attn_config.head_dim"
    facts.set_size("delta_key_dim", keys // key_heads, "linear_key_head_dim", dim)
    facts.set_size("delta_value_dim", width // heads, "linear_value_head_dim", dim)
    channels = own["dt_bias"].vector == keys != heads
    return {
        "kernel": facts.size(conv.shape[-1], *_KERNELS),
        "channels": channels,
        "decays": "keys" if channels else "delta_heads",
        "gate": "sigmoid" if channels else "silu",
        "decay_inputs": own["f_a_proj"].shape[0] if "f_a_proj" in own else "hidden",
        "gate_inputs": own["g_a_proj"].shape[0] if "g_a_proj" in own else "hidden",
    }


def _short_conv(own: Parts, facts: SpecFacts) -> Values:
    hidden = facts.known["hidden"]
    if own["in_proj"].shape != (3 * hidden, hidden):
        return None
    return {"kernel": facts.size(own["conv"].shape[-1], *_KERNELS)}


def _rg_lru(own: Parts, facts: SpecFacts) -> Values:
    facts.set_size("lru_width", own["linear_x"].shape[0], "lru_width")
    blocks = facts.size(own["rg_lru.input_gate_weight"].shape[0], *KEYS["heads"])
    return {"blocks": blocks, "kernel": own["conv_1d"].shape[-1]}


def _linear_attention(own: Parts, facts: SpecFacts) -> Values:
    width, heads = own["out_proj"].shape[1], facts.get(*KEYS["heads"])
    if not isinstance(heads, int) or width % heads:
        return None
    size = facts.size(heads, *KEYS["heads"])
    return {"width": width, "heads": size, "head_dim": width // heads}


def _width(own: Parts, facts: SpecFacts) -> Values:
    return {"width": own["key"].shape[0]}


_SIZES: Mapping[str, Callable[[Parts, SpecFacts], Values]] = {
    "mamba2": _mamba2,
    "mamba": _mamba,
    "delta": _delta,
    "short_conv": _short_conv,
    "rg_lru": _rg_lru,
    "linear_attention": _linear_attention,
    "time_mixing": _width,
}
