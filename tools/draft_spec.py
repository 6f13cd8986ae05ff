"""Spec template: a first version of a specification for a checkpoint that no family matches."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jinfer.checkpoint import Tensor
from jinfer.opening.model_files import ModelFiles

from .guess_roles import ProposedLine, is_ignorable, module_of, roles_of, state_modules

# jinfer's word -> the words that config files have for it, and what holds without any.
_DIMS = {
    "vocab": (("vocab_size",), ""),
    "hidden": (("hidden_size", "n_embd", "n_embed", "d_model", "dim"), ""),
    "layers": (("num_hidden_layers", "n_layer", "n_layers", "num_layers"), ""),
    "heads": (
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"),
        "",
    ),
    "kv_heads": (("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads"), "heads"),
    "head_dim": (("head_dim", "d_kv"), "hidden / heads"),
    "intermediate": (
        ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim", "encoder_ffn_dim"),
        "",
    ),
    "context": (("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"), "2048"),
    "eps": (("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps"), "1e-5"),
    "rope_theta": (("rope_theta", "rotary_emb_base"), "10000"),
}
# Which dimensions of a head are rotated: a key with their number, or with their share.
_ROTARY_DIM = "rotary_dim"
_ROTARY_SHARES = ("partial_rotary_factor", "rotary_pct", "rope_pct", "rotary_emb_fraction")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "activation")
# Keys that say nothing of the model's structure, or what its tensors say as well.
SAYS_NOTHING = re.compile(
    r"_.*|architectures|auto_map|model_type|tokenizer_class|transformers_version|(torch_)?dtype"
    r"|tie_word_embeddings|use_cache|gradient_checkpointing|pretraining_tp|task_specific_params"
    r"|.*_token_id|.*_ids?|.*drop(out)?(_.*)?|.*initializer_.*|initializer|summary_.*|id2label"
    r"|label2id|output_.*|return_.*|quantization_config"
)
_TO_CHECK = """\
# A draft: what names and shapes tell. Check against the model's own code:
# the order of the norms, the activation, rotary pairs (halves or adjacent), scales, windows."""


def draft(opened: ModelFiles, weights: str = "") -> str:
    """The text of a specification: complete for a plain decoder or encoder, otherwise only names.

    Args:
        weights: path of the checkpoint relative to the file; "" leaves it out.
    """
    tensors = list(opened.checkpoint.tensors.values())
    modules = {module_of(tensor): tensor for tensor in tensors if not is_ignorable(tensor)}
    roles = roles_of(tensors)
    found = {role: modules[module] for module, role in roles.items() if role}
    stacks = sorted({role.partition(".")[0] for role in found} & {"encoder", "decoder"})
    state = state_modules(tensors)
    unnamed = [module for module, role in roles.items() if not role and module not in state]
    at = f"weights = {json.dumps(weights, ensure_ascii=False)}" if weights else ""
    parts = [_TO_CHECK, at, _match(opened)]
    if opened.checkpoint.format != "gguf":  # whose sizes specs/formats/gguf.toml supplies
        parts.append(_dims(opened.config, found))
    if len(stacks) == 1:
        biases = [t for t in tensors if t.name.endswith((".bias", ".beta")) and not is_ignorable(t)]
        biased = {roles[module_of(tensor)] for tensor in biases}
        parts.append(_stack(stacks[0], opened, set(found), biased))
    parts.append(_tensors(opened, roles, modules, tensors))
    if unnamed:
        parts.append("\n".join(f"# no name found for {json.dumps(module)}" for module in unnamed))
    parts += _state_blocks(state)
    if opened.checkpoint.format not in ("gguf", "llama2c"):
        parts.append(_unread(opened.config, "".join(parts)))
    return "\n\n".join(part for part in parts if part) + "\n"


