"""Layer drafts: the branches of each kind of layer, its norms, and the formula that joins them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from jinfer.cli.propose.checkpoint_layers import CheckpointStack, LayerKind, Part
from jinfer.cli.propose.layer_branch import Branch, norm
from jinfer.cli.propose.propose_attention import attention
from jinfer.cli.propose.propose_feed_forward import experts, feed_forward, matrices_by_shape
from jinfer.cli.propose.propose_recurrences import channel_mixing
from jinfer.cli.propose.propose_state import state_block, unknown_state
from jinfer.cli.propose.spec_facts import DraftFacts
from jinfer.cli.propose.tensor_roles import role_in_layer

_SIDE = ("parallel_attn", "use_parallel_residual", "parallel_block", "parallel_attention")
_BEFORE = ("normalize_before", "do_layer_norm_before", "prenorm")
_SCALAR = re.compile(r"layer_?(output_)?scal(e|ar)")
_BARE = re.compile(r"(layer_?)?norm")
_SLOTS = ("attn_norm", "attn_post", "cross_norm", "cross_post", "ffn_norm", "ffn_post")


@dataclass
class DraftedLayer:
    """A kind of layer as drafted.

    Attributes:
        word: what it is made of, for a variant's name.
        formula: its lines.
        modules, tensors: as of a `Branch`.
        unplaced: modules of the file that it has no place for.
    """

    word: str
    formula: str = ""
    modules: dict[str, dict[str, Any]] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    unplaced: list[Part] = field(default_factory=list)


def draft_layer(
    kind: LayerKind, stack: str, facts: DraftFacts, final_norm: bool, transposed: bool
) -> DraftedLayer:
    """Drafts a kind of layer.

    Args:
        final_norm: the stack ends with a norm; without one, layers do.
        transposed: matrices are stored [inputs, outputs].
    """
    parts = dict(kind.parts)
    mixing = channel_mixing(parts, facts)
    rest = {n: p for n, p in parts.items() if not (mixing and n in mixing.used)}
    state = state_block(rest, facts)
    rest = {n: p for n, p in rest.items() if not (state and n in state.used)}
    unknown = unknown_state(rest)
    _note_unknown(unknown, rest, facts)
    rest = {n: p for n, p in rest.items() if n not in unknown}
    roles: dict[str, Part] = {}
    for inner, part in rest.items():
        if role := role_in_layer(inner, rest) or _beside(inner, rest):
            _set_role(roles, role, part)
    roles |= matrices_by_shape(roles, rest, facts, transposed)
    mixers = [b for b in (state, attention(roles, facts, "attn", transposed, stack)) if b]
    cross = attention(roles, facts, "cross", transposed) if facts.encoded else None
    feeds = [b for b in (mixing, experts(roles, facts)) if b]
    if not any(b.word == "sparse" for b in feeds):
        shared = feed_forward(roles, facts, transposed, "shared_expert")
        feeds += [b for b in (feed_forward(roles, facts, transposed), shared) if b]
    elif dense := feed_forward(roles, facts, transposed):
        dense.used.clear()
    norms = _norms(roles, final_norm, bool(mixers))
    weightless = not norms and not final_norm and (mixers or feeds)
    drafted = DraftedLayer("_".join(dict.fromkeys(b.word for b in [*mixers, *feeds] if b.word)))
    used = set[str]()
    for branch in [*mixers, *feeds, *([cross] if cross else [])]:
        drafted.modules |= branch.modules
        drafted.tensors |= branch.tensors
        used |= branch.used
    places = {"attn_norm", "ffn_norm"} if weightless else set(norms)
    drafted.formula = _formula(mixers, cross, feeds, places, facts, final_norm or bool(weightless))
    if weightless:
        layered = bool(facts.key("layer_norm_eps", "layer_norm_epsilon"))
        own = {"kind": "layer" if layered else "rms", "weight": False, "eps": "eps"} | (
            {"bias": False} if layered else {}
        )
        drafted.modules |= {name: own for name in places if f"{name}(" in drafted.formula}
        facts.weightless = own
        facts.note("there are no norms with a weight: norms without one stand before each branch")
    for slot in _SLOTS:
        if slot in norms and f"{slot}(" in drafted.formula:
            drafted.modules[slot] = norm(norms[slot], layered=facts.layered)
            drafted.tensors[slot] = norms[slot].name
            used.add(norms[slot].inner)
    for inner, part in rest.items():
        if _SCALAR.fullmatch(inner) and part.shape in ((), (1,)) and not part.leaves.get("weight"):
            drafted.modules["layer_scale"] = {"kind": "scale", "size": 1}
            drafted.tensors["layer_scale.weight"] = part.name
            drafted.formula += "\nx = layer_scale(x)"
            used.add(inner)
    drafted.unplaced = [part for inner, part in parts.items() if inner not in used]
    return drafted


def _set_role(roles: dict[str, Part], role: str, part: Part) -> None:
    """Gives a role to the first of its parts; a bare norm beside attention's own is the next."""
    held = roles.setdefault(role, part)
    if role != "attn_norm" or held is part:
        return
    bare = next((each for each in (held, part) if "." not in each.inner), None)
    if bare is not None and _BARE.fullmatch(bare.inner.lower()):
        roles["attn_norm"] = part if bare is held else held
        roles.setdefault("ffn_norm", bare)


