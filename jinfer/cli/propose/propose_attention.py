"""Attention of a proposed spec: projections by name and shape, the rest by config keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jinfer.cli.propose.checkpoint_layers import Part
from jinfer.cli.propose.proposal import KEYS, Branch, SpecFacts, Value

_FUSED = "{q,k,v}"
_WINDOWS = (
    *("sliding_window", "attention_window_size", "window_size", "attention.sliding_window"),
    "local_attention",
)
_DIMS = (*KEYS["head_dim"], "swa_head_dim", "global_head_dim")
_SHARES = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")
_ROTARY = (
    *("rope_theta", "rope_parameters", "rotary_dim", *_SHARES, "rope_scaling", "rotary"),
    *("rotary_emb_base", "rope.freq_base", "rope.dimension_count", "rope_local_base_freq"),
)
_SCALING_KEYS = {
    *("rope_type", "type", "factor", "original_max_position_embeddings", "low_freq_factor"),
    *("high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    *("truncate", "short_factor", "long_factor", "rope_theta", "partial_rotary_factor"),
    *("llama_4_scaling_beta", "short_mscale", "long_mscale", "max_position_embeddings"),
}
_SCALINGS = ("linear", "llama3", "yarn", "longrope", "dynamic", "su", "proportional")


def attention(
    roles: Mapping[str, Part],
    facts: SpecFacts,
    area: str = "attn",
    transposed: bool = False,
    stack: str = "decoder",
) -> Branch | None:
    """Return the branch of self-attention, or with area "cross" of cross-attention.

    Args:
        roles: role -> module.
        transposed: matrices are stored [inputs, outputs].
    """
    own = {r.removeprefix(f"{area}."): p for r, p in roles.items() if r.startswith(f"{area}.")}
    if "kv_a" in own:
        return _latent_attention(own, facts)
    fused = own.get(_FUSED)
    needed = [fused] if fused else [own.get(name) for name in "qkv"]
    if "o" not in own or any(part is None or len(part.shape) != 2 for part in [*needed, own["o"]]):
        return None
    outputs, inputs = (1, 0) if transposed else (0, 1)
    hidden, width = facts.known["hidden"], own["o"].shape[inputs]
    if own["o"].shape[outputs] != hidden:
        return None
    branch = Branch("attention")
    table: dict[str, Any] = {"kind": "attention" if area == "attn" else "cross_attention"}
    rows = {name: own[name].shape[outputs] for name in (_FUSED, *"qkv") if name in own}
    heads = _heads(own, facts, width)
    head_dim = width // heads
    gated = rows.get("q") == 2 * width
    keys = rows["k"] if not fused else (rows[_FUSED] - heads * head_dim) // 2
    kv_heads = max(1, keys // head_dim)
    table |= facts.dim("heads", heads)
    if area == "attn" or kv_heads != heads:
        table |= facts.dim("kv_heads", kv_heads, "heads" if kv_heads == heads else "")
    table |= facts.dim("head_dim", head_dim, "hidden / heads" if hidden == heads * head_dim else "")
    for name in "qkvo":
        if name in own and not (name == "q" and gated):
            branch.take(f"{area}.{name}", own[name], transpose=transposed)
    if fused:
        name = f"{area}.{_FUSED}{'' if fused.leaves.keys() - {''} else '.weight'}"
        groups = _row_groups(fused, heads, kv_heads, facts)
        branch.take(name, fused, groups=groups, transpose=transposed)
    if gated:
        branch.take(f"{area}.{{q,gate}}", own["q"], groups="heads")
        table["gate"] = {"per": "element"}
        facts.note(f"{own['q'].name} has twice the rows of the heads: queries and a gate, by head")
    letters = "".join(name for name in "qkvo" if own.get(name, fused or own["o"]).bias)
    if letters:
        table["bias"] = True if letters == "qkvo" else letters
    if area == "cross":
        branch.word, branch.value = "", "cross({n}, encoded)"
        branch.modules["cross"] = table
        return branch
    _query_norms(branch, table, own, facts, head_dim)
    if sinks := own.get("sinks"):
        table["sinks"] = True
        branch.take("attn.sinks", sinks)
    _scores(table, facts)
    relative = own.get("relative", facts.shared.get(f"{stack}.relative"))
    if relative is not None:
        table["position"] = {"kind": "relative", "buckets": relative.shape[0]}
        if key := facts.key("relative_attention_max_distance"):
            table["position"]["max_distance"] = f"${key}"
        branch.take("attn.relative", relative)
        table.setdefault("scale", 1)
        facts.note("scores with relative positions: T5 does not scale them (scale = 1)")
    elif position := rotary(facts, head_dim):
        table["position"] = position
    branch.modules["attn"], branch.value = table, "attn({n})"
    return branch


def _heads(own: Mapping[str, Part], facts: SpecFacts, width: int) -> int:
    """The number of heads: that of a key which divides the width."""
    if "sinks" in own:
        return own["sinks"].vector
    fits = [n for n in _numbers(facts, KEYS["heads"]) if width % n == 0]
    dims = _numbers(facts, _DIMS)
    norm = own.get("q_norm")
    if norm and norm.vector and norm.vector < width:
        dims.insert(0, norm.vector)
    for dim in dims:
        if width % dim == 0 and (not fits or width // dim in fits):
            return width // dim
    return fits[0] if fits else 1


def _numbers(facts: SpecFacts, keys: Iterable[str]) -> list[int]:
    values = [facts.get(key) for key in keys]
    return [value for value in values if isinstance(value, int) and value > 0]


def _row_groups(part: Part, heads: int, kv_heads: int, facts: SpecFacts) -> str:
    """The order of a fused projection's rows, as far as its name tells."""
    facts.note(
        f"the order of rows in {part.name}: all queries, keys, then values, unless groups says"
        ' "heads" or "kv_heads"'
    )
    if part.last == "query_key_value" and not facts.key("multi_query_group_num"):
        return "heads" if kv_heads == heads else "kv_heads"
    return "kv_heads" if part.last == "wqkv" else ""


