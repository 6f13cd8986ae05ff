"""Keys of config.json and of GGUF's metadata that change the computation: how, and by which rule
a model that was built without reading one does as it says all the same."""

from __future__ import annotations

from jinfer.modelspec.blocks import MoESpec
from jinfer.opening import config_key_rules, moe_key_rules
from jinfer.opening.config_key_rules import Rule

WINDOW = ("attention reaches only so far back", config_key_rules.same_window)
EPS = ("the small number that norms add", config_key_rules.is_built("eps"))
THETA = ("how fast rotary positions turn", config_key_rules.turns)
SCALING = ("rotary positions are stretched", config_key_rules.same_scaling)
SHARE = ("only a part of each head is rotated", config_key_rules.same_share)
DIM = ("only a part of each head is rotated", config_key_rules.same_dim)
PAIRS = ("which dimensions are rotated together", config_key_rules.same_pairs)
ACTIVATION = ("the activation function", config_key_rules.same_activation)
SOFTCAP = ("it bounds scores or logits", config_key_rules.bounds)
FACTOR = ("numbers are multiplied by it", config_key_rules.is_factor)
SCALE = ("scores are multiplied by it", config_key_rules.same_scale)
QK_NORM = ("queries and keys are normed", config_key_rules.has("qk_norm"))
ALIBI = ("attention has linear biases", config_key_rules.alibi)
CLIP = ("queries, keys and values are clipped", config_key_rules.off_or_built("clip"))
POSITIONS = ("another kind of positions", config_key_rules.same_positions)
XPOS = ("positions are scaled", config_key_rules.usual(1))
LAYERS = ("layers differ from each other", config_key_rules.same_layers)
SIDE = ("attention and feed-forward stand side by side", config_key_rules.is_parallel)
CAUSAL = ("tokens see only those before them", config_key_rules.causal)
BEFORE = ("norms stand before or after the branches", config_key_rules.norm_before)
_DENSE = "some layers have no experts"
_CHOICE = "how experts are chosen and weighed"
RENORM = (_CHOICE, config_key_rules.is_built("renormalize", of=MoESpec))
GROUPS = (_CHOICE, config_key_rules.is_built("groups", of=MoESpec))
CHOSEN = (_CHOICE, config_key_rules.is_built("top_k_groups", of=MoESpec))
WEIGHT = (_CHOICE, config_key_rules.is_built("scale", of=MoESpec))
SHARED = ("layers use what others computed", config_key_rules.usual())
CLAMP = ("the gated unit is clamped", config_key_rules.is_built("limit", "alpha"))


def _all(known: tuple[str, Rule], *keys: str) -> dict[str, tuple[str, Rule]]:
    return dict.fromkeys(keys, known)


