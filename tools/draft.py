"""A first draft of a specification for a checkpoint that no family matches."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from jinfer.checkpoint import Tensor
from jinfer.recognize import Located
from tools.roles import Line, is_ignorable, module_of, role_of

# jinfer's word -> the words that config files have for it, and what holds without any.
_DIMS = {
    "vocab": (("vocab_size",), ""),
    "hidden": (("hidden_size", "n_embd", "d_model", "dim"), ""),
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
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "activation")
_TO_CHECK = """\
# A draft: what names and shapes tell. Check against the model's own code:
# the order of the norms, the activation, rotary pairs (halves or adjacent), scales, windows."""


def draft(opened: Located) -> str:
    """The text of a specification: complete for a plain decoder or encoder, else its names."""
    tensors = list(opened.checkpoint.tensors.values())
    modules = {module_of(tensor): tensor for tensor in tensors if not is_ignorable(tensor)}
    roles: dict[str, str] = {}
    for module, tensor in modules.items():
        role = role_of(tensor, modules)
        roles[module] = "" if role in roles.values() else role
    found = {role: modules[module] for module, role in roles.items() if role}
    stacks = sorted({role.partition(".")[0] for role in found} & {"encoder", "decoder"})
    unnamed = [module for module, role in roles.items() if not role]
    parts = [_TO_CHECK, _match(opened)]
    if opened.checkpoint.format != "gguf":  # whose sizes specs/formats/gguf.toml supplies
        parts.append(_dims(opened.config, found))
    if len(stacks) == 1:
        biases = [t for t in tensors if t.name.endswith((".bias", ".beta")) and not is_ignorable(t)]
        biased = {roles[module_of(tensor)] for tensor in biases}
        parts.append(_stack(stacks[0], opened, set(found), biased))
    parts.append(_tensors(opened, roles, modules, tensors))
    if unnamed:
        parts.append("\n".join(f"# no name found for {json.dumps(module)}" for module in unnamed))
    return "\n\n".join(part for part in parts if part) + "\n"


def _match(opened: Located) -> str:
    key = "gguf" if opened.checkpoint.format == "gguf" else "architectures"
    names = ", ".join(json.dumps(name) for name in opened.architectures)
    return f"[match]\n{key} = [{names}]" if names else ""


def _dims(config: Mapping[str, Any], found: Mapping[str, Tensor]) -> str:
    lines = ["[dims]"]
    rotary = not any(role.endswith(".position") for role in found)
    for name, (keys, default) in _DIMS.items():
        if name == "rope_theta" and not rotary:
            continue
        present = [key for key in keys if config.get(key) is not None]
        if present:
            value = f'"${present[0]} | {default}"' if default else f'"${present[0]}"'
        elif default:
            value = default if default.replace("e-", "").isdigit() else f'"{default}"'
        else:
            value = str(_by_shape(name, found) or '"?"')
        lines.append(f"{name:<12} = {value}")
    return "\n".join(lines)


def _by_shape(name: str, found: Mapping[str, Tensor]) -> int | None:
    embed = found.get("embed")
    if embed is None:
        return None
    up = next((t for role, t in found.items() if role.endswith("ffn.up")), None)
    sizes = {"vocab": embed.shape[0], "hidden": embed.shape[-1]}
    if up is not None and len(up.shape) == 2:
        sizes["intermediate"] = max(up.shape, key=lambda size: size != embed.shape[-1])
    return sizes.get(name)


def _stack(stack: str, opened: Located, found: set[str], biased: set[str]) -> str:
    """The tables of the only stack there is; `biased` are the modules with a bias."""
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


def _modules(opened: Located, has: set[str], has_bias: set[str]) -> Iterator[tuple[str, str]]:
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
        attention += ', position = { kind = "rope", theta = "rope_theta" }'
    yield "attn", f'kind = "attention"{attention}'
    keys = [key for key in _ACTIVATIONS if opened.config.get(key)]
    words = f', activation = "${keys[0]}"' if keys else ""
    words += ", bias = true" if "ffn.up" in has_bias else ""
    yield "ffn", f'kind = "{"gated" if {"ffn.gate", "ffn.{gate,up}"} & has else "mlp"}"{words}'


def _tensors(
    opened: Located,
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
            lines.append(str(Line(role, module, turned and matrix)))
    return "\n".join(lines)


def _glob(tensor: Tensor) -> str:
    leaf = ".bias" if tensor.name.endswith(".bias") else ""
    name = module_of(tensor).replace("{i}", "*").replace("{e}", "*")
    return json.dumps(name + leaf)
