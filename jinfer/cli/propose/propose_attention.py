"""Attention drafts: plain and latent attention by the names and shapes of their projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinfer.cli.propose.checkpoint_layers import Part
from jinfer.cli.propose.layer_branch import Branch
from jinfer.cli.propose.propose_positions import rotary
from jinfer.cli.propose.spec_facts import KEYS, DraftFacts

_FUSED = "{q,k,v}"
_WINDOWS = (
    "sliding_window",
    "attention_window_size",
    "window_size",
    "attention.sliding_window",
    "local_attention",
)


_TYPES = ("layer_types", "attention_layers")


def attention(
    roles: Mapping[str, Part],
    facts: DraftFacts,
    area: str = "attn",
    transposed: bool = False,
    stack: str = "decoder",
) -> Branch | None:
    """Self-attention (or with area "cross" cross-attention) of the parts in these roles.

    Args:
        transposed: matrices are stored [inputs, outputs].
    """
    own = {role.removeprefix(f"{area}."): part for role, part in roles.items()}
    own = {role: part for role, part in own.items() if roles.get(f"{area}.{role}") is part}
    if "kv_a" in own:
        return _latent(own, facts)
    fused = own.get(_FUSED)
    needed = [fused] if fused else [own.get(name) for name in "qkv"]
    if "o" not in own or any(part is None or len(part.shape) != 2 for part in [*needed, own["o"]]):
        return None
    if own["o"].shape[1 if transposed else 0] != facts.known["hidden"]:
        return None
    hidden, branch = facts.known["hidden"], Branch("attention")
    out = own["o"]
    width = out.shape[0] if transposed else out.shape[1]
    table: dict[str, Any] = {"kind": "attention" if area == "attn" else "cross_attention"}
    inputs = (fused or own["q"]).shape[0 if transposed else 1]
    rows = {
        name: own[name].shape[1 if transposed else 0] for name in (_FUSED, *"qkv") if name in own
    }
    heads = _heads(own, facts, width, rows)
    head_dim = _head_dim(own, facts, heads, rows.get("q", 0), rows.get(_FUSED, 0))
    gated = "q" in rows and rows["q"] == 2 * heads * head_dim == 2 * width
    if fused:
        kv_heads = max(1, (rows[_FUSED] - heads * head_dim) // (2 * head_dim))
    else:
        kv_heads = max(1, rows["k"] // head_dim)
    table |= facts.dim("heads", heads)
    if area == "attn" or kv_heads != heads:
        table |= facts.dim("kv_heads", kv_heads, "heads" if kv_heads == heads else "")
    divides = facts.known["hidden"] == heads * head_dim
    table |= facts.dim("head_dim", head_dim, "hidden / heads" if divides else "")
    if area == "attn" and not fused and rows["v"] != kv_heads * head_dim:
        table["value_dim"] = facts.size(rows["v"] // kv_heads, "v_head_dim", "value_dim")
    if inputs != hidden:
        table["inputs"] = inputs
    for name in "qkvo":
        if name in own and not (name == "q" and gated):
            branch.take(f"{area}.{name}", own[name], transpose=transposed)
    if fused:
        branch.take(
            f"{area}.{_FUSED}{'' if fused.leaves.keys() - {''} else '.weight'}",
            fused,
            groups=_groups(fused, heads, kv_heads, facts),
            transpose=transposed,
        )
    if gated:
        branch.take(f"{area}.{{q,gate}}", own["q"], groups="heads")
        table["gate"] = {"per": "element"}
        facts.note(
            f"{own['q'].name} is twice as wide as the heads: read as queries and a gate, by head"
        )
    inner = {name: fused or own[name] for name in "qkv"} | {"o": out}
    letters = "".join(name for name, part in inner.items() if part.bias)
    if fused and (alone := own.get(f"{_FUSED}.bias")):  # as PyTorch's own module has it
        branch.take(f"{area}.{_FUSED}.bias", alone)
        letters = "qkv" + letters
    if letters:
        table["bias"] = True if letters == "qkvo" else letters
    if area == "cross":
        branch.word, branch.value = "", "cross({n}, encoded)"
        branch.modules["cross"] = table
        return branch
    _extras(branch, table, own, facts, heads, head_dim, width)
    _scores(table, facts, head_dim)
    relative = own.get("relative", facts.shared.get(f"{stack}.relative"))
    if relative is not None:
        table["position"] = {"kind": "relative", "buckets": relative.shape[0]}
        if key := facts.key("relative_attention_max_distance"):
            table["position"]["max_distance"] = f"${key}"
        branch.take("attn.relative", relative)
        if not facts.get("attention_multiplier"):
            facts.note("scores beside relative positions: T5 does not scale them (scale = 1)")
            table["scale"] = 1
    elif position := rotary(facts, head_dim):
        table["position"] = position
    branch.modules["attn"], branch.value = table, "attn({n})"
    return branch


def _heads(own: Mapping[str, Part], facts: DraftFacts, width: int, rows: Mapping[str, int]) -> int:
    """How many heads: as a key says, if the widths are multiples of it."""
    if "sinks" in own:
        return own["sinks"].vector
    told = [facts.get(key) for key in KEYS["heads"]]
    told += [facts.get("swa_num_attention_heads", "global_num_attention_heads")]
    fits = [n for n in told if isinstance(n, int) and n > 0 and width % n == 0]
    dims = [facts.get(key) for key in (*KEYS["head_dim"], "swa_head_dim", "global_head_dim")]
    norm = own.get("q_norm")
    if norm and norm.vector and norm.vector < width and width % norm.vector == 0:
        dims.insert(0, norm.vector)
    for dim in dims:
        if isinstance(dim, int) and dim and width % dim == 0 and (not fits or width // dim in fits):
            return width // dim
    if not fits:
        facts.note("heads: no key says how many there are; one is a guess")
    return fits[0] if fits else 1


def _head_dim(
    own: Mapping[str, Part], facts: DraftFacts, heads: int, queries: int, fused: int
) -> int:
    dims = [facts.get(key) for key in (*KEYS["head_dim"], "swa_head_dim", "global_head_dim")]
    told = [dim for dim in dims if isinstance(dim, int) and dim > 0]
    if queries:
        whole = own["o"].shape
        exact = [
            dim
            for dim in told
            if queries == heads * dim or (queries == 2 * heads * dim and heads * dim in whole)
        ]
        return exact[0] if exact else queries // heads
    out = own["o"].shape
    widths = [size // heads for size in out if size % heads == 0]
    return next((dim for dim in told if dim in widths), widths[-1] if widths else fused // heads)


def _groups(part: Part, heads: int, kv_heads: int, facts: DraftFacts) -> str:
    """How the rows of a fused projection are ordered, as far as the name tells."""
    facts.note(
        f"the order of rows in {part.name}: all queries, keys, then values, unless groups says"
        ' "heads" or "kv_heads"'
    )
    if part.last == "query_key_value":
        return (
            "heads"
            if kv_heads == heads
            else ""
            if facts.key("multi_query_group_num")
            else "kv_heads"
        )
    return "kv_heads" if part.last == "wqkv" else ""


def _extras(
    branch: Branch,
    table: dict[str, Any],
    own: Mapping[str, Part],
    facts: DraftFacts,
    heads: int,
    head_dim: int,
    width: int,
) -> None:
    """Norms of queries and keys, gates, norms of the output, sinks."""
    if "q_norm" in own and "k_norm" in own:
        part = own["q_norm"]
        over = "head" if part.vector == head_dim else "heads" if len(part.shape) == 2 else "width"
        table["qk_norm"] = {"kind": "layer" if part.bias else "rms", "eps": "eps"}
        table["qk_norm"] |= {"bias": True} if part.bias else {}
        table["qk_norm"] |= {"over": over} if over != "head" else {}
        branch.take("attn.q_norm", part)
        branch.take("attn.k_norm", own["k_norm"])
        facts.note("norms of queries and keys stand before the rotation, unless rotated = true")
    elif facts.get("use_qk_norm") is True:
        table["qk_norm"] = {"kind": "rms", "eps": "eps", "weight": False, "when": "$use_qk_norm"}
        facts.note("norms of queries and keys: a key says them, without weights; which layers?")
    if (gate := own.get("gate")) and gate.shape[0] in (width, heads):
        table["gate"] = {"per": "element" if gate.shape[0] == width else "head"}
        table["gate"] |= {"bias": True} if gate.bias else {}
        branch.take("attn.gate", gate)
        facts.note(f"{gate.name}: read as a gate under a sigmoid, before o")
    if norm := own.get("out_norm"):
        over = "head" if norm.vector == head_dim != width else "width"
        table["out_norm"] = {"kind": "layer" if norm.bias else "rms", "over": over, "eps": "eps"}
        branch.take("attn.out_norm", norm)
    if all(f"differential.lambda_{n}" in own for n in ("q1", "k1", "q2", "k2")):
        table["differential"] = {"init": "0.8 - 0.6 * 2.718281828 ** (-0.3 * i)"}
        for n in ("q1", "k1", "q2", "k2"):
            branch.take(f"attn.differential.lambda_{n}", own[f"differential.lambda_{n}"])
    if sinks := own.get("sinks"):
        table["sinks"] = True
        branch.take("attn.sinks", sinks)


def _scores(table: dict[str, Any], facts: DraftFacts, head_dim: int) -> None:
    """Windows, chunks and scales, by the keys that say them."""
    if window := windows(facts):
        table["window"] = window
    types = facts.get("layer_types")
    if isinstance(types, list) and "chunked_attention" in types:
        table["chunk"] = (
            f"($attention_chunk_size if ${facts.key('layer_types')}[i] == 'chunked_attention' "
            "else none)"
        )
    if facts.key("key_multiplier"):
        table["scale"] = "$key_multiplier / sqrt(head_dim)"
    elif key := facts.key("attention_multiplier", "attn_config.softmax_scale", "attention.scale"):
        table["scale"] = f"${key}"
    elif key := facts.key("query_pre_attn_scalar"):
        table["scale"] = f"1 / sqrt(${key})"
    elif facts.get("scale_attn_weights") is False:
        table["scale"] = "1 if not $scale_attn_weights else none"
    if key := facts.key("attn_logit_softcapping"):
        table["softcap"] = f"${key}"
    if key := facts.key("clip_qkv", "attn_config.clip_qkv", "attention.clamp_kqv"):
        table["clip"] = f"${key} | none"
    if facts.get("rope_parameters.llama_4_scaling_beta", "rope_scaling.llama_4_scaling_beta"):
        table["temperature"] = {
            "beta": "$rope_scaling.llama_4_scaling_beta",
            "span": "$rope_scaling.original_max_position_embeddings",
        }
    tuned = "attn_temperature_tuning", "attn_scale", "floor_scale"
    if all(facts.get(key) for key in tuned):
        table["temperature"] = {"beta": "$attn_scale", "span": "$floor_scale"}
        table["temperature"]["when"] = "$attn_temperature_tuning"
        facts.note("temperature: which layers have it, and from which position on")


def windows(facts: DraftFacts) -> str:
    """The window of each layer; "" for none."""
    key = facts.key(*_WINDOWS)
    if not key or facts.get("use_sliding_window") is False or not isinstance(facts.get(key), int):
        return ""
    reach = f"${key}"
    if key == "local_attention":  # half of it before a token, half behind
        reach = f"{reach} // 2 + 1"
        facts.note(f"{key}: read as a window of half of it on each side")
    types = facts.get(*_TYPES)
    if isinstance(types, list) and types:
        local = sorted(
            {t for t in types if isinstance(t, str)} & {"sliding_attention", "local", "sliding"}
        )
        if not local:
            return ""
        return f"({reach} if ${facts.key(*_TYPES)}[i] == '{local[0]}' else none)"
    every = facts.key("sliding_window_pattern", "_sliding_window_pattern")
    if every and isinstance(facts.get(every), int):
        return f"(none if (i + 1) % ${every} == 0 else {reach})"
    if every := facts.key("global_attn_every_n_layers"):
        return f"(none if i % ${every} == 0 else {reach})"
    facts.note(f"{key}: taken for a window of every layer")
    return f"{reach} | none"


def _indexer(
    branch: Branch, table: dict[str, Any], own: Mapping[str, Part], facts: DraftFacts
) -> None:
    """The indexer that chooses each query's keys (DeepSeek-V3.2), if there is a whole one."""
    parts = {name: own.get(f"indexer.{name}") for name in ("q", "k", "k_norm", "head_weights")}
    found = {name: part for name, part in parts.items() if part is not None}
    chosen = facts.key("index_topk", "attention.indexer.top_k")
    if len(found) < len(parts) or not chosen:
        return
    heads, size = found["head_weights"].shape[0], found["k"].shape[0]
    table["indexer"] = {
        "top_k": f"${chosen}",
        "heads": facts.size(heads, "index_n_heads", "attention.indexer.head_count"),
        "head_dim": facts.size(size, "index_head_dim", "attention.indexer.key_length"),
    }
    if isinstance(table["position"], dict):
        table["indexer"]["position"] = table["position"] | {"pairs": "halves"}
    for name, part in found.items():
        branch.take(f"attn.indexer.{name}", part)
    facts.note("the indexer: rotated as attention is, but in halves")