def _state_blocks(state: Mapping[str, str]) -> Iterator[str]:
    """One comment for each block with a recurrent state."""
    for block in dict.fromkeys(state.values()):
        parts = [m.removeprefix(block).lstrip(".") for m, other in state.items() if other == block]
        yield (
            f"# {block} is a state block, of which jinfer has none yet, so this\n"
            f"# model cannot be described. Its parts: {', '.join(parts)}"
        )


def _match(opened: ModelFiles) -> str:
    key = "gguf" if opened.checkpoint.format == "gguf" else "architectures"
    names = ", ".join(json.dumps(name) for name in opened.architectures)
    return f"[match]\n{key} = [{names}]" if names else ""


def _unread(config: Mapping[str, Any], text: str) -> str:
    """The keys of config.json that may matter but that nothing in the text looks up."""
    read = {key.partition(".")[0] for key in re.findall(r"\$([\w.]+)", text)}
    unread = {
        key: value
        for key, value in config.items()
        if key not in read and value is not None and not SAYS_NOTHING.fullmatch(key)
    }
    if not unread:
        return ""
    lines = [f"#   {json.dumps(key)[1:-1]} = {json.dumps(v)[:60]}" for key, v in unread.items()]
    return "\n".join(["# config.json also says, and nothing here reads:", *lines])


def _dims(config: Mapping[str, Any], found: Mapping[str, Tensor]) -> str:
    lines = ["[dims]"]
    rotary = not any(role.endswith(".position") for role in found)
    for name, (keys, default) in _DIMS.items():
        if name == "rope_theta" and not rotary:
            continue
        present = [key for key in keys if config.get(key) is not None]
        null = [key for key in keys if key in config]
        by_shape = "" if default or present else _by_shape(name, found)
        if present:
            value = f'"${present[0]} | {default}"' if default else f'"${present[0]}"'
        elif default:
            value = default if default.replace("e-", "").isdigit() else f'"{default}"'
        elif null and by_shape:
            value = f'"${null[0]} | {by_shape}"'
        else:
            value = by_shape if by_shape.isdigit() else f'"{by_shape or "?"}"'
        lines.append(f"{name:<12} = {value}")
    if rotary and (dim := _rotary_dim(config)):
        lines.append(f'{"rotary_dim":<12} = "{dim} | head_dim"')
    return "\n".join(lines)


def _rotary_dim(config: Mapping[str, Any]) -> str:
    """Rotated dimensions of a head; "" for all of them."""
    if config.get(_ROTARY_DIM) is not None:
        return f"${_ROTARY_DIM}"
    shares = [key for key in _ROTARY_SHARES if config.get(key) not in (None, 1)]
    return f"floor(head_dim * ${shares[0]})" if shares else ""


def _by_shape(name: str, found: Mapping[str, Tensor]) -> str:
    """A size as implied by the tensors: a number, or a multiple of another size; "" if unknown."""
    embed = found.get("embed")
    if embed is None or len(embed.shape) != 2:
        return ""
    vocab, hidden = embed.shape
    up = next((t for role, t in found.items() if role.endswith("ffn.up")), None)
    if name == "intermediate" and up is not None and len(up.shape) == 2:
        size = max(up.shape, key=lambda size: size != hidden)
        return str(size) if size % hidden else f"{size // hidden} * hidden"
    return {"vocab": str(vocab), "hidden": str(hidden)}.get(name, "")


def _stack(stack: str, opened: ModelFiles, found: set[str], biased: set[str]) -> str:
    """The tables of a single stack; `biased` are the modules with a bias."""
    has, has_bias = (
        {role.removeprefix(f"{stack}.").removeprefix("{i}.") for role in roles}
        for roles in (found, biased)
    )
    lines = [
        '[modules]\nembed  = { kind = "embedding" }',
        *(_head(has, has_bias) if "logits" in has or stack == "decoder" else []),
        f"\n[{stack}]\n{_wiring(stack, has)}\n",
        f"[{stack}.modules]",
        *(f"{name} = {{ {content} }}" for name, content in _modules(opened, has, has_bias)),
    ]
    return "\n".join(lines)


