"""Block labels: short descriptions for the boxes of a drawing."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from jinfer.modelspec import (
    attention_blocks,
    attention_parts,
    blocks,
    feed_forward_blocks,
    position_blocks,
)
from jinfer.modelspec.block import Block

_MAX_LINE = 34
_NAMES = {
    "rms": "RMS norm",
    "layer": "layer norm",
    "moe": "mixture of experts",
    "mlp": "feed-forward",
    "gated": "gated feed-forward",
    "head": "vocabulary head",
}


def block_label(block: Block) -> list[str]:
    """A few short lines: the kind, the sizes, and fields that differ from the defaults."""
    name = _NAMES.get(block.kind, block.kind.replace("_", " "))
    sizes, said = _sizes(block)
    extras = [text for field in fields(block) if (text := _extra(block, field, said))]
    return [shortened(line) for line in (name, *sizes, *_packed(extras))]


def shortened(line: str, limit: int = _MAX_LINE) -> str:
    """A line cut to the width of a box."""
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _sizes(block: Any) -> tuple[list[str], set[str]]:
    """Lines with the block's sizes, and the names of the fields they show."""
    match block:
        case blocks.EmbeddingSpec() | position_blocks.LearnedPositionsSpec():
            return [f"{block.size} × {block.width}"], {"size", "width"}
        case position_blocks.SinusoidalPositionsSpec():
            return [f"of width {block.width}"], {"width"}
        case blocks.RMSNormSpec() | blocks.LayerNormSpec():
            return [f"{block.size}, eps {block.eps:g}"], {"size", "eps", "bias", "weight"}
        case blocks.LinearSpec():
            return [f"{block.inputs} → {block.outputs}"], {"inputs", "outputs"}
        case blocks.HeadSpec():
            tied = ["weight of embed"] if block.tied else []
            return [f"{block.inputs} → {block.outputs}", *tied], {"inputs", "outputs", "tied"}
        case attention_blocks.AttentionSpec():
            heads = f"{block.heads} heads of {block.head_dim}"
            shared = [f"{block.kv_heads} of keys and values"]
            lines = [heads, *(shared if block.kv_heads != block.heads else [])]
            return lines, {"inputs", "heads", "kv_heads", "head_dim"}
        case attention_blocks.CrossAttentionSpec():
            said = {"inputs", "heads", "head_dim", "encoded"}
            return [f"{block.heads} heads of {block.head_dim}"], said
        case attention_blocks.LatentAttentionSpec():
            lines = [f"{block.heads} heads, latent {block.latent_rank}"]
            lines.append(f"dims {block.nope_dim} + {block.rope_dim}, values {block.value_dim}")
            return lines, {"inputs", "heads", "latent_rank", "nope_dim", "rope_dim", "value_dim"}
        case feed_forward_blocks.MLPSpec() | feed_forward_blocks.GatedMLPSpec():
            said = {"inputs", "width", "activation"}
            return [f"{block.inputs} → {block.width} → {block.inputs}", block.activation], said
        case feed_forward_blocks.MoESpec():
            lines = [f"{block.top_k} of {block.experts} experts"]
            lines.append(f"{block.inputs} → {block.width} → {block.inputs}, {block.activation}")
            return lines, {"inputs", "width", "experts", "top_k", "activation", "scoring"}
        case feed_forward_blocks.ActivationSpec():
            return [block.function], {"function"}
        case blocks.PoolSpec():
            return [f"{block.take} token" if block.take != "mean" else "mean of tokens"], {"take"}
        case blocks.SelectSpec():
            return [", ".join(map(str, block.indices))], {"indices"}
        case blocks.ClassifierSpec():
            return [f"{block.inputs} → {block.outputs} classes"], {"inputs", "outputs"}
    return [], set()


def _extra(block: Any, field: Any, shown: set[str]) -> str:
    """A field that no line shows and that is not its default; "" otherwise."""
    value = getattr(block, field.name)
    default = None if field.default is MISSING else field.default
    if field.name in (*shown, "kind") or value is None or value == default or value is False:
        return ""
    if value is True:
        return field.name.replace("_", " ")
    return _words(field.name, value)


def _words(name: str, value: Any) -> str:
    """A field's value in a few words."""
    match value:
        case position_blocks.RopeSpec():
            turned = f"rope theta {_number(value.theta)}, {value.pairs}"
            return turned + (f", {value.scaling.rope_type}" if value.scaling else "")
        case position_blocks.AlibiSpec():
            return "alibi"
        case position_blocks.RelativeBiasSpec():
            return "relative positions"
        case position_blocks.DisentangledSpec():
            return "disentangled positions"
        case attention_parts.QKNormSpec():
            return f"{value.kind} norm of q, k per {value.over}"
        case float() | int():
            return f"{name.replace('_', ' ')} {_number(value)}"
        case str():
            return f"{name.replace('_', ' ')} {value}"
    return str(getattr(value, "kind", name)).replace("_", " ")


def _number(value: float) -> str:
    whole = float(value).is_integer() and abs(value) < 1e9
    return str(int(value)) if whole else f"{value:g}"


def _packed(words: list[str]) -> list[str]:
    """Words joined into as few lines as possible."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + 2 + len(word) <= 28:
            lines[-1] += f", {word}"
        else:
            lines.append(word)
    return lines
