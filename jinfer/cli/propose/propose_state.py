"""State block drafts: convolutions, state spaces, delta rules and other recurrences, each known by
its own tensors."""

from __future__ import annotations

import re
from collections.abc import Callable

from jinfer.cli.propose.layer_branch import Branch, act, linear, set_sizes, sized
from jinfer.cli.propose.propose_recurrences import Parts, linear_attention, lru, wkv
from jinfer.cli.propose.spec_facts import KEYS, DraftFacts

_MARKS = re.compile(
    r"A_log|dt_bias|([qkv]_)?conv_?1d|conv|time_decay|time_first|time_mix_\w+|recurrent_param"
    r"|ssm_\w+|dt_proj"
)

_KERNELS = (
    *("mamba_d_conv", "conv_kernel", "linear_conv_kernel_dim", "conv_L_cache", "d_conv"),
    *("linear_attn_config.short_conv_kernel_size", "ssm.conv_kernel"),
)


def state_block(parts: Parts, facts: DraftFacts) -> Branch | None:
    """The state block of a layer's parts; None if there is none that is known."""
    for prefix in dict.fromkeys(_prefixes(parts)):
        own = {n.removeprefix(prefix): p for n, p in parts.items() if n.startswith(prefix)}
        for make in _BLOCKS:
            if branch := make(own, facts):
                return branch
    return None


def unknown_state(parts: Parts) -> set[str]:
    """Names in the layer of all that is in blocks with a recurrent state that no draft knows."""
    marked = (re.match(r"(.*\.|ssm_)(.+)", inner) for inner in parts)
    blocks = {found[1] for found in marked if found and _MARKS.fullmatch(found[2])}
    return {inner for inner in parts if any(inner.startswith(block) for block in blocks)}


def _prefixes(parts: Parts) -> list[str]:
    found = [inner[: len(inner) - len(inner.rpartition(".")[2])] for inner in parts]
    outer = [name.partition(".")[0] + "." for name in found if "." in name.rstrip(".")]
    return sorted({*found, *outer}, key=len, reverse=True)


def _ssm(own: Parts, facts: DraftFacts) -> Branch | None:
    """Mamba-2: one projection to gate, x, b, c and dt, one convolution of x, b and c."""
    if not {"in_proj", "conv1d", "A_log", "D", "dt_bias", "out_proj"} <= set(own):
        return None
    heads, width = own["A_log"].vector, own["out_proj"].shape[1]
    mixed, kernel = own["conv1d"].shape[0], own["conv1d"].shape[-1]
    states = facts.get("mamba_d_state", "ssm_state_size", "state_size", "mamba_state_size")
    groups = facts.get("mamba_n_groups", "n_groups", "mamba_ngroups", "num_groups")
    if not isinstance(groups, int) or not groups:
        groups = 1
    if not isinstance(states, int) or 2 * groups * states != mixed - width:
        states = (mixed - width) // (2 * groups)
    branch, bias = Branch("mamba"), own["in_proj"].bias
    dims = {
        "ssm_heads": (heads, ("mamba_n_heads", "mamba_num_heads", "num_heads", "n_mamba_heads")),
        "ssm_width": (width, ("mamba_d_ssm", "mamba_intermediate_size")),
        "ssm_groups": (groups, ("mamba_n_groups", "n_groups", "mamba_ngroups")),
        "ssm_states": (states, ("mamba_d_state", "ssm_state_size", "state_size")),
    }
    set_sizes(facts, dims)
    if not isinstance(facts.dims["ssm_width"], str):
        keys = ("mamba_d_head", "mamba_head_dim", "head_dim")
        facts.dims["ssm_width"] = sized(facts, width, "ssm_heads", *keys)
    facts.dims.setdefault("conv_states", "ssm_groups * ssm_states")
    for name, size in (
        ("gate", "ssm_width"),
        ("in_x", "ssm_width"),
        ("in_b", "conv_states"),
        ("in_c", "conv_states"),
        ("in_dt", "ssm_heads"),
    ):
        branch.modules[name] = linear(size, bias)
    branch.take("{gate,in_x,in_b,in_c,in_dt}", own["in_proj"])
    conv = {"kernel": facts.size(kernel, *_KERNELS), "activation": "silu"} | (
        {"bias": True} if own["conv1d"].bias else {}
    )
    for name, size in (
        ("conv_x", "ssm_width"),
        ("conv_b", "conv_states"),
        ("conv_c", "conv_states"),
    ):
        branch.modules[name] = {"kind": "conv", "size": size, **conv}
    branch.take("{conv_x,conv_b,conv_c}", own["conv1d"])
    branch.modules["ssm"] = {"kind": "ssm"}
    if facts.get("time_step_min") is not None and facts.get(
        "hybrid_override_pattern", "layers_block_type"
    ):
        branch.modules["ssm"]["least"] = "$time_step_min"
    _scan(branch, own, "ssm")
    act(branch)
    value = "y * act(gate({n}))"
    if norm := own.get("norm"):
        grouped = groups > 1 and not facts.get("num_local_experts") is not None
        branch.modules["gate_norm"] = {"kind": "rms", "size": "ssm_width", "eps": "eps"}
        branch.modules["gate_norm"] |= {"groups": "ssm_groups"} if grouped else {}
        branch.take("gate_norm", norm)
        before = facts.get("mamba_norm_before_gate")
        value = "gate_norm(y) * act(gate({n}))" if before else f"gate_norm({value})"
        facts.note("the norm of the state space's output: over each group, and after the gate")
    branch.lines.append(
        "y = ssm(conv_x(in_x({n})), conv_b(in_b({n})), conv_c(in_c({n})), in_dt({n}))"
    )
    branch.linear("ssm_out", own["out_proj"], "hidden", inputs="ssm_width")
    branch.value = f"ssm_out({value})"
    return branch