def _query_norms(
    branch: Branch,
    table: dict[str, Any],
    own: Mapping[str, Part],
    facts: SpecFacts,
    head_dim: int,
) -> None:
    """Norms of queries and keys."""
    if "q_norm" in own and "k_norm" in own:
        part = own["q_norm"]
        over = "head" if part.vector == head_dim else "heads" if len(part.shape) == 2 else "width"
        table["qk_norm"] = {"kind": "layer" if part.bias else "rms", "eps": "eps"}
        table["qk_norm"] |= {"bias": True} if part.bias else {}
        table["qk_norm"] |= {"over": over} if over != "head" else {}
        branch.take("attn.q_norm", part)
        branch.take("attn.k_norm", own["k_norm"])
        facts.note("norms of queries and keys come before the rotation, unless rotated = true")
    elif facts.get("use_qk_norm") is True:
        table["qk_norm"] = {"kind": "rms", "eps": "eps", "weight": False, "when": "$use_qk_norm"}
        facts.note("norms of queries and keys: by a key, without weights; which layers?")


def _scores(table: dict[str, Any], facts: SpecFacts) -> None:
    """Windows, scales, caps and temperatures of scores, by config keys."""
    if window := _window(facts):
        table["window"] = window
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
        span = "$rope_scaling.original_max_position_embeddings"
        table["temperature"] = {"beta": "$rope_scaling.llama_4_scaling_beta", "span": span}
    if all(facts.get(key) for key in ("attn_temperature_tuning", "attn_scale", "floor_scale")):
        table["temperature"] = {"beta": "$attn_scale", "span": "$floor_scale"}
        table["temperature"]["when"] = "$attn_temperature_tuning"
        facts.note("temperature: which layers have it, and from which position on")


def _window(facts: SpecFacts) -> str:
    """The window of each layer; "" for none."""
    key = facts.key(*_WINDOWS)
    if not key or facts.get("use_sliding_window") is False or not isinstance(facts.get(key), int):
        return ""
    size = f"${key}"
    if key == "local_attention":  # half of it before a token, half behind
        size = f"{size} // 2 + 1"
        facts.note(f"{key}: read as a window of half of it on each side")
    types = facts.get("layer_types")
    if isinstance(types, list) and types:
        local = {t for t in types if isinstance(t, str)} & {"sliding_attention", "local"}
        return f"({size} if $layer_types[i] == '{min(local)}' else none)" if local else ""
    facts.note(f"{key}: taken for a window of every layer")
    return f"{size} | none"


def rotary(facts: SpecFacts, head_dim: int) -> dict[str, Any]:
    """Return the table of rotary positions, or ALiBi; {} for others and none, by config keys."""
    kind = facts.get("position_embedding_type", "attn_config.position_embedding_type")
    if kind == "alibi" or facts.get("alibi", "use_alibi", "attn_config.alibi"):
        return {"kind": "alibi"}
    if facts.get("mla_use_nope") is True or kind in ("absolute", "none") or facts.positions:
        return {}
    if not facts.key(*_ROTARY):
        facts.note("positions: no key or tensor tells; rotary ones are a guess")
    table: dict[str, Any] = {"kind": "rope"}
    types, tables = facts.get("layer_types"), facts.get("rope_parameters")
    by_type = {
        name: value
        for name, value in (tables or {}).items()
        if isinstance(value, Mapping) and isinstance(types, list) and name in types
    }
    table |= _rotary_by_type(facts, by_type) if by_type else _theta_and_scaling(facts)
    if facts.gguf and facts.get("rope.dimension_count") not in (None, head_dim):
        table["dim"] = "rotary_dim"
    if facts.key("position_embedding_type"):
        table["when"] = "$position_embedding_type == 'rope'"
    share = "" if facts.gguf else facts.key(*_SHARES)
    if not facts.gguf and isinstance(facts.get("rotary_dim"), int):
        facts.dims.setdefault("rotary_dim", "$rotary_dim | head_dim")
        table["dim"] = "rotary_dim"
    elif share:
        facts.dims.setdefault("rotary_dim", f"floor(head_dim * ${share}) | head_dim")
        table["dim"] = "rotary_dim"
    if "rope_freqs" in facts.shared:
        table["factors"] = True
    if facts.get("no_rope_layers"):
        table["when"] = "$no_rope_layers[i] == 1"
    if key := facts.key("rope_interleave", "rope_interleaved", "rotary_emb_interleaved"):
        table["pairs"] = f"'adjacent' if ${key} else 'halves'"
    else:
        facts.note("which dimensions are rotated as a pair: halves or adjacent")
    return table


