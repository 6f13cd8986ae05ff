"""Tensor role guessing, by the words of a tensor's name: q_proj, fc1, ln_f, ..."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from jinfer.checkpoint import Tensor
from jinfer.modelspec.resolve_spec import STACKS

from .fold_names import numbered
from .inspect_rows import MissingParameter

# Position of a module in a layer, by a word anywhere in its name; the first match.
_AREAS = {
    "cross": r"encoder_attn|encdecattention|cross_?att",
    "attn": r"attn|attention|\.sa_|^sa_",
    "after": r"^output\.",
    "ffn": r"mlp|ffn|feed_?forward|dense_?relu|intermediate|moe|experts|\bfc|lin[12]$",
}
# Last words of names by role; those of `attn` apply to `cross` as well.
_IN_LAYER = {
    "attn": {
        "attn.{q,k,v}": r"c_attn|w?qkv(_proj)?|query_key_value|w_pack|attn_qkv|in_proj",
        "attn.q_norm": r"q_norm|q_layernorm|query_norm|attn_q_norm",
        "attn.k_norm": r"k_norm|k_layernorm|key_norm|attn_k_norm",
        "attn.q": r"q|wq|q_proj|query|q_lin|attn_q",
        "attn.k": r"k|wk|k_proj|key|k_lin|attn_k",
        "attn.v": r"v|wv|v_proj|value|v_lin|attn_v",
        "attn.o": r"o|wo|o_proj|out_proj|out_lin|c_proj|dense|attn_output|proj",
        "attn_norm": r".*norm.*|ln.*",
    },
    "ffn": {
        "ffn.{gate,up}": r"gate_up_proj|gate_up|up_gate_proj",
        "ffn.gate": r"gate_proj|w1|wi_0|ffn_gate|linear_1",
        "ffn.up": r"up_proj|w3|wi_1|wi|ffn_up|fc1|fc_in|c_fc|dense_h_to_4h|lin1|linear_v|dense|up",
        "ffn.down": r"down_proj|w2|wo|ffn_down|fc2|fc_out|c_proj|dense_4h_to_h|lin2|down|proj",
        "ffn.router": r"gate|router|ffn_gate_inp",
        "ffn_norm": r".*norm.*|ln.*",
    },
    "after": {"ffn.down": r"dense", "ffn_norm": r".*norm.*"},
    "": {},
}
# Norms directly in the layer, by their own names.
_NORMS = {
    "cross_norm": r"(encoder_attn|cross).*norm",
    "attn_norm": r"input_layernorm|ln_?1|norm_?1|input_norm|sa_layer_norm"
    r"|(pre_)?(self_)?att(n|ention)?_.*norm",
    "ffn_norm": r"post_attention_layernorm|ln_?2|norm_?2|(final|output)_layer_?norm"
    r"|(pre_)?(ffn|mlp|feed_?forward)_(layer)?_?norm",
}
_OUTSIDE = {
    "position": r"wpe|embed_positions|position_embeddings|position_embd|pos_emb.*",
    "token_type": r"token_type_embeddings|token_types",
    "embed_norm": r"word_embeddings_layernorm|layernorm_embedding|embed_norm|token_embd_norm",
    "embed": r"embed_tokens|wte|word_embeddings|tok_embeddings|token_embd|embed_in|shared|embed.*",
    "logits": r"lm_head|embed_out|output|head|proj_out",
    "norm": r".*norm.*|ln_f|ln_out",
}
_IGNORED = re.compile(r"(.*\.)?(inv_freq|masked_bias|position_ids|causal_mask)")
# Tensors of blocks that keep a state from token to token (Mamba, delta nets, linear recurrences,
# short convolutions), of which jinfer has none.
_STATE = re.compile(
    r"A_log|dt_bias|([qkv]_)?conv_?1d|conv|time_decay|time_first|time_mix_\w+|recurrent_param"
    r"|slope_rate|ssm_\w+|shortconv"
)
_STATE_BLOCK = re.compile(r"(.*?\.\d+\.(?:ssm_|shortconv\.|[^.]+\.))(.+)")
_LEAF = re.compile(r"\.(weight|bias|gamma|beta)$")

type Shape = tuple[int, ...]


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


def module_of(tensor: Tensor) -> str:
    """A tensor's name without weight or bias, the layer's number as {i} and an expert's as {e}."""
    return _module(_LEAF.sub("", tensor.name))