def _scan(branch: Branch, own: Parts, name: str) -> None:
    for parameter, inner in (("a_log", "A_log"), ("d", "D"), ("dt_bias", "dt_bias")):
        if inner in own:
            branch.take(f"{name}.{parameter}", own[inner])


def _selective_scan(own: Parts, facts: DraftFacts) -> Branch | None:
    """Mamba: a scan whose step, b and c come from x after the convolution."""
    if not {"in_proj", "conv1d", "x_proj", "dt_proj", "A_log", "D", "out_proj"} <= set(own):
        return None
    width, states = own["A_log"].shape
    rank = own["x_proj"].shape[0] - 2 * states
    branch, bias = Branch("mamba"), own["in_proj"].bias
    set_sizes(
        facts,
        {
            "ssm_width": (width, ("intermediate_size", "mamba_d_ssm")),
            "ssm_states": (states, ("state_size", "mamba_d_state")),
            "dt_rank": (rank, ("time_step_rank", "mamba_dt_rank")),
        },
    )
    branch.modules |= {"in_x": linear("ssm_width", bias), "gate": linear("ssm_width", bias)}
    branch.take("{in_x,gate}", own["in_proj"])
    branch.modules["conv"] = {
        "kind": "conv",
        "size": "ssm_width",
        "activation": "silu",
        "kernel": facts.size(own["conv1d"].shape[-1], *_KERNELS),
        "bias": own["conv1d"].bias,
    }
    branch.take("conv", own["conv1d"])
    branch.modules |= {
        "dt_low": linear("dt_rank", inputs="ssm_width"),
        "b": linear("ssm_states", inputs="ssm_width"),
        "c": linear("ssm_states", inputs="ssm_width"),
        "dt": linear("ssm_width", inputs="dt_rank"),
        "scan": {"kind": "selective_scan"},
    }
    branch.take("{dt_low,b,c}", own["x_proj"])
    branch.take("dt", own["dt_proj"])
    branch.tensors["scan.dt_bias"] = f"{own['dt_proj'].name}.bias"
    _scan(branch, own, "scan")
    inner = {"b": "b(h)", "c": "c(h)", "dt_low": "dt_low(h)"}
    for name, word, size in (
        ("b", "b", "ssm_states"),
        ("c", "c", "ssm_states"),
        ("dt_low", "dt", "dt_rank"),
    ):
        if norm := own.get(f"{word}_layernorm"):
            branch.modules[f"{word}_norm"] = {"kind": "rms", "size": size, "eps": "eps"}
            branch.take(f"{word}_norm", norm)
        elif facts.get("mixer_rms_eps") is not None:  # norms without a weight
            branch.modules[f"{word}_norm"] = {
                "kind": "rms",
                "size": size,
                "weight": False,
                "eps": "$mixer_rms_eps",
            }
        else:
            continue
        inner[name] = f"{word}_norm({inner[name]})"
    act(branch)
    branch.lines += [
        "h = conv(in_x({n}))",
        f"y = scan(h, {inner['b']}, {inner['c']}, dt({inner['dt_low']}))",
    ]
    branch.linear("ssm_out", own["out_proj"], "hidden", inputs="ssm_width")
    branch.value = "ssm_out(y * act(gate({n})))"
    return branch


