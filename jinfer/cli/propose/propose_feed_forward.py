"""Feed-forward drafts: plain, gated and mixtures of experts, by names and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinfer.cli.propose.checkpoint_layers import Part
from jinfer.cli.propose.layer_branch import Branch, activation, norm, turned
from jinfer.cli.propose.spec_facts import KEYS, DraftFacts

_SCORING = (
    "scoring_func",
    "score_function",
    "moe_router_activation_func",
    "router_score_function",
    "score_func",
    "gate_act",
    "expert_gating_func",
    "expert_selection_fn",
)


def feed_forward(
    roles: Mapping[str, Part], facts: DraftFacts, transposed: bool, name: str = "ffn"
) -> Branch | None:
    """A feed-forward network, of two matrices or three.

    Args:
        transposed: matrices are stored [inputs, outputs].
        name: the module's, of which the roles begin with the same word.
    """
    own = {r.removeprefix(f"{name}."): p for r, p in roles.items() if r.startswith(f"{name}.")}
    fused = own.get("{gate,up}")
    up, down = own.get("up", fused), own.get("down")
    if up is None or down is None:
        return None
    hidden = facts.known["hidden"]
    if len(up.shape) != 2 or len(down.shape) != 2 or hidden not in down.shape:
        return None
    branch = Branch("dense" if name == "ffn" else "")
    width = down.shape[0] if transposed else down.shape[1]
    outputs = up.shape[1] if transposed else up.shape[0]
    if fused is None and "gate" not in own and outputs == 2 * width:
        fused, own = up, {**own, "{gate,up}": up}  # both matrices of a gated one, in one
    gated = fused is not None or "gate" in own
    table: dict[str, Any] = {"kind": "gated" if gated else "mlp"}
    if name == "ffn" and "intermediate" not in facts.known:
        facts.dim("intermediate", width, facts.divided(width, "hidden"))
    elif facts.known.get("intermediate") != width or name != "ffn":
        keys = (
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_intermediate_size",
            "n_shared_experts",
            *KEYS["intermediate"],
        )
        times = facts.divided(width, "expert_intermediate")
        table["width"] = facts.size(width, *keys)
        if isinstance(table["width"], int) and times:
            table["width"] = times
    inputs = up.shape[0] if transposed else up.shape[1]
    if inputs != hidden:
        table["inputs"] = inputs
    table |= activation(facts)
    if (gated and up.bias and down.bias) or (not gated and up.bias):
        table["bias"] = True
    elif gated and down.bias:
        table["bias"] = "down"
    if fused is not None:
        branch.take(f"{name}.{{gate,up}}", fused, transpose=transposed)
        facts.note(f"{fused.name}: the gate's rows are taken to come first")
    for each in ("gate", "up", "down"):
        if each in own and own[each] is not fused:
            branch.take(f"{name}.{each}", own[each], transpose=transposed)
    if {"alpha_p", "alpha_n"} <= set(own):
        table["activation"] = "xielu"
        branch.take(f"{name}.alpha_p", own["alpha_p"])
        branch.take(f"{name}.alpha_n", own["alpha_n"])
    if (sub := own.get("sub_norm")) and gated and fused is None:
        return _normed(own, sub, table, width, facts)
    branch.modules[name], branch.value = table, f"{name}({{n}})"
    return branch


def matrices_by_shape(
    roles: Mapping[str, Part], parts: Mapping[str, Part], facts: DraftFacts, transposed: bool
) -> dict[str, Part]:
    """Role -> matrix of a feed-forward whose names say nothing: from hidden to a width and back.

    They are in one module, and there are no others of its shapes; of two that go to the width the
    one that is called a gate is it, or else the first.
    """
    if any(role.startswith("ffn.") for role in roles):
        return {}
    hidden, taken = facts.known["hidden"], {part.inner for part in roles.values()}
    by_module: dict[str, list[Part]] = {}
    for inner, part in parts.items():
        if (
            inner not in taken
            and len(part.shape) == 2
            and hidden in part.shape
            and part.vector == 0
        ):
            by_module.setdefault(inner.rpartition(".")[0], []).append(part)
    for matrices in by_module.values():
        widths = {sum(part.shape) - hidden for part in matrices}
        inputs = 0 if transposed else 1
        ups = [part for part in matrices if part.shape[inputs] == hidden]
        downs = [part for part in matrices if part not in ups]
        if len(widths) != 1 or hidden in widths or len(downs) != 1 or len(ups) not in (1, 2):
            continue
        names = ", ".join(part.last for part in matrices)
        facts.note(f"{names}: read as a feed-forward by their shapes")
        if len(ups) == 1:
            return {"ffn.up": ups[0], "ffn.down": downs[0]}
        gate = next((part for part in ups if "gate" in part.last.lower()), ups[0])
        up = next(part for part in ups if part is not gate)
        return {"ffn.gate": gate, "ffn.up": up, "ffn.down": downs[0]}
    return {}


def _normed(
    own: Mapping[str, Part], sub: Part, table: Mapping[str, Any], width: int, facts: DraftFacts
) -> Branch:
    """A gated feed-forward with a norm before its last matrix, of modules."""
    branch, size = Branch("dense"), table.get("width", "intermediate")
    branch.linear("ffn_gate", own["gate"], size)
    branch.linear("ffn_up", own["up"], size)
    branch.linear("ffn_down", own["down"], "hidden", inputs=size)
    branch.modules["ffn_act"] = {"kind": "activation", "function": table.get("activation", "silu")}
    branch.modules["ffn_sub_norm"] = norm(sub) | {"size": size}
    branch.take("ffn_sub_norm", sub)
    branch.value = "ffn_down(ffn_sub_norm(ffn_act(ffn_gate({n})) * ffn_up({n})))"
    return branch


def experts(roles: Mapping[str, Part], facts: DraftFacts) -> Branch | None:
    """A mixture of experts, stored one by one or in one tensor, with its shared expert."""
    router = roles.get("ffn.router")
    own = {r.removeprefix("ffn.experts."): p for r, p in roles.items() if "ffn.experts." in r}
    fused = own.get("{gate,up}")
    up, down = own.get("up", fused), own.get("down")
    if router is None or up is None or down is None:
        return None
    hidden, count = facts.known["hidden"], router.shape[0]
    sizes = 3 if "{e}" not in down.name else 2
    if any(len(part.shape) != sizes or hidden not in part.shape for part in (up, down)) or (
        len(router.shape) != 2
    ):
        return None
    stacked = "{e}" not in down.name
    if (
        fused is None
        and "gate" not in own
        and up.shape[-1 if up.shape[-2] == hidden else -2]
        == 2 * (down.shape[-1] if down.shape[-2] == hidden else down.shape[-2])
    ):
        own = {("{gate,up}" if part is up else role): part for role, part in own.items()}
        fused = up
    branch = Branch("sparse")
    turn = (stacked and turned(down, -1, False)) or (
        stacked and down.shape[-1] == hidden != down.shape[-2]
    )
    width = down.shape[-2] if turn else down.shape[-1]
    gated = fused is not None or "gate" in own
    table: dict[str, Any] = {"kind": "moe"} | ({} if gated else {"gated": False})
    for name, value in (("experts", count), ("expert_intermediate", width)):
        more = facts.dim(name, value)
        table |= {"width" if name == "expert_intermediate" else name: v for v in more.values()}
    key = facts.key(*KEYS["top_k"])
    if key and isinstance(facts.get(key), int):
        facts.dims.setdefault("top_k", f"${key}")
    else:
        facts.dims.setdefault("top_k", 2)
        facts.note("top_k: no key says how many experts are chosen; 2 is a guess")
    table |= activation(facts)
    _take(branch, own, up, fused, turn, stacked)
    if any("bias" in part.leaves or role.endswith(".bias") for role, part in own.items()):
        table["bias"] = True
    branch.take("ffn.router", router)
    if limit := facts.key("swiglu_limit"):
        table |= {"activation": "clamped_swiglu", "limit": f"${limit}"}
        if fused is not None:
            facts.note(f"{fused.name}: gate and up are taken to stand in turn")
            for name, place in branch.tensors.items():
                if "{gate,up}" in name and isinstance(place, dict):
                    place["groups"] = "expert_intermediate"
    _routing(branch, table, roles, facts)
    branch.modules["ffn"], branch.value = table, "ffn({n})"
    if shared := feed_forward(roles, facts, False, "shared_expert"):
        _join(branch, shared, roles)
    return branch


def _take(
    branch: Branch, own: Mapping[str, Part], up: Part, fused: Part | None, turn: bool, stacked: bool
) -> None:
    for role, part in own.items():
        name, leaf = role.removesuffix(".bias"), role.endswith(".bias")
        if not leaf and stacked and len(part.shape) == 3 and set(part.leaves) == {""}:
            name = f"{name}.weight"  # its bias is another tensor
        axis = {"axis": 1} if part is fused or "{gate,up}" in role else {}
        turns = {"transpose": True} if turn and not leaf else {}
        branch.take(f"ffn.experts.{name}{'.bias' if leaf else ''}", part, **axis, **turns)


def _routing(
    branch: Branch, table: dict[str, Any], roles: Mapping[str, Part], facts: DraftFacts
) -> None:
    """How experts are chosen and weighed."""
    router, correction = roles["ffn.router"], roles.get("ffn.router.correction")
    table |= {"router_bias": True} if router.bias else {}
    key = facts.key(*_SCORING)
    word = facts.get(key) if key else None
    if word in ("softmax", "sigmoid"):
        table["scoring"] = f"${key}"
    elif correction or facts.get("moe_router_use_sigmoid"):
        table["scoring"] = "sigmoid"
        facts.note("scores of experts: a sigmoid, as most with a correction have")
    if correction:
        table["correction_bias"] = True
        branch.take("ffn.router.correction", correction)
    norm = facts.key(
        "expert_weights_norm",
        "norm_topk_prob",
        "moe_renormalize",
        "route_norm",
        "norm_topk",
        "moe_norm_topk",
    )
    if norm:
        table["renormalize"] = f"${norm}"
    else:
        table["renormalize"] = True
        facts.note("renormalize: no key says whether the experts' weights are divided by their sum")
    if scale := facts.key(
        "routed_scaling_factor",
        "route_scale",
        "moe_router_scaling_factor",
        "router_scaling_factor",
        "expert_weights_scale",
    ):
        table["scale"] = f"${scale}"
    groups = facts.key("n_group", "num_expert_group", "expert_group_count")
    if groups and isinstance(facts.get(groups), int) and facts.get(groups) > 0:
        chosen = facts.key("topk_group", "num_limited_groups", "expert_group_used_count")
        table |= {"groups": f"${groups}", "top_k_groups": f"${chosen}" if chosen else 1}
        table |= {"group_score": "top_2"} if correction else {}


def _join(branch: Branch, shared: Branch, roles: Mapping[str, Part]) -> None:
    """Adds a shared expert, behind its gate if it has one."""
    value = "shared_expert({n})"
    if gate := roles.get("shared_expert_gate"):
        branch.modules["shared_expert_gate"] = {"kind": "linear", "outputs": 1}
        branch.modules["sigmoid"] = {"kind": "activation", "function": "sigmoid"}
        branch.take("shared_expert_gate", gate)
        value = f"sigmoid(shared_expert_gate({{n}})) * {value}"
    branch.modules |= shared.modules
    branch.tensors |= shared.tensors
    branch.used |= shared.used
    branch.value += f" + {value}"
