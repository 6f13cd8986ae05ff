"""Unused config keys: keys of config.json and GGUF metadata that nothing read but change answers.

`KNOWN` has their effect, and the rule by which a model complies with them without reading them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Set
from typing import Any

from jinfer.loader.config import config_key_rules as rules
from jinfer.loader.config.config_json import QUANTIZATION_KEYS
from jinfer.loader.config.config_key_rules import Rule
from jinfer.modelspec.blocks import RMSNormSpec
from jinfer.modelspec.feed_forward_blocks import MoESpec
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.position_blocks import AlibiSpec, DisentangledSpec, RopeSpec
from jinfer.modelspec.spec_errors import SpecError, show_value

WINDOW = ("attention reaches only so far back", rules.same_window)
EPS = ("the small number that norms add", rules.has_value("eps"))
THETA = (
    "how fast rotary positions turn",
    rules.any_rope(lambda value, rope: rules.is_close(value, rope.theta)),
)
SCALING = ("rotary positions are stretched", rules.same_scaling)
SHARE = ("only a part of each head is rotated", rules.same_share)
DIM = (
    "only a part of each head is rotated",
    rules.any_rope(lambda value, rope: value == rope.dim),
)
PAIRS = (
    "which dimensions are rotated together",
    rules.any_rope(lambda value, rope: bool(value) == (rope.pairs == "adjacent")),
)
ACTIVATION = ("the activation function", rules.same_activation)
SOFTCAP = ("it bounds scores or logits", rules.is_softcap)
FACTOR = ("numbers are multiplied by it", rules.is_factor)
SCALE = ("scores are multiplied by it", rules.same_scale)
QK_NORM = ("queries and keys are normed", rules.has_attention("qk_norm"))
TEMPERATURE = ("queries are scaled by their positions", rules.has_attention("temperature"))
ALIBI = ("attention has linear biases", rules.equals(rules.has_positions(AlibiSpec)))
CLIP = ("queries, keys and values are clipped", rules.unset_or_value("clip"))
POSITIONS = ("another kind of positions", rules.same_positions)
XPOS = ("positions are scaled", rules.no_effect(1))
LAYERS = ("layers differ from each other", rules.same_layers)
SIDE = ("attention and feed-forward stand side by side", rules.if_true(rules.is_parallel))
CAUSAL = ("tokens see only those before them", rules.causal)
BEFORE = ("norms stand before or after the branches", rules.norm_before)
_DENSE = "some layers have no experts"
_CHOICE = "how experts are chosen and weighed"
RENORM = (_CHOICE, rules.has_value("renormalize", of=MoESpec))
GROUPS = (_CHOICE, rules.has_value("groups", of=MoESpec))
CHOSEN = (_CHOICE, rules.has_value("top_k_groups", of=MoESpec))
WEIGHT = (_CHOICE, rules.has_value("scale", of=MoESpec))
SHARED = ("layers use what others computed", rules.no_effect())
CHOSEN_KEYS = ("each query attends to keys that an indexer chooses", rules.same_indexer_top_k)
CLAMP = ("the gated unit is clamped", rules.has_value("limit", "alpha"))


def _all(known: tuple[str, Rule], *keys: str) -> dict[str, tuple[str, Rule]]:
    return dict.fromkeys(keys, known)


# Keys of the tables `rope_scaling` and `rope_parameters`, and of the tables in them.
ROTARY: dict[str, tuple[str, Rule]] = {
    "rope_theta": THETA,
    "partial_rotary_factor": SHARE,
    "llama_4_scaling_beta": TEMPERATURE,
    **_all(SCALING, "rope_type", "type"),
    "factor": ("rotary positions are stretched", rules.same_stretch("factor")),
    "short_mscale": ("rotary positions are scaled", rules.same_stretch("attention_factor")),
    "long_mscale": ("rotary positions are scaled", rules.same_stretch("attention_factor")),
}

KNOWN: dict[str, tuple[str, Rule]] = {
    **_all(WINDOW, "sliding_window", "attention.sliding_window", "window_size", "local_attention"),
    **_all(EPS, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"),
    **_all(EPS, "layernorm_epsilon", "norm_epsilon"),
    **_all(EPS, "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"),
    **_all(THETA, "rope_theta", "rotary_emb_base", "rope.freq_base", "rope_local_base_freq"),
    **_all(THETA, "rope.freq_base_swa"),
    **_all(THETA, "global_rope_theta", "local_rope_theta"),
    **_all(SCALING, "rope_scaling", "rope_parameters", "rope.scaling.type"),
    **_all(SHARE, "partial_rotary_factor", "rotary_pct", "rope_pct", "rope_percent"),
    **_all(SHARE, "rotary_emb_fraction"),
    **_all(DIM, "rotary_dim", "rope.dimension_count"),
    **_all(PAIRS, "rope_interleave", "rope_interleaved", "rotary_emb_interleaved"),
    **_all(ACTIVATION, "hidden_act", "hidden_activation", "activation_function"),
    **_all(SOFTCAP, "attn_logit_softcapping", "final_logit_softcapping"),
    **_all(FACTOR, "logit_scale", "logits_scaling", "lm_head_multiplier", "residual_scale"),
    **_all(FACTOR, "embedding_multiplier", "residual_multiplier", "key_multiplier"),
    **_all(FACTOR, "scale_emb", "scale_depth", "embedding_scale"),
    "dim_model_base": (
        "logits are divided by hidden / it",
        lambda value, spec: bool(value == spec.dims.get("hidden")),
    ),
    "scale_embedding": ("embeddings are scaled", rules.no_effect()),
    **_all(SCALE, "attention_multiplier", "attention.scale", "attn_config.softmax_scale"),
    "query_pre_attn_scalar": ("scores are divided by its root", rules.usual_query_scale),
    "scale_attn_weights": ("scores are scaled", rules.scaled_scores),
    "scale_attn_by_inverse_layer_idx": (
        "scores are divided by the layer's number",
        rules.no_effect(),
    ),
    **_all(QK_NORM, "use_qk_norm", "qk_layernorm", "use_qk_layernorm", "qk_norm"),
    **_all(QK_NORM, "attn_config.qk_ln"),
    **_all(ALIBI, "alibi", "use_alibi", "attention.max_alibi_bias", "attn_config.alibi"),
    **_all(CLIP, "clip_qkv", "attention.clamp_kqv", "attn_config.clip_qkv"),
    **_all(LAYERS, "layer_types", "attention_layers", "attention_types"),
    **_all(LAYERS, "attention.sliding_window_pattern"),
    **_all(
        ("layers differ from each other", rules.same_rotated_layers),
        *("no_rope_layers", "attention.rope_pattern"),
    ),
    **_all(SIDE, "parallel_attn", "use_parallel_residual", "parallel_block"),
    "apply_residual_connection_post_layernorm": (
        "residuals start after the norm",
        rules.no_effect(),
    ),
    **_all(BEFORE, "normalize_before", "do_layer_norm_before", "prenorm"),
    "position_embedding_type": POSITIONS,
    "attn_config.rope": ("positions are rotated", rules.if_true(rules.has_positions(RopeSpec))),
    **_all(XPOS, "rotary_emb_scale_base", "rotary_scaling_factor"),
    **_all(CAUSAL, "is_decoder", "causal"),
    **_all(
        ("tokens see those after them", lambda value, spec: rules.not_causal(not value, spec)),
        "attention.causal",
        "is_causal",
    ),
    "rotary_value": ("values are rotated as well", rules.no_effect()),
    "use_bidirectional_attention": (
        "tokens see those after them",
        lambda value, spec: (
            value == "vision" or rules.not_causal(value, spec)
        ),  # affects images alone
    ),
    "attn_config.prefix_lm": ("tokens see those after them", rules.no_effect()),
    "relative_attention": (
        "attention has vectors of distances",
        rules.equals(rules.has_positions(DisentangledSpec)),
    ),
    "pos_att_type": ("which vectors of distances there are", rules.has_both_distances),
    "norm_rel_ebd": ("vectors of distances are normed", rules.no_effect("layer_norm")),
    **_all(RENORM, "norm_topk_prob", "expert_weights_norm"),
    **_all(WEIGHT, "routed_scaling_factor", "expert_weights_scale"),
    **_all(GROUPS, "n_group", "expert_group_count"),
    **_all(CHOSEN, "topk_group", "expert_group_used_count"),
    "moe_router_use_sigmoid": (_CHOICE, rules.sigmoid_scoring),
    **_all((_CHOICE, rules.same_scoring), "scoring_func", "expert_gating_func"),
    "topk_method": (_CHOICE, rules.same_choice),
    **_all((_DENSE, rules.same_dense_prefix), "first_k_dense_replace"),
    **_all((_DENSE, rules.same_dense_prefix), "leading_dense_block_count"),
    **_all((_DENSE, rules.same_moe_period), "moe_layer_freq", "decoder_sparse_step"),
    **_all((_DENSE, rules.same_moe_period), "moe_every_n_layers", "mlp_layer_types"),
    "mlp_only_layers": (_DENSE, rules.same_dense_layers),
    **_all(CLAMP, "swiglu_limit", "swiglu_alpha"),
    **_all(("another kind of norm", rules.same_norm), "norm_type", "use_rms_norm"),
    "attention_chunk_size": (
        "attention sees only its own piece of the text",
        rules.unset_or_value("chunk"),
    ),
    **_all(TEMPERATURE, "attn_temperature_tuning", "attention.temperature_scale"),
    "ssm.dt_b_c_rms": (
        "inputs of the state space are normed",
        rules.if_true(lambda spec: False in rules.values_of(spec, "weight", of=RMSNormSpec)),
    ),
    "use_long_context": ("positions are stretched", rules.no_effect()),
    "layer_rope_theta": ("each layer has a theta", rules.no_effect()),
    "attention_value_scale": FACTOR,
    "time_step_limit": ("time steps of a state space are bounded", rules.unbounded_steps),
    "moe_norm_min": (_CHOICE, lambda value, spec: value <= 1e-9),
    "moe_latent_size": ("experts have a width of their own", rules.no_effect()),
    "slow_but_exact": ("outputs have no bias", rules.no_effect()),
    "use_attention_gate": ("attention has gates", rules.equals(rules.is_gated)),
    **_all(SHARED, "num_kv_shared_layers", "hidden_size_per_layer_input"),
    **_all(CHOSEN_KEYS, "index_topk", "attention.indexer.top_k"),
    "indexer_rope_interleave": PAIRS,
    **_all(
        ("layers use the keys chosen in others", rules.same_shared_indexers),
        *("indexer_types", "index_topk_pattern", "index_topk_freq"),
    ),
    **_all(("layers use the weights of others", rules.no_effect(1)), "num_hidden_groups"),
    "inner_group_num": ("a layer has several attentions", rules.no_effect(1)),
    "share_encoder_decoder_embeddings": (
        "the stacks have embeddings of their own",
        lambda value, spec: bool(value),
    ),
}


_log = logging.getLogger("jinfer")

# Read elsewhere, not by specifications.
_ELSEWHERE = frozenset(
    {"architectures", "text_config", "eos_token_id", *QUANTIZATION_KEYS}
    | {"decoder_start_token_id", "forced_bos_token_id", "general", "tokenizer", "split"}
)

_ROTARY_TABLES = ("rope_scaling", "rope_parameters")


def unread(config: Mapping[str, Any], looked_up: Set[str]) -> dict[str, Any]:
    """Return the keys with a value that nothing looked up.

    If some keys of a table were looked up, its other keys are returned with dots.

    Args:
        config: config.json, or GGUF's metadata.
        looked_up: the keys that were looked up, with dots for keys of tables.
    """
    return dict(_unread(config, looked_up, ""))


def _unread(
    table: Mapping[str, Any], looked_up: Set[str], prefix: str
) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        key = f"{prefix}{name}"
        if value is None or key in looked_up or key.partition(".")[0] in _ELSEWHERE:
            continue
        if isinstance(value, Mapping) and any(other.startswith(f"{key}.") for other in looked_up):
            yield from _unread(value, looked_up, f"{key}.")
        else:
            yield key, value


def consequences(
    keys: Mapping[str, Any], config: Mapping[str, Any], spec: ModelSpec
) -> dict[str, tuple[Any, str]]:
    """Map keys of `unread` that would change the computation to their value and their effect.

    Keys are left out if the model complies with their value.
    """
    architecture = f"{config.get('general.architecture', '')}."
    found: dict[str, tuple[Any, str]] = {}
    for key, value in _leaves(keys):
        known = _known(key.removeprefix(architecture), config)
        if known is not None and not _holds(known[1], value, spec):
            found[key] = value, known[0]
    return found


def _holds(rule: Rule, value: Any, spec: ModelSpec) -> bool:
    try:
        return rule(value, spec)
    except (TypeError, ValueError, ArithmeticError, LookupError):  # no value for such a key
        return False


def _leaves(keys: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys with their values; keys of tables with dots."""
    for name, value in keys.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value


