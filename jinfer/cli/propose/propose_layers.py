"""Layers of a proposed spec: the branches of each kind of layer, their norms, and the formula."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinfer.cli.propose.checkpoint_layers import Part
from jinfer.cli.propose.proposal import Branch, SpecFacts, norm
from jinfer.cli.propose.propose_attention import attention
from jinfer.cli.propose.propose_feed_forward import experts, feed_forward
from jinfer.cli.propose.propose_state import channel_mixing, state_block
from jinfer.cli.propose.tensor_roles import role_in_layer

_PARALLEL = (
    *("parallel_attn", "use_parallel_residual", "parallel_block", "parallel_residual"),
    "parallel_attention",
)
_BEFORE = ("normalize_before", "do_layer_norm_before", "prenorm")
_SLOTS = ("attn_norm", "attn_post", "cross_norm", "cross_post", "ffn_norm", "ffn_post")
_FIRST = (
    *("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "leading_dense_block_count",
)


@dataclass
class ProposedLayer(Branch):
    """A kind of layer; `value` is its formula.

    Attributes:
        unplaced: modules of the file without a place.
    """

    unplaced: list[Part] = field(default_factory=list)


def propose_layer(
    parts: Mapping[str, Part], stack: str, facts: SpecFacts, final_norm: bool, transposed: bool
) -> ProposedLayer:
    """Propose a kind of layer.

    Args:
        parts: its modules.
        final_norm: the stack ends with a norm; without one, layers do.
        transposed: matrices are stored [inputs, outputs].
    """
    mixing = channel_mixing(parts, facts)
    rest = {n: p for n, p in parts.items() if not (mixing and n.startswith("feed_forward."))}
    state = state_block(rest, facts)
    rest = {n: p for n, p in rest.items() if not (state and p.name in state.used)}
    roles: dict[str, Part] = {}
    for inner, part in rest.items():
        if role := role_in_layer(inner, rest) or _norm_of_block(inner, rest):
            roles.setdefault(role, part)
    mixers = [b for b in (state, attention(roles, facts, "attn", transposed, stack)) if b]
    cross = attention(roles, facts, "cross", transposed) if facts.encoded else None
    sparse = experts(roles, facts)
    feeds = [mixing, sparse] if sparse or mixing else []
    if not sparse:
        feeds += [feed_forward(roles, facts, transposed, n) for n in ("ffn", "shared_expert")]
    branches = [*mixers, *(feed for feed in feeds if feed)]
    norms = _norms(roles, bool(mixers))
    weightless = bool(branches) and not norms and not final_norm
    layer = ProposedLayer("_".join(dict.fromkeys(b.word for b in branches if b.word)))
    for branch in [*branches, *([cross] if cross else [])]:
        layer.modules |= branch.modules
        layer.tensors |= branch.tensors
        layer.used |= branch.used
    places = {"attn_norm", "ffn_norm"} if weightless else set(norms)
    layer.value = _formula(
        mixers, cross, branches[len(mixers) :], places, facts, final_norm or weightless
    )
    if weightless:
        facts.weightless = {"kind": "rms", "weight": False, "eps": "eps"}
        layer.modules |= {n: facts.weightless for n in places if f"{n}(" in layer.value}
        facts.note("there are no norms with a weight: norms without one come before each branch")
    for slot in _SLOTS:
        if slot in norms and f"{slot}(" in layer.value:
            layer.modules[slot] = norm(norms[slot])
            layer.take(slot, norms[slot])
    layer.unplaced = [part for part in parts.values() if part.name not in layer.used]
    return layer


def _norm_of_block(inner: str, names: Iterable[str]) -> str:
    """The role of a norm in the same module as an attention or a feed-forward, as T5's."""
    place, _, last = inner.rpartition(".")
    if not place or "norm" not in last.lower():
        return ""
    others = [n for n in names if n.startswith(f"{place}.") and n != inner]
    areas = {role_in_layer(name, [*names]).partition(".")[0] for name in others}
    found = next((area for area in ("cross", "attn", "ffn") if area in areas), "")
    return f"{found}_norm" if found else ""


def _norms(roles: Mapping[str, Part], mixed: bool) -> dict[str, Part]:
    """Norms of a layer by their slot."""
    found = {slot: roles[slot] for slot in _SLOTS if slot in roles}
    if after := roles.get("after_attn"):
        second = "attn_norm" in found and "ffn_norm" not in found
        found.setdefault("ffn_norm" if second else "attn_post", after)
    if not mixed and "attn_norm" in found and "ffn_norm" not in found:
        found["ffn_norm"] = found.pop("attn_norm")
    return found


