"""Tensor roles, guessed from the words of a tensor's name: q_proj, fc1, ln_f, ..."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from jinfer.cli.propose.checkpoint_layers import (
    layers_of,
)
from jinfer.loader.checkpoint import Tensor
from jinfer.modelspec.resolve_spec import STACKS

# Position of a module in a layer, by a word anywhere in its name; the first match.
_AREAS = {
    "shared": r"shared_?(expert|mlp)|share_expert|shexp",
    "cross": r"encoder_attn|encdecattention|cross_?att",
    "attn": r"attn|attention|\.sa_|^sa_",
    "after": r"^output\.",
    "ffn": r"mlp|ffn|feed_?forward|dense_?relu|intermediate|moe|experts|router"
    r"|\bfc|lin[12]$|\bff\b",
}
# Last words of names by role; those of `attn` apply to `cross` as well.
_ATTENTION = {
    "attn.{q,k,v}": r"c_attn|w?qkv(_proj)?|query_key_value|w_pack|attn_qkv|in_proj(_weight)?"
    r"|att_proj",
    "attn.q_a": r"(attn_)?q_a(_proj)?",
    "attn.q_a_norm": r"(attn_)?q_a_(layer)?norm",
    "attn.q_b": r"(attn_)?q_b(_proj)?|wq_b",
    "attn.kv_a": r"kv_a_proj_with_mqa|(attn_)?kv_a_mqa",
    "attn.kv_a_norm": r"(attn_)?kv_a_(layer)?norm",
    "attn.kv_b": r"(attn_)?kv_b(_proj)?",
    "attn.q_norm": r"(q|query)_(layer_?)?(norm|ln)|attn_q_norm|norm_q",
    "attn.k_norm": r"(k|key)_(layer_?)?(norm|ln)|attn_k_norm|norm_k",
    "attn.q": r"q|wq|q_proj|query|q_lin(ear)?|attn_q|query_proj|(project|to|linear)_q",
    "attn.k": r"k|wk|k_proj|key|k_lin(ear)?|attn_k|key_proj|(project|to|linear)_k",
    "attn.v": r"v|wv|v_proj|value|v_lin(ear)?|attn_v|value_proj|(project|to|linear)_v",
    "attn.gate": r"gate_proj|g_proj|attn_gate|output_gate|gate",
    "attn.out_norm": r"(attn_)?sub_norm|o_norm|out_norm|inner_attn_ln",
    "attn.sinks": r"(attn_)?sinks?(_bias)?|attention_sink_bias|softmax_offset",
    "attn.o": r"o|wo|o_proj|out_proj|out_lin|c_proj|dense|attn_output|proj|attn_out|output"
    r"|(project|to|linear)_o(ut)?",
    "attn.relative": r"relative_attention_bias|attn_rel_b",
    "attn_norm": r".*norm.*|ln.*|.*_ln",
}
_INDEXER = {
    "attn.indexer.q": r"wq_b|attn_q_b",
    "attn.indexer.k": r"wk|attn_k",
    "attn.indexer.k_norm": r"k_norm",
    "attn.indexer.head_weights": r"weights_proj|proj",
}
_FEED_FORWARD = {
    "ffn.{gate,up}": r"gate_up_proj|up_gate_proj",
    "ffn.gate": r"fc12|c_fc_0|gate_proj|w1|wi_0|ffn_gate",
    "ffn.up": r"fc11|up_proj|w3|wi_1|wi|ffn_up|fc1|fc_in|c_fc|c_fc_1|dense_h_to_4h|lin1|dense"
    r"|ff_proj|ffn|up",
    "ffn.down": r"down_proj|w2|wo|ffn_down|fc2|fc_out|c_proj|dense_4h_to_h|lin2|proj|output"
    r"|ffn_output|ff_out|down",
    "ffn.router": r"gate|router|ffn_gate_inp|classifier",
    "ffn.router.correction": r"e_score_correction_bias|expert_bias",
    "ffn_norm": r".*norm.*|ln.*|.*_ln",
}
_SHARED = {
    "shared_expert_gate": r"shared_experts?_gate",
    "shared_expert.{gate,up}": r"gate_up_proj|input_linear",
    "shared_expert.gate": r"gate_proj|w1|ffn_gate_shexp",
    "shared_expert.up": r"up_proj|w3|ffn_up_shexp",
    "shared_expert.down": r"down_proj|w2|output_linear|ffn_down_shexp",
}
_EXPERTS = {
    "ffn.experts.{gate,up}": r"gate_up_proj|input_linear|ffn_gate_up_exps",
    "ffn.experts.{gate,up}.bias": r"gate_up_proj_bias",
    "ffn.experts.gate": r"gate_proj|w1|ffn_gate_exps|gate",
    "ffn.experts.up": r"up_proj|w3|ffn_up_exps|v1|c_fc|fc1",
    "ffn.experts.down": r"down_proj|w2|output_linear|ffn_down_exps|c_proj|fc2",
    "ffn.experts.down.bias": r"down_proj_bias",
}
_MIXER = {r: w for r, w in _ATTENTION.items() if r not in ("attn.gate", "attn_norm")}
_IN_LAYER = {
    "attn": _ATTENTION,
    "shared": _SHARED,
    "ffn": _FEED_FORWARD,
    "after": {"ffn.down": r"dense", "ffn_norm": r".*norm.*"},
    # A mixer of any kind, by the last word of its name alone.
    "": _MIXER | {role: words for role, words in _FEED_FORWARD.items() if role != "ffn_norm"},
}
# Norms directly in the layer, by their own names; the first match.
_NORMS = {
    "cross_norm": r"(encoder_attn|cross|pre_cross).*norm",
    "attn_norm": r"input_layernorm|ln_?1|norm_?1|sa_layer_norm|operator_norm|norm|layer_?norm"
    r"|(temporal_pre|pre_mixer|pre_self_attn|pre_self_attention|pre_attn|pre_attention)_(layer_?)?norm"
    r"|(self_)?att(n|ention)?_(layer_?)?norm|attn_ln|ln_attn",
    "cross_post": r"post_cross.*norm",
    "attn_post": r"post_(self_)?att(n|ention)?_norm|post_self_attn_layernorm|post_norm1"
    r"|post_(mixer|operator)_norm",
    "after_attn": r"post_attention_layernorm|attn_output_norm",
    "ffn_post": r"post_(ffn|mlp|ff|ffw|feed_?forward)_?(layer_?)?norm|layer_output_norm|post_norm2",
    "ffn_norm": r"ln_?2|norm_?2|(final|output)_layer_?norm|(channel_pre|pre_moe)_norm|ln_mlp|mlp_ln"
    r"|(pre_)?(ffn|mlp|ff|feed_?forward)_(layer_?)?norm|full_layer_layer_norm",
}
_OUTSIDE = {
    "position": r"wpe|embed_positions|position_embeddings|position_embd|pos_emb(edding)?",
    "token_type": r"token_type_embeddings|token_types",
    "embed_norm": r"word_embeddings_layernorm|layernorm_embedding|token_embd_norm|emb_ln|pre_ln",
    "project_in": r"project_in|embeddings_project|embedding_hidden_mapping_in",
    "project_out": r"project_out",
    "logits": r"lm_head|embed_out|output|head|output_layer",
    "norm": r".*norm.*|ln_f|ln_out",
    "embed": r"embed_tokens|wte|word_embeddings|tok_embeddings|token_embd|embed_in|shared|embed.*",
}


def role_in_layer(inner: str, names: Collection[str]) -> str:
    """Return the most likely role of a module of a layer, such as "attn.q"; "" if unclear.

    Args:
        inner: its name in the layer.
        names: those of the layer's modules: with w1 but no w3, w1 is the first of two matrices.
    """
    words = inner.lower()
    last = words.rpartition(".")[2]
    if "indexer" in words:  # of sparse attention, whose words are attention's
        return _word(_INDEXER, last)
    area = next((a for a, pattern in _AREAS.items() if re.search(pattern, words)), "")
    if "." not in words and (norm := _word(_NORMS, last)):
        return norm
    if ("expert" in words and area != "shared" and "router" not in words) or last.endswith("_exps"):
        if _word(_FEED_FORWARD, last) == "ffn.router.correction":
            return "ffn.router.correction"
        if role := _word(_EXPERTS, last):
            return _first_of_two(role, inner, names)
    if re.search(r"block_sparse_moe\.(input|output)_linear", words):
        return _word(_EXPERTS, last)
    if area == "ffn" and re.search(r"(router|gate)\.(layer|weight|linear|classifier|proj)$", words):
        return "ffn.router"
    role = _word(_IN_LAYER["attn" if area == "cross" else area], last)
    role = _first_of_two(role, inner, names)
    if role == "ffn.router" and not any(re.search("expert|_exps|moe", name) for name in names):
        role = "ffn.gate"
    return role.replace("attn", "cross") if area == "cross" else role


def _first_of_two(role: str, inner: str, names: Collection[str]) -> str:
    """`role`, or that of the first of two matrices if there is a w1 and no w3."""
    if role.endswith("gate") and inner.endswith("w1") and f"{inner[:-1]}3" not in names:
        return role.removesuffix("gate") + "up"
    return role


def role_outside(name: str) -> str:
    """Return the most likely role of a module of no layer, such as "embed"; "" if unclear."""
    role = _word(_OUTSIDE, name.rpartition(".")[2].lower())
    if role == "norm" and re.search(r"embeddings?\.", name):
        return "embed_norm"
    of_head = role == "norm" and re.search(r"predictions\.|vocab_|head\.", name)
    return "" if of_head else role


def _word(table: Mapping[str, str], word: str) -> str:
    return next((role for role, words in table.items() if re.fullmatch(words, word)), "")


def roles_of(tensors: Iterable[Tensor]) -> dict[str, str]:
    """Return the most likely role of each module, such as "decoder.{i}.attn.q".

    Modules without a clear role, or with that of another module, are left out.
    """
    layers = layers_of(tensors)
    last = layers.stacks[-1].name if layers.stacks else "decoder"
    found: dict[str, str] = {}
    for name in layers.outside:
        role = role_outside(name)
        owner = next((s for s in STACKS if re.match(rf"(\w+\.)*?{s}\.", name)), last)
        found.setdefault(role if role in ("embed", "logits", "") else f"{owner}.{role}", name)
    for stack in layers.stacks:
        for parts in stack.kinds:
            second = "input_layernorm" in parts and "pre_feedforward_layernorm" not in parts
            for inner, part in parts.items():
                role = role_in_layer(inner, parts.keys())
                if role == "after_attn":
                    role = "ffn_norm" if second else "attn_post"
                if role:
                    found.setdefault(f"{stack.name}.{{i}}.{role}", part.name)
    return {name: role for role, name in found.items() if role}
