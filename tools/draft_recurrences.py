"""Recurrence drafts: RG-LRU, linear attention and RWKV, each known by its own tensors."""

from __future__ import annotations

from collections.abc import Mapping

from .checkpoint_layers import Part
from .draft_branch import Branch, act, linear, set_sizes
from .draft_facts import KEYS, DraftFacts, Value

type Parts = Mapping[str, Part]


def heads_of(facts: DraftFacts, value: int) -> Value:
    """A number of heads, by its key."""
    return facts.size(value, *KEYS["heads"])


def lru(own: Parts, facts: DraftFacts) -> Branch | None:
    """RG-LRU behind a convolution and under a gate (Griffin)."""
    names = {"linear_x", "linear_y", "linear_out", "conv_1d", "rg_lru.recurrent_param"}
    if not names <= set(own):
        return None
    branch, width = Branch("recurrent"), own["linear_x"].shape[0]
    set_sizes(facts, {"lru_width": (width, ("lru_width",))})
    blocks = own["rg_lru.input_gate_weight"].shape[0]
    branch.linear("lru_x", own["linear_x"], "lru_width")
    branch.linear("lru_y", own["linear_y"], "lru_width")
    branch.modules["conv"] = {
        "kind": "conv",
        "size": "lru_width",
        "kernel": own["conv_1d"].shape[-1],
        "bias": own["conv_1d"].bias,
    }
    branch.take("conv", own["conv_1d"])
    for name, word in (("input_gate", "input_gate"), ("recurrence_gate", "recurrent_gate")):
        branch.modules[name] = {
            "kind": "block_linear",
            "blocks": heads_of(facts, blocks),
            "inputs": "lru_width",
            "outputs": "lru_width",
            "bias": f"rg_lru.{word}_bias" in own,
        }
        branch.take(f"{name}.weight", own[f"rg_lru.{word}_weight"], transpose=True)
        if f"rg_lru.{word}_bias" in own:
            branch.take(f"{name}.bias", own[f"rg_lru.{word}_bias"])
    act(branch, "sigmoid", "sigmoid")
    act(branch, "gelu_tanh")
    branch.modules["lru"] = {"kind": "rglru"}
    branch.take("lru.decay", own["rg_lru.recurrent_param"])
    branch.lines += [
        "h = conv(lru_x({n}))",
        "y = lru(h, sigmoid(input_gate(h)), sigmoid(recurrence_gate(h)))",
    ]
    branch.linear("lru_out", own["linear_out"], "hidden", inputs="lru_width")
    branch.value = "lru_out(y * act(lru_y({n})))"
    facts.note("the gate beside the recurrence: gelu_tanh")
    return branch


def linear_attention(own: Parts, facts: DraftFacts) -> Branch | None:
    """Linear attention with a fixed decay (lightning), under a gate after its norm."""
    if not {"qkv_proj", "output_gate", "norm", "out_proj"} <= set(own):
        return None
    branch, width = Branch("linear"), own["out_proj"].shape[1]
    told = facts.get(*KEYS["heads"])
    heads = told if isinstance(told, int) and width % told == 0 else 1
    size: Value = width
    for name in "qkv":
        branch.modules[f"lin_{name}"] = linear(size)
    branch.take("{lin_q,lin_k,lin_v}", own["qkv_proj"], groups="heads")
    act(branch)
    act(branch, "sigmoid", "sigmoid")
    branch.modules["lin"] = {
        "kind": "linear_attention",
        "heads": heads_of(facts, heads),
        "head_dim": width // heads,
        "slope": "1 - i / (layers - 1 + 1e-5) + 1e-5",
    }
    branch.modules["lin_norm"] = {"kind": "rms", "size": size, "eps": 1e-6}
    branch.take("lin_norm", own["norm"])
    branch.linear("lin_gate", own["output_gate"], size)
    branch.linear("lin_out", own["out_proj"], "hidden", inputs=size)
    branch.lines.append("y = lin_norm(lin(act(lin_q({n})), act(lin_k({n})), act(lin_v({n}))))")
    branch.value = "lin_out(sigmoid(lin_gate({n})) * y)"
    facts.note(
        "linear attention: silu of queries, keys and values, slopes that fall from layer to layer"
    )
    return branch


def wkv(own: Parts, facts: DraftFacts) -> Branch | None:
    """Time mixing of RWKV-4."""
    words = {f"time_mix_{word}" for word in ("key", "value", "receptance")}
    names = words | {"time_decay", "time_first", "key", "value", "receptance", "output"}
    if not names <= set(own):
        return None
    branch = Branch("rwkv")
    mixed = own["key"].shape[0]
    branch.modules["time_shift"] = {"kind": "shift"}
    for letter, word in (("k", "key"), ("v", "value"), ("r", "receptance")):
        branch.modules[f"mix_{letter}"] = {"kind": "scale"}
        branch.take(f"mix_{letter}.weight", own[f"time_mix_{word}"])
        branch.linear(letter, own[word], mixed)
    branch.modules["wkv"] = {"kind": "wkv", "width": mixed}
    branch.take("wkv.decay", own["time_decay"])
    branch.take("wkv.bonus", own["time_first"])
    act(branch, "sigmoid", "sigmoid")
    branch.linear("time_out", own["output"], "hidden", inputs=mixed)
    branch.lines += ["s = time_shift({n})", "d = {n} - s"]
    branch.value = "time_out(sigmoid(r(s + mix_r(d))) * wkv(k(s + mix_k(d)), v(s + mix_v(d))))"
    return branch


def channel_mixing(parts: Parts, facts: DraftFacts) -> Branch | None:
    """Channel mixing of RWKV-4, which stands where other models have a feed-forward."""
    own = {n.rpartition(".")[2]: p for n, p in parts.items() if n.startswith("feed_forward.")}
    if not {"time_mix_key", "time_mix_receptance", "key", "receptance", "value"} <= set(own):
        return None
    branch, width = Branch("dense"), own["key"].shape[0]
    branch.modules["channel_shift"] = {"kind": "shift"}
    for name, word in (("up", "key"), ("gate", "receptance")):
        branch.modules[f"mix_{name}"] = {"kind": "scale"}
        branch.take(f"mix_{name}.weight", own[f"time_mix_{word}"])
    branch.linear("channel_gate", own["receptance"], "hidden")
    branch.linear("channel_up", own["key"], width)
    branch.linear("channel_down", own["value"], "hidden", inputs=width)
    act(branch, "sigmoid", "sigmoid")
    act(branch, "relu2", "relu2")
    branch.lines += ["s = channel_shift({n})", "d = {n} - s"]
    branch.value = (
        "sigmoid(channel_gate(s + mix_gate(d))) * channel_down(relu2(channel_up(s + mix_up(d))))"
    )
    return branch