def _formula(
    mixers: Sequence[Branch],
    cross: Branch | None,
    feeds: Sequence[Branch],
    norms: set[str],
    facts: SpecFacts,
    final_norm: bool,
) -> str:
    scale = ""
    if key := facts.key("residual_multiplier", "residual_scale"):
        facts.dims.setdefault("residual_scale", f"${key} | 1")
        scale = "residual_scale * "
    elif facts.key("scale_depth"):
        facts.dims.setdefault("scale_depth", "$scale_depth")
        scale = "scale_depth / sqrt(layers) * "
    one_norm = "attn_norm" in norms and not norms & {"ffn_norm", "ffn_post", "attn_post"}
    parallel = any(facts.get(key) is True for key in _PARALLEL)
    parallel = parallel and not norms & {"attn_post", "ffn_post"}
    lines: list[str] = []
    if mixers and feeds and not cross and (one_norm or parallel):
        lines.append("n = attn_norm(x)")
        text, other = _values(mixers, "n", lines), "n"
        if "ffn_norm" in norms:
            lines.append("m = ffn_norm(x)")
            other = "m"
        text += " + " + _values(feeds, other, lines)
        return "\n".join([*lines, f"x = x + {scale}({text})" if scale else f"x = x + {text}"])
    before = facts.get(*_BEFORE)
    after = not final_norm if before is None else before is False
    for branches, area in ((mixers, "attn"), ([cross] if cross else [], "cross"), (feeds, "ffn")):
        if branches:
            pre, post = f"{area}_norm" in norms, f"{area}_post" in norms
            lines += _sum(branches, area, pre, post, scale, after)
    if not lines:
        facts.note("what a layer computes: nothing is known by its tensors' names")
    return "\n".join(lines or ["x = x"])


def _sum(
    branches: Sequence[Branch], area: str, pre: bool, post: bool, scale: str, after: bool
) -> list[str]:
    """The lines of a residual sum with a norm before its branches, behind them, or of the sum."""
    lines: list[str] = []
    if after and pre != post:  # the original transformer's: a norm of the sum
        text = _values(branches, "x", lines)
        return [*lines, f"x = {area}_{'norm' if pre else 'post'}(x + {scale}{text})"]
    source = "x"
    if pre:
        once = len(branches) == 1 and not branches[0].lines and branches[0].value.count("{n}") == 1
        source = f"{area}_norm(x)" if once else "n"
        if not once:
            lines.append(f"n = {area}_norm(x)")
    text = _values(branches, source, lines)
    text = f"{area}_post({text})" if post else f"({text})" if scale and " + " in text else text
    return [*lines, f"x = x + {scale}{text}"]


def _values(branches: Iterable[Branch], source: str, lines: list[str]) -> str:
    """The sum of branches of a vector; adds the lines that it needs."""
    values = []
    for branch in branches:
        lines += [line.replace("{n}", source) for line in branch.lines]
        values.append(branch.value.replace("{n}", source))
    return " + ".join(values)


def pattern_of(kinds: Sequence[int], words: Sequence[str], facts: SpecFacts) -> Any:
    """Return the variant of each layer: an expression of a key or the layer's number, or a list.

    Args:
        kinds: of each layer, the place of its variant in `words`.
    """
    for key, values in _per_layer_keys(facts):
        of: dict[Any, set[int]] = {}
        for i, kind in enumerate(kinds):
            of.setdefault(values[i % len(values)], set()).add(kind)
        if len(of) > 1 and all(len(found) == 1 for found in of.values()):
            at = "i" if len(values) >= len(kinds) else f"i % {len(values)}"
            return _chain(key, {value: words[found.pop()] for value, found in of.items()}, at)
    if len(words) == 2 and list(kinds) == sorted(kinds):
        first = kinds.index(1)
        key = next((f"${key}" for key in _FIRST if facts.get(key) == first), str(first))
        return f"{words[0]} if i < {key} else {words[1]}"
    repeats = (
        n for n in range(1, len(kinds)) if all(k == kinds[i % n] for i, k in enumerate(kinds))
    )
    return [words[kind] for kind in kinds[: next(repeats, len(kinds))]]


def _per_layer_keys(facts: SpecFacts) -> list[tuple[str, Any]]:
    """Keys with a word or a number for each layer, or for each of a period."""
    config = facts.opened.config
    text = config.get("text_config")
    found = []
    for key, value in {**config, **(text if isinstance(text, Mapping) else {})}.items():
        words = r"type|pattern|layers|blocks" if isinstance(value, list) else r"pattern"
        if not isinstance(value, (list, str)) or not value or not re.search(words, key):
            continue
        if all(isinstance(each, (str, int)) for each in value):
            found.append((key, value))
    return sorted(found, key=lambda pair: not pair[0].startswith("layer"))


def _chain(key: str, words: Mapping[Any, str], at: str) -> str:
    *first, (_, text) = words.items()
    last = text
    for value, word in reversed(first):
        if word != last:
            shown = f"'{value}'" if isinstance(value, str) else json.dumps(value).capitalize()
            text = f"{word} if ${key}[{at}] == {shown} else {text}"
    return text