# Keys of the tables `rope_scaling` and `rope_parameters`, and of their tables for kinds of layers.
ROTARY: dict[str, tuple[str, Rule]] = {
    "rope_theta": THETA,
    "partial_rotary_factor": SHARE,
    **_all(SCALING, "rope_type", "type"),
    "factor": ("rotary positions are stretched", config_key_rules.same_stretch("factor")),
    "short_mscale": (
        "rotary positions are scaled",
        config_key_rules.same_stretch("attention_factor"),
    ),
    "long_mscale": (
        "rotary positions are scaled",
        config_key_rules.same_stretch("attention_factor"),
    ),
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
    "dim_model_base": ("logits are divided by hidden / it", config_key_rules.is_hidden),
    "scale_embedding": ("embeddings are scaled", config_key_rules.usual()),
    **_all(SCALE, "attention_multiplier", "attention.scale", "attn_config.softmax_scale"),
    "query_pre_attn_scalar": ("scores are divided by its root", config_key_rules.usual_query_scale),
    "scale_attn_weights": ("scores are scaled", config_key_rules.scaled_scores),
    "scale_attn_by_inverse_layer_idx": (
        "scores are divided by the layer's number",
        config_key_rules.usual(),
    ),
    **_all(QK_NORM, "use_qk_norm", "qk_layernorm", "use_qk_layernorm", "qk_norm"),
    **_all(QK_NORM, "attn_config.qk_ln"),
    **_all(ALIBI, "alibi", "use_alibi", "attention.max_alibi_bias", "attn_config.alibi"),
    **_all(CLIP, "clip_qkv", "attention.clamp_kqv", "attn_config.clip_qkv"),
    **_all(LAYERS, "layer_types", "attention_layers", "attention_types"),
    **_all(LAYERS, "attention.sliding_window_pattern"),
    "no_rope_layers": ("layers differ from each other", config_key_rules.same_rotated_layers),
    **_all(SIDE, "parallel_attn", "use_parallel_residual", "parallel_block"),
    "apply_residual_connection_post_layernorm": (
        "residuals start after the norm",
        config_key_rules.usual(),
    ),
    **_all(BEFORE, "normalize_before", "do_layer_norm_before", "prenorm"),
    "position_embedding_type": POSITIONS,
    "attn_config.rope": ("positions are rotated", config_key_rules.rotates),
    **_all(XPOS, "rotary_emb_scale_base", "rotary_scaling_factor"),
    **_all(CAUSAL, "is_decoder", "causal"),
    **_all(
        ("tokens see those after them", config_key_rules.sees_all), "attention.causal", "is_causal"
    ),
    "rotary_value": ("values are rotated as well", config_key_rules.usual()),
    "use_bidirectional_attention": ("tokens see those after them", config_key_rules.not_causal),
    "attn_config.prefix_lm": ("tokens see those after them", config_key_rules.usual()),
    "relative_attention": ("attention has vectors of distances", config_key_rules.disentangled),
    "pos_att_type": ("which vectors of distances there are", config_key_rules.both_ways),
    "norm_rel_ebd": ("vectors of distances are normed", config_key_rules.usual("layer_norm")),
    **_all(RENORM, "norm_topk_prob", "expert_weights_norm"),
    **_all(WEIGHT, "routed_scaling_factor", "expert_weights_scale"),
    **_all(GROUPS, "n_group", "expert_group_count"),
    **_all(CHOSEN, "topk_group", "expert_group_used_count"),
    "moe_router_use_sigmoid": (_CHOICE, moe_key_rules.sigmoid_scoring),
    **_all((_CHOICE, moe_key_rules.same_scoring), "scoring_func", "expert_gating_func"),
    "topk_method": (_CHOICE, moe_key_rules.same_choice),
    **_all((_DENSE, moe_key_rules.first_dense), "first_k_dense_replace"),
    **_all((_DENSE, moe_key_rules.first_dense), "leading_dense_block_count"),
    **_all((_DENSE, moe_key_rules.every_dense), "moe_layer_freq", "decoder_sparse_step"),
    **_all((_DENSE, moe_key_rules.every_dense), "moe_every_n_layers", "mlp_layer_types"),
    "mlp_only_layers": (_DENSE, moe_key_rules.these_dense),
    **_all(CLAMP, "swiglu_limit", "swiglu_alpha"),
    **_all(("another kind of norm", config_key_rules.same_norm), "norm_type", "use_rms_norm"),
    "attention_chunk_size": (
        "attention sees only its own piece of the text",
        config_key_rules.usual(),
    ),
    "attn_temperature_tuning": ("scores depend on how long the text is", config_key_rules.usual()),
    **_all(SHARED, "num_kv_shared_layers", "hidden_size_per_layer_input"),
    **_all(("layers use the weights of others", config_key_rules.usual(1)), "num_hidden_groups"),
    "inner_group_num": ("a layer has several attentions", config_key_rules.usual(1)),
    "share_encoder_decoder_embeddings": (
        "the stacks have embeddings of their own",
        config_key_rules.is_on,
    ),
}