def _note_unknown(inside: Iterable[str], parts: Mapping[str, Part], facts: DraftFacts) -> None:
    """A line for each block with a state of a kind that is not known."""
    blocks: dict[str, list[str]] = {}
    for part in (parts[inner] for inner in sorted(inside)):
        block, _, last = part.name.rpartition(".")
        blocks.setdefault(block, []).append(last)
    for block, own in blocks.items():
        facts.note(f"{block} keeps a state, and is no block that is known: {', '.join(own)}")


def _beside(inner: str, names: Iterable[str]) -> str:
    """The role of a norm that stands beside an attention or a feed-forward, as T5's."""
    place, _, last = inner.rpartition(".")
    if not place or "norm" not in last.lower():
        return ""
    roles = {role_in_layer(n, [*names]) for n in names if n.startswith(f"{place}.") and n != inner}
    areas = {role.partition(".")[0] for role in roles}
    found = next((area for area in ("cross", "attn", "ffn") if area in areas), "")
    return f"{found}_norm" if found else ""


def _norms(roles: Mapping[str, Part], final_norm: bool, mixed: bool) -> dict[str, Part]:
    """Norms of a layer by the place where they stand."""
    found = {slot: roles[slot] for slot in _SLOTS if slot in roles}
    if after := roles.get("after_attn"):
        before = "attn_norm" in found and ("ffn_norm" not in found or "attn_post" in found)
        slot = "ffn_norm" if before and "ffn_norm" not in found else "attn_post"
        found.setdefault(slot, after)
    if not mixed and "attn_norm" in found and "ffn_norm" not in found:
        found["ffn_norm"] = found.pop("attn_norm")
    return found


def _formula(
    mixers: Sequence[Branch],
    cross: Branch | None,
    feeds: Sequence[Branch],
    norms: set[str],
    facts: DraftFacts,
    final_norm: bool,
) -> str:
    scale = ""
    if key := facts.key("residual_multiplier", "residual_scale"):
        scale = f"${key}"
        facts.dims.setdefault("residual_scale", f"${key} | 1")
        scale = "residual_scale * "
    elif facts.key("scale_depth"):
        facts.dims.setdefault("scale_depth", "$scale_depth")
        scale = "scale_depth / sqrt(layers) * "
    side = any(facts.get(key) is True for key in _SIDE) or facts.get("parallel_residual") is True
    told = facts.get(*_BEFORE)
    after = not final_norm if told is None else told is False
    both = "attn_norm" in norms and not norms & {"ffn_norm", "ffn_post", "attn_post"}
    if (
        mixers
        and feeds
        and not cross
        and (both or (side and not norms & {"attn_post", "ffn_post"}))
    ):
        lines = ["n = attn_norm(x)"]
        text = _values(mixers, "n", lines)
        other = "n"
        if "ffn_norm" in norms:
            lines.append("m = ffn_norm(x)")
            other = "m"
        text += " + " + _values(feeds, other, lines)
        lines.append(f"x = x + {scale}({text})" if scale else f"x = x + {text}")
        if not both:
            facts.note("attention and feed-forward stand side by side, as a key says")
        return "\n".join(lines)
    lines = []
    _sum(lines, mixers, "attn_norm", "attn_post", norms, scale, after, final_norm)
    _sum(
        lines, [cross] if cross else [], "cross_norm", "cross_post", norms, scale, after, final_norm
    )
    _sum(lines, feeds, "ffn_norm", "ffn_post", norms, scale, after, final_norm)
    if not lines:
        facts.note("what a layer computes: nothing is known by its tensors' names")
    return "\n".join(lines or ["x = x"])


