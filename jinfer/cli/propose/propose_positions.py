"""Position drafts: rotary embeddings and ALiBi, by the keys of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinfer.cli.propose.spec_facts import DraftFacts

_SHARES = ("partial_rotary_factor", "rotary_pct", "rope_pct", "rope_percent", "rotary_emb_fraction")
_SCALED = ("default", "none", None)
_SCALING_KEYS = frozenset(
    {"rope_type", "type", "factor", "original_max_position_embeddings", "low_freq_factor"}
    | {"high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
    | {
        "truncate",
        "short_factor",
        "long_factor",
        "rope_theta",
        "partial_rotary_factor",
        "finetuned",
    }
    | {
        "max_position_embeddings",
        "llama_4_scaling_beta",
        "mrope_section",
        "short_mscale",
        "long_mscale",
    }
)
_SCALINGS = ("linear", "llama3", "yarn", "longrope", "dynamic", "su", "proportional")


def rotary(facts: DraftFacts, head_dim: int) -> dict[str, Any]:
    """The rotary positions of an attention; {} where config.json says that there are others."""
    kind = facts.get("position_embedding_type", "attn_config.position_embedding_type")
    if kind in ("alibi",) or facts.get("alibi", "use_alibi", "attn_config.alibi"):
        return {"kind": "alibi"}
    if facts.get("mla_use_nope") is True:
        return {}
    if kind in ("absolute", "none") or facts.get("rotary") is False or facts.positions:
        return {}
    if not facts.key(
        "rope_theta",
        "rope_parameters",
        "rotary_dim",
        *_SHARES,
        "rope_scaling",
        "rotary",
        "rotary_emb_base",
        "rope.freq_base",
        "rope.dimension_count",
        "rope_local_base_freq",
    ):
        facts.note("positions: no key or tensor says which; rotary ones are a guess")
    table: dict[str, Any] = {"kind": "rope"}
    types, tables = facts.get("layer_types"), facts.get("rope_parameters")
    nested = (
        isinstance(tables, dict)
        and tables
        and all(isinstance(v, (dict, type(None))) or hasattr(v, "keys") for v in tables.values())
    )
    if nested and isinstance(types, list):
        table |= _by_type(
            facts, {str(t): dict(tables[t]) for t in tables if t in types and tables[t]}
        )
    else:
        theta = facts.key(
            "rope_theta",
            "rotary_emb_base",
            "rope_ratio_theta",
            "attn_config.rope_theta",
            "rope.freq_base",
        )
        facts.dims.setdefault("rope_theta", f"${theta} | 10000" if theta else 10000)
        table["theta"] = "rope_theta"
        if local := facts.key("rope_local_base_freq"):
            if isinstance(types, list) and "sliding_attention" in types:
                of_type = f"${facts.key('layer_types')}[i] == 'sliding_attention'"
                table["theta"] = f"(${local} if {of_type} else rope_theta)"
            else:
                facts.note(f"{local}: theta of which layers?")
        scaling = facts.get("rope_scaling")
        kind = scaling.get("rope_type", scaling.get("type")) if hasattr(scaling, "get") else None
        odd = sorted(set(scaling or ()) - _SCALING_KEYS) if kind in _SCALINGS else []
        if odd:
            facts.note(f"rotary scaling has keys that jinfer does not know: {', '.join(odd)}")
        elif kind in _SCALINGS:
            table["scaling"] = "$rope_scaling | none"
        elif kind not in _SCALED:
            facts.note(f"rotary scaling {kind!r} is none of jinfer's")
    if facts.gguf and facts.get("rope.dimension_count") not in (None, head_dim):
        table["dim"] = "rotary_dim"
    if facts.key("position_embedding_type"):
        table["when"] = "$position_embedding_type == 'rope'"
    if share := rotary_dim(facts, head_dim):
        facts.dims.setdefault("rotary_dim", share)
        table["dim"] = "rotary_dim"
    if "rope_freqs" in facts.shared:
        table["factors"] = True
    if isinstance(facts.get("layer_rope_theta"), list):
        table["theta"] = "$layer_rope_theta[i]"
        if not all(facts.get("layer_rope_theta")):  # 0: without positions
            table["theta"] = "$layer_rope_theta[i] or rope_theta"
            table["when"] = "$layer_rope_theta[i] > 0"
    if isinstance(facts.get("no_rope_layers"), list) and facts.get("no_rope_layers"):
        table["when"] = "$no_rope_layers[i] == 1"
    if key := facts.key(
        "rope_interleave", "rope_interleaved", "rotary_emb_interleaved", "rotary_interleaved"
    ):
        table["pairs"] = f"'adjacent' if ${key} else 'halves'"
    else:
        facts.note("which dimensions are rotated as a pair: halves or adjacent")
    return table


def _by_type(facts: DraftFacts, tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Theta and scaling of each type of layer, from config.json's tables."""
    at, types = facts.key("rope_parameters"), facts.key("layer_types")
    table: dict[str, Any] = {}
    # Where a rule of scaling takes a share, it is of the pairs that turn.
    shares = [t for t, v in tables.items() if "partial_rotary_factor" in v]
    shares = [t for t in shares if tables[t].get("rope_type") != "proportional"]
    if shares:
        text = "head_dim"
        for t in tables:
            if t in shares:
                share = f"floor(head_dim * ${at}.{t}.partial_rotary_factor)"
                text = f"{share} if ${types}[i] == '{t}' else {text}"
        table["dim"] = f"({text})"
    for key, name, default in (("rope_theta", "theta", "10000"), ("rope_type", "scaling", "none")):
        values = {t: v.get(key, default) for t, v in tables.items()}
        places = {
            t: f"${at}.{t}.rope_theta" if name == "theta" else f"${at}.{t}"
            for t, v in values.items()
            if name != "scaling" or v in _SCALINGS
        }
        if not places:
            continue
        text = "none" if name == "scaling" else next(iter(places.values()))
        if len(set(values.values())) == 1:
            table[name] = next(iter(places.values()))
            continue
        for t, place in places.items():
            text = f"{place} if ${types}[i] == '{t}' else {text}"
        table[name] = f"({text})"
    return table


def rotary_dim(facts: DraftFacts, head_dim: int) -> str:
    """Rotated dimensions of a head as a value; "" for all of them."""
    if facts.gguf:
        return ""
    told = facts.get("rotary_dim")
    if isinstance(told, int) and told <= head_dim:
        return "$rotary_dim | head_dim"
    share = facts.key(*_SHARES)
    if share and isinstance(facts.get(share), (int, float)):
        return f"floor(head_dim * ${share}) | head_dim"
    return ""
