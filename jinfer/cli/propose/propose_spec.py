"""Proposed spec: a first specification for a checkpoint that no family matches.

It follows from names and shapes of tensors and from config.json alone, not from other families.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinfer.cli.propose.checkpoint_layers import CheckpointLayers, CheckpointStack, Part, layers_of
from jinfer.cli.propose.proposal import KEYS, Branch, SpecFacts, norm, read_keys
from jinfer.cli.propose.propose_attention import attention
from jinfer.cli.propose.propose_outside import ProposedOutside, propose_outside
from jinfer.cli.propose.propose_state import channel_mixing, experts, feed_forward, state_block
from jinfer.cli.propose.tensor_roles import role_in_layer
from jinfer.cli.toml_writer import inline_text
from jinfer.loader.model_files import ModelFiles

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
        if all(isinstance(item, (str, int)) for item in value):
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


# Keys without a meaning for the computation, or whose meaning tensors have as well.
IRRELEVANT = re.compile(
    r"_.*|architectures|auto_map|model_type|tokenizer_class|transformers_version|(torch_)?dtype"
    r"|tie_word_embeddings|use_cache|gradient_checkpointing|pretraining_tp|task_specific_params"
    r"|.*_token_id|.*_ids?|.*drop(out)?(_.*)?|.*initializer_.*|initializer|summary_.*|id2label"
    r"|label2id|output_.*|return_.*|quantization_config"
)
_TO_CHECK = """\
# Proposed from names and shapes. Check against the model's own code: the order of the norms, the
# activation, rotary pairs (halves or adjacent), scales, windows."""
# Sizes that are left out if no formula uses them.
_OPTIONAL = ("eps", "rope_theta", "rotary_dim", "embedding_scale", "residual_scale", "conv_states")


def propose_spec(opened: ModelFiles, weights: str = "") -> str:
    """Return the text of a specification, with the guesses in comments.

    Args:
        weights: path of the checkpoint relative to the file; "" leaves it out.
    """
    facts = SpecFacts(opened)
    causal = facts.get("attention.causal" if facts.gguf else "is_decoder")
    only = "encoder" if facts.gguf and causal is False else "decoder" if causal is True else ""
    facts.read.add("is_decoder")
    layers = layers_of(opened.checkpoint.tensors.values(), only)
    facts.encoded = len(layers.stacks) > 1
    outside = propose_outside(layers, facts)
    kinds = {stack.name: _kinds(stack, facts, outside) for stack in layers.stacks}
    parts = [_table("[modules]", outside.modules)]
    for stack in layers.stacks:
        parts += _stack(stack, kinds[stack.name], facts, outside)
    parts.append(_tensors(facts, layers, outside, kinds))
    at = f"weights = {json.dumps(weights, ensure_ascii=False)}" if weights else ""
    parts = [_TO_CHECK, at, _match(opened), _dims(facts, "\n".join(parts)), *parts]
    parts.append(_unplaced(layers, outside, kinds))
    if facts.notes:
        notes = (json.dumps(note, ensure_ascii=False)[1:-1] for note in facts.notes)
        lines = [f"#   {note}".replace('\\"', '"') for note in notes]
        parts.append("\n".join(["# Guesses, which neither names nor keys tell:", *lines]))
    if not facts.gguf:
        parts.append(_unread(opened.config, "\n".join(parts), facts))
    return "\n\n".join(part for part in parts if part) + "\n"


def _match(opened: ModelFiles) -> str:
    key = "gguf" if opened.checkpoint.format == "gguf" else "architectures"
    names = ", ".join(json.dumps(name) for name in opened.architectures)
    return f"[match]\n{key} = [{names}]" if names else ""


def _unread(config: Mapping[str, Any], text: str, facts: SpecFacts) -> str:
    """The keys of config.json that may matter and that the text does not refer to."""
    read = read_keys(text) | facts.read
    inner = config.get("text_config")
    unread = {
        key: value
        for key, value in {**config, **(inner if isinstance(inner, Mapping) else {})}.items()
        if key not in read and value is not None and not IRRELEVANT.fullmatch(key)
        if not isinstance(value, Mapping) or (key == "rope_scaling" and value)
    }
    if not unread:
        return ""
    lines = [f"#   {json.dumps(key)[1:-1]} = {json.dumps(v)[:60]}" for key, v in unread.items()]
    return "\n".join(["# config.json also has these keys, which nothing here reads:", *lines])


def _dims(facts: SpecFacts, text: str) -> str:
    """The sizes that the text uses; of a GGUF file those that specs/formats/gguf.toml lacks."""
    dims = {
        name: value
        for name, value in facts.dims.items()
        if name not in _OPTIONAL or re.search(rf"\b{name}\b", text)
    }
    order = [name for name in (*KEYS, "rope_theta", "rotary_dim") if name in dims]
    if not facts.gguf:
        return _table("[dims]", {name: dims[name] for name in order} | dims, wide=12)
    standard = {
        name
        for name in order
        if str(dims[name]).startswith("$")
        or name in ("context", "eps", "rope_theta")
        or dims[name] in ("heads", "hidden / heads")
    }
    return _table("[gguf.dims]", {n: v for n, v in dims.items() if n not in standard}, wide=12)