def _sum(
    lines: list[str],
    branches: Sequence[Branch],
    before: str,
    behind: str,
    norms: set[str],
    scale: str,
    after: bool,
    final_norm: bool,
) -> None:
    """Adds the lines of one residual sum: a norm before it, behind its branches, or after it."""
    if not branches:
        return
    pre, post = before in norms, behind in norms
    if after and pre != post:  # the original transformer's: a norm of the sum
        name = before if pre else behind
        text = _values(branches, "x", lines)
        lines.append(f"x = {name}(x + {scale}{text})")
        return
    source = "x"
    if pre:
        once = len(branches) == 1 and not branches[0].lines and branches[0].value.count("{n}") == 1
        source = f"{before}(x)" if once else "n"
        if not once:
            lines.append(f"n = {before}(x)")
    text = _values(branches, source, lines)
    text = f"{behind}({text})" if post else f"({text})" if scale and " + " in text else text
    lines.append(f"x = x + {scale}{text}")


def _values(branches: Iterable[Branch], source: str, lines: list[str]) -> str:
    """The sum of branches of a vector; what they need before is added to the lines."""
    values = []
    for branch in branches:
        lines += [line.replace("{n}", source) for line in branch.lines]
        values.append(branch.value.replace("{n}", source))
    return " + ".join(values)


def pattern_of(stack: CheckpointStack, words: Sequence[str], facts: DraftFacts) -> Any:
    """Which layer is which kind: an expression of a key, of the layer's number, or a list."""
    kinds = stack.kind_of
    for key, values in _lists(facts):
        of: dict[Any, set[int]] = {}
        for i, kind in enumerate(kinds):
            of.setdefault(values[i % len(values)], set()).add(kind)
        if len(of) > 1 and all(len(found) == 1 for found in of.values()):
            at = "i" if len(values) >= len(kinds) else f"i % {len(values)}"
            return _chain(key, {value: words[found.pop()] for value, found in of.items()}, at)
    if text := _of_two_keys(kinds, words, facts):
        return text
    if len(stack.kinds) == 2 and kinds == sorted(kinds):
        first = kinds.index(1)
        key = next((k for k in _FIRST if facts.get(k) == first), "")
        return f"{words[0]} if i < {f'${key}' if key else first} else {words[1]}"
    period = next(
        n
        for n in range(1, len(kinds) + 1)
        if all(kinds[i] == kinds[i % n] for i in range(len(kinds)))
    )
    return [words[kind] for kind in kinds[:period]]


def _of_two_keys(kinds: Sequence[int], words: Sequence[str], facts: DraftFacts) -> str:
    """Kinds that two keys with a word for each layer tell apart together; "" if none do."""
    lists = [
        (key, values)
        for key, values in _lists(facts)
        if len(values) == len(kinds) and all(isinstance(each, str) for each in values)
    ]
    for (one, mixers), (other, feeds) in combinations(lists, 2):
        of: dict[tuple[str, str], set[int]] = {}
        for kind, pair in zip(kinds, zip(mixers, feeds, strict=True), strict=True):
            of.setdefault(pair, set()).add(kind)
        if any(len(found) > 1 for found in of.values()):
            continue
        *first, (_, last) = ((pair, words[found.pop()]) for pair, found in of.items())
        text = last
        for (mixer, feed), word in reversed(first):
            text = f"{word} if ${one}[i] == '{mixer}' and ${other}[i] == '{feed}' else {text}"
        return text
    return ""


_FIRST = (
    "first_k_dense_replace",
    "num_dense_layers",
    "moe_layer_start_index",
    "leading_dense_block_count",
    "n_dense_first",
    "dense_layers",
    "first_dense_layers",
    "num_initial_dense_layers",
)


def _lists(facts: DraftFacts) -> list[tuple[str, Any]]:
    """Keys with a value for each layer, which are words or few numbers."""
    config = facts.opened.config
    text = config.get("text_config")
    both = {**config, **text} if isinstance(text, Mapping) else config
    found = []
    for key, value in both.items():
        words = r"type|pattern|layers|blocks" if isinstance(value, list) else r"pattern"
        if not isinstance(value, (list, str)) or not re.search(words, key) or not value:
            continue
        if all(isinstance(each, (str, int)) for each in value):
            found.append((key, value))
    return sorted(found, key=lambda pair: not pair[0].startswith("layer"))


def _chain(key: str, words: Mapping[Any, str], at: str) -> str:
    *first, (_, last) = words.items()
    text = last
    for value, word in reversed(first):
        if word != text:
            shown = (
                f"'{value}'"
                if isinstance(value, str)
                else json.dumps(value).capitalize()
                if isinstance(value, bool)
                else value
            )
            text = f"{word} if ${key}[{at}] == {shown} else {text}"
    return text