def _theta_and_scaling(facts: SpecFacts) -> dict[str, Any]:
    theta = facts.key("rope_theta", "rotary_emb_base", "attn_config.rope_theta", "rope.freq_base")
    facts.dims.setdefault("rope_theta", f"${theta} | 10000" if theta else 10000)
    table: dict[str, Any] = {"theta": "rope_theta"}
    types = facts.get("layer_types")
    if (local := facts.key("rope_local_base_freq")) and isinstance(types, list):
        table["theta"] = f"(${local} if $layer_types[i] == 'sliding_attention' else rope_theta)"
    scaling = facts.get("rope_scaling")
    kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, Mapping) else None
    odd = sorted(set(scaling or ()) - _SCALING_KEYS) if kind in _SCALINGS else []
    if odd:
        facts.note(f"rotary scaling has keys that jinfer does not know: {', '.join(odd)}")
    elif kind in _SCALINGS:
        table["scaling"] = "$rope_scaling | none"
    elif kind not in ("default", "none", None):
        facts.note(f"rotary scaling {kind!r} is unknown")
    return table


def _rotary_by_type(facts: SpecFacts, tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Theta and scaling of each type of layer, from the tables of config.json."""
    of = {name: f"$rope_parameters.{name}" for name in tables}
    table = {"theta": _by_type({name: f"{at}.rope_theta" for name, at in of.items()})}
    scaled = {name: at for name, at in of.items() if tables[name].get("rope_type") in _SCALINGS}
    return table | ({"scaling": _by_type(scaled, "none")} if scaled else {})


def _by_type(values: Mapping[str, str], text: str = "") -> str:
    """A value for each type of layer, and for the others `text`."""
    text = text or next(iter(values.values()))
    for name, value in values.items():
        text = f"{value} if $layer_types[i] == '{name}' else {text}"
    return f"({text})"


def _latent_attention(own: Mapping[str, Part], facts: SpecFacts) -> Branch | None:
    """Multi-head latent attention, with sizes by the shapes of the latents' norms."""
    if not {"kv_a", "kv_a_norm", "kv_b", "o"} <= own.keys() or not {"q", "q_b"} & own.keys():
        return None
    branch, out = Branch("attention"), own["o"]
    rank = own["kv_a_norm"].vector
    rope = own["kv_a"].shape[0] - rank
    queries = own["q_b"] if "q_b" in own else own["q"]
    heads = next((n for n in _numbers(facts, KEYS["heads"]) if queries.shape[0] % n == 0), 1)
    table: dict[str, Any] = {"kind": "latent_attention"} | facts.dim("heads", heads)
    facts.dim("kv_heads", heads, "heads")
    facts.set_size("latent_rank", rank, "kv_lora_rank", "attention.kv_lora_rank")
    facts.set_size("rope_dim", rope, "qk_rope_head_dim", "rope.dimension_count")
    facts.set_size("nope_dim", queries.shape[0] // heads - rope, "qk_nope_head_dim")
    facts.set_size("value_dim", out.shape[1] // heads, "v_head_dim")
    if "q_a" in own:
        rank = own["q_a"].shape[0]
        table["query_rank"] = facts.size(rank, "q_lora_rank", "attention.q_lora_rank")
    table["eps"] = "eps"
    position: Value = rotary(facts, rope) or "none"
    if isinstance(position, dict):
        position = {"pairs": "adjacent"} | position | {"dim": "rope_dim"}
    table["position"] = position
    for name in ("q", "q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "kv_b", "o"):
        if name in own:
            branch.take(f"attn.{name}", own[name])
    _indexer(branch, table, own, facts)
    branch.modules["attn"], branch.value = table, "attn({n})"
    return branch


def _indexer(
    branch: Branch, table: dict[str, Any], own: Mapping[str, Part], facts: SpecFacts
) -> None:
    """The indexer that chooses each query's keys (DeepSeek-V3.2), if it is complete."""
    names = [f"indexer.{name}" for name in ("q", "k", "k_norm", "head_weights")]
    chosen = facts.key("index_topk", "attention.indexer.top_k")
    if not set(names) <= own.keys() or not chosen:
        return
    heads, size = own["indexer.head_weights"].shape[0], own["indexer.k"].shape[0]
    table["indexer"] = {
        "top_k": f"${chosen}",
        "heads": facts.size(heads, "index_n_heads", "attention.indexer.head_count"),
        "head_dim": facts.size(size, "index_head_dim", "attention.indexer.key_length"),
    }
    if isinstance(table["position"], dict):
        table["indexer"]["position"] = table["position"] | {"pairs": "halves"}
    for name in names:
        branch.take(f"attn.{name}", own[name])
    facts.note("the indexer: rotated as attention is, but in halves")