def _module(name: str) -> str:
    return numbered(name, "ie" if re.search(r"experts?\.\d+(\.|$)", name) else "i")


def leaf_of(name: str) -> str:
    """Whether the name is a "weight" or a "bias"; "" if it does not say."""
    found = _LEAF.search(name)
    leaf = found[1] if found else ""
    return {"gamma": "weight", "beta": "bias"}.get(leaf, leaf)


def is_ignorable(tensor: Tensor) -> bool:
    """Whether it is a buffer that models do not need, such as a causal mask."""
    return bool(_IGNORED.fullmatch(tensor.name)) or (
        len(tensor.shape) == 4 and tensor.name.endswith(".bias")
    )


def role_of(tensor: Tensor, names: Collection[str], only: str) -> str:
    """The most likely role of a tensor, such as "decoder.{i}.attn.q"; "" if unclear.

    Args:
        names: all modules of the file: with w1 but no w3, w1 is the first of two matrices.
        only: `only_stack` of them.
    """
    module = module_of(tensor)
    stack = next((s for s in STACKS if re.match(rf"(\w+\.)*?{s}\.", module)), only)
    last = module.rpartition(".")[2].lower()
    if "{i}" not in module:
        role = _word(_OUTSIDE, last)
        if role == "norm" and "embeddings." in module:
            role = "embed_norm"
        if role == "norm" and "predictions." in module:
            return ""
        return role if role in ("embed", "logits", "") else f"{stack}.{role}"
    inner = module.partition("{i}.")[2]
    area = next((a for a, words in _AREAS.items() if re.search(words, inner.lower())), "")
    if "." not in inner and (norm := _word(_NORMS, last)):
        return f"{stack}.{{i}}.{norm}"
    role = _word(_IN_LAYER["attn" if area == "cross" else area], last)
    if role == "ffn.gate" and last == "w1" and f"{module[:-2]}w3" not in names:
        role = "ffn.up"
    if "{e}" in module:
        role = role.replace("ffn.", "ffn.experts.")
    if area == "cross":
        role = role.replace("attn", "cross")
    return f"{stack}.{{i}}.{role}" if role else ""


def only_stack(names: Collection[str]) -> str:
    """The stack of unmarked modules: the encoder if only it is named, otherwise the decoder."""
    named = {stack for stack in STACKS for n in names if f"{stack}." in n}
    return "encoder" if named == {"encoder"} else "decoder"


def state_modules(tensors: Iterable[Tensor]) -> dict[str, str]:
    """Modules that only occur in blocks with a recurrent state -> the block's name."""
    names = [_LEAF.sub("", tensor.name) for tensor in tensors]
    placed = {name: found for name in names if (found := _STATE_BLOCK.fullmatch(name))}
    blocks = {
        found[1]
        for name, found in placed.items()
        if _STATE.fullmatch(found[2].rpartition(".")[2]) or found[1].endswith(("ssm_", "conv."))
    }
    inside, outside = dict[str, str](), set[str]()
    for name in names:
        module = _module(name)
        if name in placed and placed[name][1] in blocks:
            inside[module] = numbered(placed[name][1].rstrip("."), "i")
        else:
            outside.add(module)
    return {module: block for module, block in inside.items() if module not in outside}


def _word(table: Mapping[str, str], word: str) -> str:
    return next((role for role, words in table.items() if re.fullmatch(words, word)), "")


def roles_of(tensors: Iterable[Tensor]) -> dict[str, str]:
    """The most likely role of each module; "" for those that are unclear, or duplicates.

    Buffers are left out. Parts of state blocks have no role.
    """
    tensors = list(tensors)
    state = state_modules(tensors)
    modules = {module_of(tensor): tensor for tensor in tensors if not is_ignorable(tensor)}
    roles: dict[str, str] = {}
    only, seen = only_stack(modules), set[str]()
    for module, tensor in modules.items():
        role = "" if module in state else role_of(tensor, modules, only)
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
    state = state_modules(unused)
    for tensor in (each for each in unused if module_of(each) not in state):
        modules.setdefault(module_of(tensor), {}).setdefault(leaf_of(tensor.name), tensor)
    lines: dict[str, ProposedLine] = {}
    only = only_stack(modules)
    for module, tensors in modules.items():
        role = role_of(next(iter(tensors.values())), modules, only)
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