def _table(head: str, values: Mapping[str, Any], wide: int = 0) -> str:
    if not values:
        return ""
    width = wide or min(max(map(len, values)), 20)
    return "\n".join([head, *(f"{k:<{width}} = {inline_text(v)}" for k, v in values.items())])


def _kinds(
    stack: CheckpointStack, facts: SpecFacts, outside: ProposedOutside
) -> dict[str, ProposedLayer]:
    """Variant name -> kind of layer of a stack."""
    own, hidden = outside.of_stack.setdefault(stack.name, {}), facts.known["hidden"]
    parts = [part for kind in stack.kinds for part in kind.values() if len(part.shape) == 2]
    rows = sum(part.shape[0] == hidden != part.shape[1] for part in parts)
    columns = sum(part.shape[1] == hidden != part.shape[0] for part in parts)
    conv1d = any(part.last == "c_attn" for part in parts)  # GPT-2's matrices: [inputs, outputs]
    transposed = rows > columns if conv1d else rows > columns == 0
    kinds = [propose_layer(k, stack.name, facts, "norm" in own, transposed) for k in stack.kinds]
    if facts.weightless:
        own["norm"] = facts.weightless
    words = [kind.word.split("_") for kind in kinds]
    common = set(words[0]).intersection(*words) if words else set()
    names = ["_".join(w for w in word if w not in common) or "plain" for word in words]
    return {
        name if names.count(name) == 1 else f"{name}_{names[:n].count(name) + 1}": kind
        for n, (name, kind) in enumerate(zip(names, kinds, strict=True))
    }


def _stack(
    stack: CheckpointStack,
    kinds: Mapping[str, ProposedLayer],
    facts: SpecFacts,
    outside: ProposedOutside,
) -> list[str]:
    """A stack's own table, its modules and its variants."""
    name, lines = stack.name, [f"[{stack.name}]"]
    if facts.encoded:
        keys = (f"{name}_layers", "num_decoder_layers" if name == "decoder" else "num_layers")
        lines.append(
            f"layers = {inline_text(facts.size(len(stack.kind_of), *keys, 'num_hidden_layers'))}"
        )
    lines.append(f"stem  = {_text(outside.stem(name))}")
    if len(kinds) > 1:
        lines.append(f"pattern = {inline_text(pattern_of(stack.kind_of, [*kinds], facts))}")
    formulas = {kind.value for kind in kinds.values()}
    if len(formulas) == 1:
        lines.append(f"layer = {_text(min(formulas), block=True)}")
    lines.append(f"head  = {_text(outside.head(name))}")
    shared = {
        module: table
        for kind in kinds.values()
        for module, table in kind.modules.items()
        if all(other.modules.get(module, table) == table for other in kinds.values())
    }
    tables = ["\n".join(lines), _table(f"[{name}.modules]", shared | outside.of_stack[name])]
    for variant, kind in kinds.items() if len(kinds) > 1 else ():
        formula = "" if len(formulas) == 1 else f"\nlayer = {_text(kind.value, block=True)}"
        own = {module: table for module, table in kind.modules.items() if module not in shared}
        tables.append(f"[{name}.variants.{variant}]{formula}")
        tables.append(_table(f"[{name}.variants.{variant}.modules]", own))
    return tables


def _text(text: str, block: bool = False) -> str:
    return f'"""\n{text}\n"""' if block or "\n" in text else json.dumps(text)


def _tensors(
    facts: SpecFacts,
    layers: CheckpointLayers,
    outside: ProposedOutside,
    kinds: Mapping[str, Mapping[str, ProposedLayer]],
) -> str:
    format = facts.opened.checkpoint.format
    lines = [f"[tensors.{format}]" if format in ("gguf", "llama2c") else "[tensors]"]
    ignored = {_glob(part) for part in layers.ignored.values()} | set(outside.ignored)
    if ignored:
        lines.append(f"ignore = [{', '.join(sorted(ignored))}]")
    if outside.copies:
        lines.append(f"copies = {inline_text({'embed.weight': outside.copies})}")
    found: dict[str, Any] = dict(outside.tensors)
    for stack, of_stack in kinds.items():
        for kind in of_stack.values():
            for name, place in kind.tensors.items():
                found.setdefault(f"{stack}.{{i}}.{name}", place)
    lines += [f"{json.dumps(name)} = {inline_text(place)}" for name, place in found.items()]
    return "\n".join(lines)


def _glob(part: Part) -> str:
    leaf = next((f".{leaf}" for leaf in part.leaves if leaf), "")
    return json.dumps(part.name.replace("{i}", "*").replace("{e}", "*") + leaf)


def _unplaced(
    layers: CheckpointLayers,
    outside: ProposedOutside,
    kinds: Mapping[str, Mapping[str, ProposedLayer]],
) -> str:
    """A line for each module of the file without a place."""
    parts: Sequence[Part] = [*outside.unplaced, *layers.elsewhere.values()]
    parts = [*parts, *(p for s in kinds.values() for kind in s.values() for p in kind.unplaced)]
    found = {part.name: " x ".join(map(str, part.shape)) or "one number" for part in parts}
    return "\n".join(f"# no name found for {json.dumps(n)}, {size}" for n, size in found.items())