def _head(has: set[str], has_bias: set[str]) -> list[str]:
    bias = ", bias = true" if "logits" in has_bias else ""
    return [f'logits = {{ kind = "head", tied = {str("logits" not in has).lower()}{bias} }}']


def _wiring(stack: str, has: set[str]) -> str:
    tables = {"embed": "tokens", "position": "positions", "token_type": "token_types"}
    stem = " + ".join(f"{name}({of})" for name, of in tables.items() if name in has)
    stem = f"embed_norm({stem})" if "embed_norm" in has else stem
    if "ffn_norm" not in has:  # one norm is shared by two branches
        layer = "n = attn_norm(x)\nx = x + attn(n) + ffn(n)"
    elif "norm" not in has:  # without a last norm, each layer ends with one
        layer = "x = attn_norm(x + attn(x))\nx = ffn_norm(x + ffn(x))"
    else:
        layer = "x = x + attn(attn_norm(x))\nx = x + ffn(ffn_norm(x))"
    head = "norm(x)" if "norm" in has else "x"
    head = f"logits({head})" if "logits" in has or stack == "decoder" else head
    return f'stem  = "{stem}"\nlayer = """\n{layer}\n"""\nhead  = "{head}"'


def _modules(opened: ModelFiles, has: set[str], has_bias: set[str]) -> Iterator[tuple[str, str]]:
    norms = [name for name in ("embed_norm", "attn_norm", "ffn_norm", "norm") if name in has]
    kind = "layer" if has_bias & set(norms) else "rms"
    for name in norms:
        yield name, f'kind = "{kind}", eps = "eps"'
    if "position" in has:
        yield "position", 'kind = "learned_positions"'
    if "token_type" in has:
        yield "token_type", 'kind = "embedding", size = "$type_vocab_size | 2"'
    fused = "attn.{q,k,v}" in has_bias
    letters = "".join(p for p in "qkvo" if f"attn.{p}" in has_bias or (fused and p != "o"))
    attention = f', bias = "{letters}"' if letters else ""
    if "position" not in has:
        dim = ', dim = "rotary_dim"' if _rotary_dim(opened.config) else ""
        attention += f', position = {{ kind = "rope", theta = "rope_theta"{dim} }}'
    yield "attn", f'kind = "attention"{attention}'
    keys = [key for key in _ACTIVATIONS if opened.config.get(key)]
    words = f', activation = "${keys[0]}"' if keys else ""
    words += ", bias = true" if "ffn.up" in has_bias else ""
    yield "ffn", f'kind = "{"gated" if {"ffn.gate", "ffn.{gate,up}"} & has else "mlp"}"{words}'


def _tensors(
    opened: ModelFiles,
    roles: Mapping[str, str],
    modules: Mapping[str, Tensor],
    tensors: list[Tensor],
) -> str:
    format = opened.checkpoint.format
    lines = [f"[tensors.{format}]" if format in ("gguf", "llama2c") else "[tensors]"]
    if ignored := sorted({_glob(tensor) for tensor in tensors if is_ignorable(tensor)}):
        lines.append(f"ignore = [{', '.join(ignored)}]")
    up = next((modules[m] for m, role in roles.items() if role.endswith("ffn.up")), None)
    embed = next((modules[m] for m, role in roles.items() if role == "embed"), None)
    turned = bool(up and embed and len(up.shape) == 2 and up.shape[0] == embed.shape[-1])
    turned = turned and up is not None and up.shape[0] != up.shape[1]
    for module, role in roles.items():
        if role:
            matrix = "{i}" in role and len(modules[module].shape) == 2
            lines.append(str(ProposedLine(role, module, turned and matrix)))
    return "\n".join(lines)


def _glob(tensor: Tensor) -> str:
    leaf = ".bias" if tensor.name.endswith(".bias") else ""
    name = module_of(tensor).replace("{i}", "*").replace("{e}", "*")
    return json.dumps(name + leaf)
