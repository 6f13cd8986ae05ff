"""Tensor role guessing, by the words of a tensor's name: q_proj, fc1, ln_f, ..."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from jinfer.loader.checkpoint import Tensor
from jinfer.modelspec.resolve_spec import STACKS

from .checkpoint_layers import Shape, is_ignorable, leaf_of, module_name
from .fold_names import numbered
from .inspect_rows import MissingParameter

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
    "attn.{q,k,v}.bias": r"in_proj_bias",
    "attn.q_a": r"(attn_)?q_a(_proj)?|q_down_proj|wq_a",
    "attn.q_a_norm": r"(attn_)?q_a_(layer)?norm",
    "attn.q_b": r"(attn_)?q_b(_proj)?|q_up_proj|wq_b",
    "attn.kv_a": r"kv_a_proj_with_mqa|(attn_)?kv_a_mqa|wkv_a",
    "attn.kv_a_norm": r"(attn_)?kv_a_(layer)?norm|kv_norm",
    "attn.kv_b": r"(attn_)?kv_b(_proj)?|wkv_b",
    "attn.q_norm": r"q_(layer_?)?norm|(q|query)_(layernorm|ln|norm)|attn_q_norm|norm_q|q_layernorm",
    "attn.k_norm": r"k_(layer_?)?norm|(k|key)_(layernorm|ln|norm)|attn_k_norm|norm_k|k_layernorm",
    "attn.q": r"q|wq|q_proj|query|q_lin(ear)?|attn_q|query_proj|(project|to|linear)_q",
    "attn.k": r"k|wk|k_proj|key|k_lin(ear)?|attn_k|key_proj|(project|to|linear)_k",
    "attn.v": r"v|wv|v_proj|value|v_lin(ear)?|attn_v|value_proj|(project|to|linear)_v",
    "attn.gate": r"gate_proj|g_proj|attn_gate|output_gate|gate|o_gate|qkv_gate",
    "attn.out_norm": r"(attn_)?sub_norm|attn_sub_norm|o_norm|out_norm|inner_attn_ln|subln",
    "attn.sinks": r"(attn_)?sinks?(_bias)?|attention_sink_bias|softmax_offset",
    **{f"attn.differential.lambda_{n}": f"lambda_{n}" for n in ("q1", "k1", "q2", "k2")},
    "attn.o": r"o|wo|o_proj|out_proj|out_lin|c_proj|dense|attn_output|proj|attn_out|out|output"
    r"|attention_out(put)?|(project|to|linear)_o(ut)?|output_proj(ection)?",
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
    "ffn.{gate,up}": r"gate_up_proj|gate_up|up_gate_proj|wi_fused|gate_and_up_proj",
    "ffn.gate": r"fc12|c_fc_0|gate_proj|w1|wi_0|ffn_gate|linear_1|linear_v|gate_layer"
    r"|w_0|proj_up_gate",
    "ffn.up": r"fc11|up_proj|w3|wi_1|wi|ffn_up|fc1|fc_in|c_fc|c_fc_1|dense_h_to_4h|lin1|dense|up"
    r"|w_1|intermediate_proj|up_layer|intermediate|layer_1|w_in|proj_up|ff_proj|ffn",
    "ffn.down": r"down_proj|w2|wo|ffn_down|fc2|fc_out|c_proj|dense_4h_to_h|lin2|down|proj|w_2"
    r"|output|layer_2|w_out|proj_down|ffn_output|ff_out",
    "ffn.router": r"gate|router|ffn_gate_inp|wg|classifier|router_proj",
    "ffn.router.correction": r"e_score_correction_bias|expert_bias|exp_probs_b|moe_statics"
    r"|correction_bias|score_correction_bias",
    "ffn.sub_norm": r"(ffn_)?sub_norm|ffn_layernorm",
    "ffn_norm": r".*norm.*|ln.*|.*_ln",
}
_SHARED = {
    "shared_expert_gate": r"shared_expert_gate|shared_experts?_gate|ffn_gate_inp_shexp",
    "shared_expert.{gate,up}": r"gate_up_proj|input_linear|gate_up",
    "shared_expert.gate": r"gate_proj|w1|ffn_gate_shexp",
    "shared_expert.up": r"up_proj|w3|ffn_up_shexp|up",
    "shared_expert.down": r"down_proj|w2|output_linear|ffn_down_shexp|down",
}
_EXPERTS = {
    "ffn.experts.{gate,up}": r"gate_up_proj|input_linear|(experts\.)?w13|ffn_gate_up_exps",
    "ffn.experts.{gate,up}.bias": r"gate_up_proj_bias",
    "ffn.experts.gate": r"gate_proj|w1|ffn_gate_exps|linear_1|gate",
    "ffn.experts.up": r"up_proj|w3|ffn_up_exps|v1|up|c_fc|fc1",
    "ffn.experts.down": r"down_proj|w2|output_linear|ffn_down_exps|down|c_proj|fc2",
    "ffn.experts.down.bias": r"down_proj_bias",
}
_IN_LAYER = {
    "attn": _ATTENTION,
    "shared": _SHARED,
    "ffn": _FEED_FORWARD,
    "after": {"ffn.down": r"dense", "ffn_norm": r".*norm.*"},
    # A mixer of any kind: what its last word says alone.
    "": {
        **{
            role: words
            for role, words in _ATTENTION.items()
            if role not in ("attn.gate", "attn_norm")
        },
        **{role: words for role, words in _FEED_FORWARD.items() if role.startswith("ffn.")},
    },
}
# Norms directly in the layer, by their own names; the first match.
_NORMS = {
    "cross_norm": r"(encoder_attn|cross|pre_cross).*norm|crossattention.*norm",
    "attn_norm": r"input_layernorm|ln_?1|norm_?1|input_norm|sa_layer_norm|operator_norm"
    r"|(temporal_pre|pre_mixer|pre_self_attn|pre_self_attention|pre_attn|pre_attention)_(layer_?)?norm"
    r"|(self_)?att(n|ention)?_(layer_?)?norm|attn_ln|ln_attn|norm|layer_norm|attention_layernorm"
    r"|pre_(self_)?attn_(layer)?norm|norm_attn|input_ln|attn_norm|layer_?norm_?1|layernorm",
    "cross_post": r"post_cross.*norm",
    "attn_post": r"post_(self_)?att(n|ention)?_norm|post_self_attn_layernorm|attn_post_norm"
    r"|post_self_attention_(layer)?norm|post_attention_norm|attn_out_norm|post_attn_layernorm"
    r"|post_norm1|attention_output_norm|post_(mixer|operator)_norm",
    "after_attn": r"post_attention_layernorm|attn_output_norm",
    "ffn_post": r"post_(ffn|mlp|ff|ffw|feed_?forward)_?(layer_?)?norm|layer_output_norm"
    r"|ffn_post_norm|post_norm2|post_moe_norm|post_feedforward_layernorm",
    "ffn_norm": r"ln_?2|norm_?2|(final|output)_layer_?norm|(channel_pre|pre_moe)_norm|ln_mlp|mlp_ln"
    r"|(pre_)?(ffn|mlp|ff|feed_?forward)_(layer_?)?norm|norm_mlp|norm_ffn|pre_ffw_norm|post_ln|ln"
    r"|layer_?norm_?2|full_layer_layer_norm",
}
_OUTSIDE = {
    "position": r"wpe|embed_positions|positions_embed|position_embeddings|position_embd"
    r"|pos(itional)?_emb.*|position_embed(ding)?",
    "token_type": r"token_type_embeddings|token_types",
    "embed_norm": r"word_embeddings_layernorm|layernorm_embedding|embed_norm|token_embd_norm|emb_ln"
    r"|embedding_layernorm|embeddings_layernorm|embed_layer_norm|layer_norm_emb|pre_ln",
    "project_in": r"project_in|embeddings_project|embedding_hidden_mapping_in",
    "project_out": r"project_out",
    "logits": r"lm_head|embed_out|output|head|proj_out|output_layer",
    "norm": r".*norm.*|ln_f|ln_out|final_ln|ln_final|ln",
    "embed": r"embed_tokens|tokens_embed|wte|word_embeddings|tok_embeddings|token_embd|embed_in"
    r"|shared|embed.*|word_embedding",
}

_LEAF = re.compile(r"\.(weight|bias|gamma|beta)$")


@dataclass(frozen=True)
class ProposedLine:
    """A proposed line of a `[tensors]` table.

    Attributes:
        parameter: jinfer's name, with {i}.
        source: the file's name, with {i} and {e}.
        transpose: the file has the matrix as [inputs, outputs].
        reason: why it is proposed.
    """

    parameter: str
    source: str
    transpose: bool = False
    reason: str = "by its words"

    def __str__(self) -> str:
        plain = json.dumps(self.source, ensure_ascii=False)  # quoted as TOML does
        turned = f"{{ from = {plain}, transpose = true }}"
        return f'"{self.parameter}" = {turned if self.transpose else plain}'


def role_in_layer(inner: str, names: Collection[str]) -> str:
    """The most likely role of a module of a layer, such as "attn.q"; "" if unclear.

    Args:
        inner: its name in the layer.
        names: those of the layer's modules: with w1 but no w3, w1 is the first of two matrices.
    """
    words = inner.lower().removesuffix(".linear")  # a wrapped projection
    last = words.rpartition(".")[2]
    if "indexer" in words:  # of sparse attention, whose words are attention's
        return _word(_INDEXER, last)
    area = next((a for a, pattern in _AREAS.items() if re.search(pattern, words)), "")
    if ("." not in words or words.startswith("layer.")) and (norm := _word(_NORMS, last)):
        return norm if "." not in words else ""
    if ("expert" in words and area != "shared" and "router" not in words) or last.endswith("_exps"):
        role = _word(_EXPERTS, last)
        role = (
            "ffn.router.correction"
            if _word(_FEED_FORWARD, last) == "ffn.router.correction"
            else role
        )
        if role:
            return _first_of_two(role, inner, names)
    if re.search(r"block_sparse_moe\.(input|output)_linear", words):
        return _word(_EXPERTS, last)
    if (
        re.search(r"(router|gate)\.(layer|weight|wg|linear|classifier|proj|gate)$", words)
        and area == "ffn"
    ):
        return "ffn.router"
    if re.search(r"act(_fn)?\.alpha_[pn]$", words):
        return f"ffn.{last}"
    role = _word(_IN_LAYER["attn" if area == "cross" else area], last)
    role = _first_of_two(role, inner, names)
    if area == "cross":
        role = role.replace("attn", "cross")
    if area == "ffn" and role == "ffn.gate" and last == "gate_proj" and "up" not in " ".join(names):
        role = "ffn.up"
    if role == "ffn.router" and not any(
        "expert" in name or "_exps" in name or "moe" in name for name in names
    ):
        role = "ffn.gate"
    return role


def _first_of_two(role: str, inner: str, names: Collection[str]) -> str:
    """`role`, or that of the first of two matrices where w1 has no w3 beside it."""
    third = inner[:-2] + {"w1": "w3", "W1": "W3", "w_1": "w_3"}.get(inner[-2:], "")
    if role.endswith("gate") and inner.endswith("w1") and third not in names:
        return role.removesuffix("gate") + "up"
    return role


def role_outside(name: str) -> str:
    """The most likely role of a module of no layer, such as "embed"; "" if unclear."""
    role = _word(_OUTSIDE, name.rpartition(".")[2].lower())
    if role == "norm" and re.search(r"embeddings?\.", name):
        return "embed_norm"
    return (
        "" if role == "norm" and re.search(r"predictions\.|lm_head\.|vocab_|head\.", name) else role
    )


def only_stack(names: Collection[str]) -> str:
    """The stack of unmarked modules: the encoder if only it is named, otherwise the decoder."""
    named = {stack for stack in STACKS for n in names if f"{stack}." in n}
    return "encoder" if named == {"encoder"} else "decoder"


def role_of(module: str, names: Collection[str], only: str) -> str:
    """The most likely role of a module, such as "decoder.{i}.attn.q"; "" if unclear.

    Args:
        names: all modules of the file.
        only: `only_stack` of them.
    """
    stack = next((s for s in STACKS if re.match(rf"(\w+\.)*?{s}\.", module)), only)
    prefix, mark, inner = module.partition("{i}.")
    if not mark:
        role = role_outside(module)
        return role if role in ("embed", "logits", "") else f"{stack}.{role}"
    beside = [n.removeprefix(prefix + mark) for n in names if n.startswith(prefix + mark)]
    role = role_in_layer(inner, beside)
    first = "input_layernorm" in beside
    after = "ffn_norm" if first and "pre_feedforward_layernorm" not in beside else "attn_post"
    role = after if role == "after_attn" else role
    return f"{stack}.{{i}}.{role}" if role else ""


def _word(table: Mapping[str, str], word: str) -> str:
    return next((role for role, words in table.items() if re.fullmatch(words, word)), "")


def roles_of(tensors: Iterable[Tensor]) -> dict[str, str]:
    """The most likely role of each module; "" for those that are unclear, or duplicates.

    Buffers are left out.
    """
    modules = dict.fromkeys(module_name(t.name) for t in tensors if not is_ignorable(t))
    roles: dict[str, str] = {}
    only, seen = only_stack(modules), set[str]()
    for module in modules:
        role = role_of(module, modules, only)
        roles[module] = "" if role in seen else role
        seen.add(role)
    return roles


def propose(unused: list[Tensor], missing: Iterable[MissingParameter]) -> list[ProposedLine]:
    """Lines for tensors that match a missing parameter, by name or else by shape."""
    wanted: dict[str, dict[str, Shape]] = {}
    for each in missing:
        name = numbered(_LEAF.sub("", each.parameter), "i")
        wanted.setdefault(name, {}).setdefault(leaf_of(each.parameter), each.shape)
    modules: dict[str, dict[str, Tensor]] = {}
    for tensor in unused:
        modules.setdefault(module_name(tensor.name), {}).setdefault(leaf_of(tensor.name), tensor)
    lines: dict[str, ProposedLine] = {}
    only = only_stack(modules)
    for module, tensors in modules.items():
        role = role_of(module, modules, only)
        if role in wanted and (fit := _fits(tensors, wanted[role], "{e}" in module)):
            lines[role] = ProposedLine(role, module, fit == "transposed")
    by_shape: dict[tuple[Shape, bool], list[str]] = {}
    for parameter, shapes in wanted.items():
        if parameter not in lines:
            by_shape.setdefault((_first(shapes), "{i}" in parameter), []).append(parameter)
    taken = {line.source for line in lines.values()}
    free = {module: _first(t).shape for module, t in modules.items() if module not in taken}
    for (shape, in_layer), parameters in by_shape.items():
        alike = [m for m, own in free.items() if own == shape and ("{i}" in m) == in_layer]
        if len(alike) == len(parameters) == 1:
            lines[parameters[0]] = ProposedLine(parameters[0], alike[0], reason="by its shape")
    return list(lines.values())


def _first[T](of_leaves: Mapping[str, T]) -> T:
    """The line of the weight, if there is one."""
    return of_leaves.get("weight", next(iter(of_leaves.values())))


def _fits(tensors: Mapping[str, Tensor], wanted: Mapping[str, Shape], stacked: bool) -> str:
    """Whether a module's tensors fit the wanted ones: every leaf that both have must."""
    found = set()
    for leaf in tensors.keys() & wanted.keys():
        shape, own = wanted[leaf][stacked:], tensors[leaf].shape
        found.add("as it is" if own == shape else "transposed" if own == shape[::-1] else "")
    return "" if "" in found or not found else "transposed" if "transposed" in found else "as it is"