def _delta(own: Parts, facts: DraftFacts) -> Branch | None:
    """Gated delta rule, with a decay a head (delta net) or a channel (Kimi Delta Attention)."""
    if not {"A_log", "dt_bias"} <= set(own) or not {"conv1d", "q_conv1d"} & set(own) or "D" in own:
        return None
    branch, heads = Branch("delta"), own["A_log"].vector
    norm = own.get("norm", own.get("o_norm"))
    out = own.get("out_proj", own.get("o_proj"))
    if norm is None or out is None:
        return None
    value_dim = out.shape[1] // heads
    mixed = (
        own["conv1d"].shape[0]
        if "conv1d" in own
        else 2 * own["q_conv1d"].shape[0] + heads * value_dim
    )
    keys = (mixed - heads * value_dim) // 2
    channels = own["dt_bias"].vector == keys != heads
    key_heads = facts.get("linear_num_key_heads", "linear_attn_config.num_heads")
    key_heads = key_heads if isinstance(key_heads, int) and keys % key_heads == 0 else heads
    set_sizes(
        facts,
        {
            "delta_heads": (
                heads,
                ("linear_num_value_heads", "linear_attn_config.num_heads", *KEYS["heads"]),
            ),
            "delta_key_heads": (
                key_heads,
                ("linear_num_key_heads", "linear_attn_config.num_heads", *KEYS["heads"]),
            ),
            "delta_key_dim": (
                keys // key_heads,
                ("linear_key_head_dim", "linear_attn_config.head_dim"),
            ),
            "delta_value_dim": (
                value_dim,
                ("linear_value_head_dim", "linear_attn_config.head_dim"),
            ),
        },
    )
    facts.dims |= {
        "keys": "delta_key_heads * delta_key_dim",
        "values": "delta_heads * delta_value_dim",
    }
    groups = {"groups": "delta_key_heads"}
    sizes = {"q": "keys", "k": "keys", "v": "values"}
    for letter, size in sizes.items():
        branch.modules[f"delta_{letter}"] = linear(size)
        conv = own.get("conv1d", own.get(f"{letter}_conv1d"))
        assert conv is not None
        branch.modules[f"conv_{letter}"] = {
            "kind": "conv",
            "size": size,
            "activation": "silu",
            "kernel": facts.size(conv.shape[-1], *_KERNELS),
        }
        branch.modules[f"conv_{letter}"] |= {"bias": True} if conv.bias else {}
        if "conv1d" not in own:
            branch.take(f"conv_{letter}", conv)
    if "conv1d" in own:
        branch.take("{conv_q,conv_k,conv_v}", own["conv1d"])
    gate = decay = beta = ""
    if "in_proj_qkvz" in own:
        branch.take("{delta_q,delta_k,delta_v,delta_gate}", own["in_proj_qkvz"], **groups)
        branch.modules["delta_gate"], gate = linear("values"), "delta_gate({n})"
        facts.note(f"rows of {own['in_proj_qkvz'].name}: taken to stand by head of keys")
    elif "in_proj_qkv" in own:
        branch.take("{delta_q,delta_k,delta_v}", own["in_proj_qkv"])
    else:
        for letter in sizes:
            branch.take(f"delta_{letter}", own[f"{letter}_proj"])
    if "in_proj_ba" in own:
        branch.take("{beta,decay}", own["in_proj_ba"], **groups)
        branch.modules |= {"beta": linear("delta_heads"), "decay": linear("delta_heads")}
        beta, decay = "beta({n})", "decay({n})"
    size = "keys" if channels else "delta_heads"
    beta = beta or _projection(branch, own, "beta", ("in_proj_b", "b_proj"), "delta_heads")
    decay = decay or _projection(branch, own, "decay", ("in_proj_a", "a_proj", "f_proj"), size)
    decay = decay or _low_rank(branch, own, "decay", ("f_a_proj", "f_b_proj"), size)
    gate = gate or _projection(branch, own, "delta_gate", ("in_proj_z", "g_proj"), "values")
    gate = gate or _low_rank(branch, own, "delta_gate", ("g_a_proj", "g_b_proj"), "values")
    if not (beta and decay):
        return None
    branch.modules["delta"] = {"kind": "delta"} | ({"channels": True} if channels else {})
    if facts.get("linear_allow_neg_eigval"):
        branch.modules["delta"]["beta_scale"] = 2.0
    if lower := facts.key("kda_lower_bound"):
        branch.modules["delta"]["lower"] = f"${lower}"
    _scan(branch, own, "delta")
    branch.modules["delta_norm"] = {
        "kind": "rms",
        "size": "values",
        "groups": "delta_heads",
        "shared": True,
        "eps": "eps",
    }
    branch.take("delta_norm", norm)
    inputs = ", ".join(f"conv_{letter}(delta_{letter}({{n}}))" for letter in sizes)
    branch.lines.append(f"y = delta({inputs}, {decay}, {beta})")
    value = "delta_norm(y)"
    if gate:
        act(branch, "sigmoid" if channels else "silu")
        facts.note(f"the delta rule's gate: {'sigmoid' if channels else 'silu'}, after the norm")
        value += f" * act({gate})"
    branch.linear("delta_out", out, "hidden", inputs="values")
    branch.value = f"delta_out({value})"
    return branch