def _latent(own: Mapping[str, Part], facts: DraftFacts) -> Branch | None:
    """Multi-head latent attention, its sizes from the shapes of the latents' norms."""
    if not {"kv_a", "kv_a_norm", "kv_b", "o"} <= set(own) or not {"q", "q_b"} & set(own):
        return None
    branch = Branch("attention")
    rank = own["kv_a_norm"].vector
    rope = own["kv_a"].shape[0] - rank
    told = facts.get(*KEYS["heads"])
    queries, out = own.get("q_b", own.get("q")), own["o"]
    assert queries is not None
    heads = told if isinstance(told, int) and queries.shape[0] % told == 0 else 1
    table: dict[str, Any] = {"kind": "latent_attention"} | facts.dim("heads", heads)
    facts.dim("kv_heads", heads, "heads")
    sizes: dict[str, tuple[int, tuple[str, ...]]] = {
        "latent_rank": (rank, ("kv_lora_rank", "attention.kv_lora_rank")),
        "rope_dim": (rope, ("qk_rope_head_dim", "rope.dimension_count")),
        "nope_dim": (queries.shape[0] // heads - rope, ("qk_nope_head_dim",)),
        "value_dim": (out.shape[1] // heads, ("v_head_dim",)),
    }
    for name, (value, keys) in sizes.items():
        if facts.known.setdefault(name, value) == value:
            facts.dims.setdefault(name, facts.size(value, *keys))
        else:
            table[name] = facts.size(value, *keys)
    if "q_a" in own:
        table["query_rank"] = facts.size(
            own["q_a"].shape[0], "q_lora_rank", "attention.q_lora_rank"
        )
    if own["kv_a"].bias or out.bias:
        table["bias"] = True
    table["eps"] = "eps"
    position = rotary(facts, rope)
    if position:
        position |= {"dim": "rope_dim"}
        position.setdefault("pairs", "adjacent")
    table["position"] = position or "none"
    for name in ("q", "q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "kv_b", "o"):
        if name in own:
            branch.take(f"attn.{name}", own[name])
    _indexer(branch, table, own, facts)
    _scores(table, facts, rope)
    for key in ("softcap", "window", "temperature", "clip", "chunk"):
        if table.pop(key, None) is not None:
            facts.note(f"{key}: a key says it, but latent attention has none here")
    branch.modules["attn"], branch.value = table, "attn({n})"
    return branch
