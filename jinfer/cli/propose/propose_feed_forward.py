"""Feed-forwards of a proposed spec: plain, gated and mixtures of experts, by name and shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinfer.cli.propose.checkpoint_layers import Part
from jinfer.cli.propose.proposal import KEYS, Branch, SpecFacts, activation, linear

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
    for each in ("gate", "up", "down"):
        if each in own and own[each] is not fused:
            branch.take(f"{name}.{each}", own[each], transpose=transposed)
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