def _projection(branch: Branch, own: Parts, name: str, words: tuple[str, ...], size: str) -> str:
    found = next((own[word] for word in words if word in own), None)
    if found is None:
        return ""
    branch.linear(name, found, size)
    return f"{name}({{n}})"


def _low_rank(branch: Branch, own: Parts, name: str, words: tuple[str, str], size: str) -> str:
    """A projection as two of low rank."""
    if not set(words) <= set(own):
        return ""
    low, high = own[words[0]], own[words[1]]
    branch.linear(f"{name}_low", low, low.shape[0])
    branch.linear(name, high, size, inputs=low.shape[0])
    return f"{name}({name}_low({{n}}))"


def _short_conv(own: Parts, facts: DraftFacts) -> Branch | None:
    """A short convolution between two gates (LFM2)."""
    names = {"in_proj", "conv", "out_proj"}
    hidden = facts.known["hidden"]
    if not names <= set(own) or own["in_proj"].shape != (3 * hidden, hidden):
        return None
    branch, bias = Branch("conv"), own["in_proj"].bias
    branch.modules |= {name: linear("hidden", bias) for name in ("conv_b", "conv_c", "conv_x")}
    branch.take("{conv_b,conv_c,conv_x}", own["in_proj"])
    branch.modules["conv"] = {
        "kind": "conv",
        "kernel": facts.size(own["conv"].shape[-1], *_KERNELS),
    } | ({"bias": True} if own["conv"].bias else {})
    branch.take("conv", own["conv"])
    branch.linear("conv_out", own["out_proj"], "hidden")
    branch.value = "conv_out(conv_c({n}) * conv(conv_b({n}) * conv_x({n})))"
    return branch


_BLOCKS: tuple[Callable[[Parts, DraftFacts], Branch | None], ...] = (
    _ssm,
    _selective_scan,
    _delta,
    _short_conv,
    lru,
    linear_attention,
    wkv,
)