def _known(key: str, config: Mapping[str, Any]) -> tuple[str, Rule] | None:
    """Return the effect and the rule of a key; None if it is unknown or not used."""
    first, _, inner = key.partition(".")
    types = config.get("layer_types")
    if first in _ROTARY_TABLES and inner:
        kind, _, last = inner.rpartition(".")
        is_used = not kind or not isinstance(types, list) or kind in types
        return ROTARY.get(last) if is_used else None
    known = KNOWN.get(key)
    if known is WINDOW:
        has_windows = not isinstance(types, list) or not types or "sliding_attention" in types
        return known if has_windows and config.get("use_sliding_window") is not False else None
    return known


def check_unused(keys: Mapping[str, Any], config: Mapping[str, Any], spec: ModelSpec) -> None:
    """Refuse a checkpoint with keys that change the computation and that the model does not follow.

    Raises:
        SpecError: it names the keys; with `trust_config = "warn"` a warning does.
    """
    known = consequences(keys, config, spec)
    for key, (value, how) in known.items():
        reason = f"{show_value(value)} is not followed: {how}"
        if spec.trust_config == "warn":
            _log.warning("%s: %s = %s", spec.path, key, reason)
            continue
        others = f"; nor are {', '.join(list(known)[1:9])}" if len(known) > 1 else ""
        ways = 'write a specification that does, or set trust_config = "warn" to go on without'
        raise SpecError(spec.path, key, f"{reason}{others}; {ways}")
