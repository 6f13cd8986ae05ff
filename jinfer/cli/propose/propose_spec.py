"""Proposed spec: a first specification for a checkpoint that no family matches.

It follows from names and shapes of tensors and from config.json alone, not from other families.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinfer.cli.propose.checkpoint_layers import CheckpointLayers, CheckpointStack, Part, layers_of
from jinfer.cli.propose.proposal import KEYS, SpecFacts, read_keys
from jinfer.cli.propose.propose_layers import ProposedLayer, pattern_of, propose_layer
from jinfer.cli.propose.propose_outside import ProposedOutside, propose_outside
from jinfer.cli.toml_writer import inline_text
from jinfer.loader.model_files import ModelFiles

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
    names = ["_".join(w for w in each if w not in common) or "plain" for each in words]
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
