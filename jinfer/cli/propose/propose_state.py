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
from jinfer.cli.propose.proposal import KEYS, Branch, SpecFacts, Value, activation, linear

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


_FUSED = "{gate,up}"
_SCORING = (
    *("scoring_func", "score_function", "moe_router_activation_func", "router_score_function"),
    *("gate_act", "expert_gating_func"),
)
_SHARED_WIDTHS = (
    *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("shared_intermediate_size", "n_shared_experts"),
)


def feed_forward(
    roles: Mapping[str, Part], facts: SpecFacts, transposed: bool, name: str = "ffn"
) -> Branch | None:
    """Return the branch of a feed-forward network of two matrices or three.

    Args:
        roles: role -> module.
        transposed: matrices are stored [inputs, outputs].
        name: the module's name, and the first word of its roles.
    """
    own = {r.removeprefix(f"{name}."): p for r, p in roles.items() if r.startswith(f"{name}.")}
    fused, down = own.get(_FUSED), own.get("down")
    up, hidden = own.get("up", fused), facts.known["hidden"]
    if up is None or down is None or len(up.shape) != 2 or hidden not in down.shape:
        return None
    outputs, inputs = (1, 0) if transposed else (0, 1)
    branch, width = Branch("dense" if name == "ffn" else ""), down.shape[inputs]
    if fused is None and "gate" not in own and up.shape[outputs] == 2 * width:
        fused, own = up, {**own, _FUSED: up}  # both matrices of a gated one, in one
    gated = fused is not None or "gate" in own
    table: dict[str, Any] = {"kind": "gated" if gated else "mlp"}
    if name == "ffn" and "intermediate" not in facts.known:
        facts.dim("intermediate", width, facts.multiple(width, "hidden"))
    elif facts.known.get("intermediate") != width or name != "ffn":
        size = facts.size(width, *_SHARED_WIDTHS, *KEYS["intermediate"])
        expression = facts.multiple(width, "expert_intermediate")
        table["width"] = expression if size == width and expression else size
    table |= activation(facts)
    if up.bias and (down.bias or not gated):
        table["bias"] = True
    if fused is not None:
        branch.take(f"{name}.{_FUSED}", fused, transpose=transposed)
        facts.note(f"{fused.name}: the gate's rows are taken to come first")
    for item in ("gate", "up", "down"):
        if item in own and own[item] is not fused:
            branch.take(f"{name}.{item}", own[item], transpose=transposed)
    branch.modules[name], branch.value = table, f"{name}({{n}})"
    return branch


def experts(roles: Mapping[str, Part], facts: SpecFacts) -> Branch | None:
    """Return the branch of a mixture of experts, with its shared expert.

    The file has the experts' matrices one by one, or those of all experts in one tensor.
    """
    router = roles.get("ffn.router")
    own = {r.removeprefix("ffn.experts."): p for r, p in roles.items() if "ffn.experts." in r}
    fused, down = own.get(_FUSED), own.get("down")
    up, hidden = own.get("up", fused), facts.known["hidden"]
    if router is None or up is None or down is None or len(router.shape) != 2:
        return None
    stacked = "{e}" not in down.name
    if any(len(part.shape) != 2 + stacked or hidden not in part.shape for part in (up, down)):
        return None
    transposed = stacked and down.shape[-1] == hidden != down.shape[-2]
    width = down.shape[-2 if transposed else -1]
    gated = fused is not None or "gate" in own
    table: dict[str, Any] = {"kind": "moe"} | ({} if gated else {"gated": False})
    table |= facts.dim("experts", router.shape[0])
    if other := facts.dim("expert_intermediate", width):
        table["width"] = other["expert_intermediate"]
    key = facts.key(*KEYS["top_k"])
    facts.dims.setdefault("top_k", f"${key}" if key else 2)
    if not key:
        facts.note("top_k: no key says how many experts are chosen; 2 is a guess")
    table |= activation(facts)
    branch = Branch("sparse")
    for role, part in own.items():
        name, bias = role.removesuffix(".bias"), role.endswith(".bias")
        if stacked and not bias and len(part.shape) == 3 and set(part.leaves) == {""}:
            name = f"{name}.weight"  # its bias is another tensor
        keys: dict[str, Any] = {"axis": 1} if role.startswith(_FUSED) else {}
        keys |= {"transpose": True} if transposed and not bias else {}
        branch.take(f"ffn.experts.{name}{'.bias' if bias else ''}", part, **keys)
        if bias or part.bias:
            table["bias"] = True
    branch.take("ffn.router", router)
    if limit := facts.key("swiglu_limit"):
        table |= {"activation": "clamped_swiglu", "limit": f"${limit}"}
        facts.note("the experts' gate and up: rows taken to alternate")
        for name, place in branch.tensors.items():
            if _FUSED in name:
                place["groups"] = "expert_intermediate"
    _routing(branch, table, roles, facts)
    branch.modules["ffn"], branch.value = table, "ffn({n})"
    if shared := feed_forward(roles, facts, False, "shared_expert"):
        _add_shared(branch, shared, roles)
    return branch


def _routing(
    branch: Branch, table: dict[str, Any], roles: Mapping[str, Part], facts: SpecFacts
) -> None:
    """How experts are chosen and weighed."""
    correction = roles.get("ffn.router.correction")
    if roles["ffn.router"].bias:
        table["router_bias"] = True
    key = facts.key(*_SCORING)
    if facts.get(key) in ("softmax", "sigmoid"):
        table["scoring"] = f"${key}"
    elif correction or facts.get("moe_router_use_sigmoid"):
        table["scoring"] = "sigmoid"
        facts.note("scores of experts: a sigmoid, as most with a correction have")
    if correction:
        table["correction_bias"] = True
        branch.take("ffn.router.correction", correction)
    norms = ("expert_weights_norm", "norm_topk_prob", "moe_renormalize", "norm_topk")
    key = facts.key(*norms)
    table["renormalize"] = f"${key}" if key else True
    if not key:
        facts.note("renormalize: no key says whether the experts' weights are divided by their sum")
    scales = ("routed_scaling_factor", "moe_router_scaling_factor", "expert_weights_scale")
    if key := facts.key(*scales):
        table["scale"] = f"${key}"
    groups = facts.key("n_group", "num_expert_group", "expert_group_count")
    if groups and facts.get(groups) > 0:
        chosen = facts.key("topk_group", "num_limited_groups", "expert_group_used_count")
        table |= {"groups": f"${groups}", "top_k_groups": f"${chosen}" if chosen else 1}
        table |= {"group_score": "top_2"} if correction else {}


def _add_shared(branch: Branch, shared: Branch, roles: Mapping[str, Part]) -> None:
    """Add a shared expert, behind its gate if it has one."""
    value = "shared_expert({n})"
    if gate := roles.get("shared_expert_gate"):
        branch.modules["shared_expert_gate"] = linear(1)
        branch.modules["sigmoid"] = {"kind": "activation", "function": "sigmoid"}
        branch.take("shared_expert_gate", gate)
        value = f"sigmoid(shared_expert_gate({{n}})) * {value}"
    branch.modules |= shared.modules
    branch.tensors |= shared.tensors
    branch.used |= shared.used
    branch.value += f" + {value}"
