"""Spec template: a first version of a specification for a checkpoint that no family matches."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from jinfer.loader.model_files import ModelFiles

from .checkpoint_layers import CheckpointLayers, CheckpointStack, Part, layers_of, repeated
from .draft_facts import KEYS, DraftFacts, read_keys
from .draft_layers import DraftedLayer, draft_layer, pattern_of
from .draft_outside import DraftedOutside, draft_outside
from .toml_writer import inline_text

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
_NEEDED = ("vocab", "hidden", "layers", "context")


def draft(opened: ModelFiles, weights: str = "") -> str:
    """The text of a specification, and in comments what is not known.

    Args:
        weights: path of the checkpoint relative to the file; "" leaves it out.
    """
    facts = DraftFacts(opened)
    causal = facts.get("attention.causal" if facts.gguf else "is_decoder")
    only = "encoder" if facts.gguf and causal is False else "decoder" if causal is True else ""
    facts.asked.add("is_decoder")
    layers = layers_of(opened.checkpoint.tensors.values(), only)
    told = facts.get(*KEYS["layers"])
    if len(layers.stacks) == 1 == layers.stacks[0].count < (told if isinstance(told, int) else 0):
        layers = repeated(layers, told)
        facts.note(f"the file has one layer: read as each of the {told} that a key says")
    at = f"weights = {json.dumps(weights, ensure_ascii=False)}" if weights else ""
    facts.encoded = len(layers.stacks) > 1
    outside = draft_outside(layers, facts)
    stacks = [_Stack(stack, layers, facts, outside) for stack in layers.stacks]
    parts = [_table("[modules]", outside.modules)]
    for stack in stacks:
        parts += stack.tables(len(stacks) > 1)
    parts.append(_tensors(facts, layers, outside, stacks))
    parts = [_TO_CHECK, at, _match(opened), _dims(facts, "\n".join(parts)), *parts]
    parts.append(_unplaced(layers, outside, stacks))
    if facts.notes:
        parts.append(
            "\n".join(
                [
                    "# Guessed, and not said by names or keys:",
                    *(f"#   {_plain(n)}" for n in facts.notes),
                ]
            )
        )
    if opened.checkpoint.format not in ("gguf", "llama2c"):
        parts.append(_unread(opened.config, "\n".join(parts), facts))
    return "\n\n".join(part for part in parts if part) + "\n"


def _plain(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"')


def _match(opened: ModelFiles) -> str:
    key = "gguf" if opened.checkpoint.format == "gguf" else "architectures"
    names = ", ".join(json.dumps(name) for name in opened.architectures)
    return f"[match]\n{key} = [{names}]" if names else ""


def _unread(config: Mapping[str, Any], text: str, facts: DraftFacts) -> str:
    """The keys of config.json that may matter but that nothing in the text looks up."""
    read = read_keys(text) | facts.asked
    inner = config.get("text_config")
    unread = {
        key: value
        for key, value in {**config, **(inner if isinstance(inner, Mapping) else {})}.items()
        if (
            key not in read
            and value is not None
            and not SAYS_NOTHING.fullmatch(key)
            and not isinstance(value, Mapping | type(None))
        )
        or (key in ("rope_scaling",) and key not in read and value)
    }
    if "rope_scaling" in read or "rope_theta" in read:
        unread.pop("rope_parameters", None)
    if not unread:
        return ""
    lines = [f"#   {json.dumps(key)[1:-1]} = {json.dumps(v)[:60]}" for key, v in unread.items()]
    return "\n".join(["# config.json also says, and nothing here reads:", *lines])


# Sizes that nothing but a draft's own text uses.
_OWN = ("eps", "rope_theta", "rotary_dim", "embedding_scale", "residual_scale", "conv_states")


def _dims(facts: DraftFacts, text: str) -> str:
    """The sizes that the text uses; of a GGUF file those that specs/formats/gguf.toml has not."""
    unused = {name for name in _OWN if not re.search(rf"\b{name}\b", text)}
    dims = {name: value for name, value in facts.dims.items() if name not in unused}
    if facts.gguf:
        wrong = {
            name: value
            for name, value in dims.items()
            if name not in (*KEYS, "rope_theta", "rotary_dim")
            or (
                not str(value).startswith("$")
                and name not in ("context", "eps", "rope_theta")
                and value not in ("heads", "hidden / heads")
            )
        }
        return _table("[gguf.dims]", wrong, wide=12)
    order = [*KEYS, "rope_theta", "rotary_dim"]
    named = {name: dims[name] for name in order if name in dims}
    return _table("[dims]", named | dims, wide=12)


def _table(head: str, values: Mapping[str, Any], wide: int = 0) -> str:
    if not values:
        return ""
    width = wide or min(max(map(len, values)), 20)
    return "\n".join([head, *(f"{k:<{width}} = {_value(v)}" for k, v in values.items())])


def _value(value: Any) -> str:
    return inline_text(value)


class _Stack:
    """A stack as drafted."""

    def __init__(
        self,
        stack: CheckpointStack,
        layers: CheckpointLayers,
        facts: DraftFacts,
        outside: DraftedOutside,
    ) -> None:
        self.stack, self.name, self.facts = stack, stack.name, facts
        self.outside = outside
        has = outside.of_stack.get(self.name, {})
        hidden = facts.known["hidden"]
        shapes = [p.shape for kind in stack.kinds for p in kind.parts.values() if len(p.shape) == 2]
        turned = (
            sum(s[0] == hidden != s[1] for s in shapes),
            sum(s[1] == hidden != s[0] for s in shapes),
        )
        names = {part.last for kind in stack.kinds for part in kind.parts.values()}
        transposed = ("c_attn" in names and turned[0] > turned[1]) or turned[1] == 0 < turned[0]
        drafted = [draft_layer(k, self.name, facts, "norm" in has, transposed) for k in stack.kinds]
        if facts.weightless:
            outside.of_stack.setdefault(self.name, {})["norm"] = facts.weightless
        self.kinds, self.of = _merged(drafted)
        words = _distinct(self.kinds)
        merged = CheckpointStack(
            stack.name,
            tuple(
                type(kind)(
                    tuple(
                        i
                        for place, k in enumerate(stack.kinds)
                        if self.of[place] == n
                        for i in k.layers
                    ),
                    kind.parts,
                )
                for n, kind in ((n, stack.kinds[self.of.index(n)]) for n in range(len(self.kinds)))
            ),
        )
        self.words = words
        self.pattern = pattern_of(merged, words, facts) if len(self.kinds) > 1 else None

    def tables(self, several: bool) -> list[str]:
        """The stack's own table, its modules and its variants."""
        lines = [f"[{self.name}]"]
        if several:
            keys = (
                f"{self.name}_layers",
                "num_decoder_layers" if self.name == "decoder" else "num_layers",
            )
            lines.append(
                f"layers = {_value(self.facts.size(self.stack.count, *keys, 'num_hidden_layers'))}"
            )
        outside = self.outside
        lines.append(f"stem  = {_text(outside.stem(self.name))}")
        if self.pattern is not None:
            lines.append(f"pattern = {_value(self.pattern)}")
        formulas = [kind.formula for kind in self.kinds]
        one = len(set(formulas)) == 1
        if one:
            lines.append(f'layer = """\n{formulas[0]}\n"""')
        lines.append(f"head  = {_text(outside.head(self.name))}")
        shared = {
            name: table
            for kind in self.kinds
            for name, table in kind.modules.items()
            if all(other.modules.get(name, table) == table for other in self.kinds)
        }
        found = ["\n".join(lines)]
        found.append(_table(f"[{self.name}.modules]", shared | outside.own_modules(self.name)))
        if self.pattern is None:
            return found
        for word, kind in zip(self.words, self.kinds, strict=True):
            at = f"{self.name}.variants.{word}"
            own = {name: table for name, table in kind.modules.items() if name not in shared}
            found.append(f"[{at}]" + ("" if one else f'\nlayer = """\n{kind.formula}\n"""'))
            found.append(_table(f"[{at}.modules]", own))
        return found


def _text(text: str) -> str:
    return json.dumps(text) if "\n" not in text else f'"""\n{text}\n"""'


def _merged(drafted: list[DraftedLayer]) -> tuple[list[DraftedLayer], list[int]]:
    """Kinds that are drafted alike as one; and of each, which one it is now."""
    kinds: list[DraftedLayer] = []
    of = []
    for each in drafted:
        same = next(
            (
                n
                for n, k in enumerate(kinds)
                if (k.formula, k.modules) == (each.formula, each.modules)
            ),
            None,
        )
        if same is None:
            kinds.append(each)
            same = len(kinds) - 1
        else:
            kinds[same].unplaced += each.unplaced
            _merge_tensors(kinds[same].tensors, each.tensors)
        of.append(same)
    return kinds, of


def _merge_tensors(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Adds lines; of one parameter that is elsewhere in other layers, both places."""
    for name, place in more.items():
        held = into.get(name, place)
        if held == place or not isinstance(place, str) or isinstance(held, dict):
            into[name] = held
            continue
        places = held if isinstance(held, list) else [held]
        into[name] = places if place in places else [*places, place]


def _distinct(kinds: list[DraftedLayer]) -> list[str]:
    """A name for each kind, of the words that tell it from the others."""
    words = [kind.word.split("_") for kind in kinds]
    common = set(words[0]).intersection(*words) if words else set()
    names = ["_".join(w for w in own if w not in common) or "plain" for own in words]
    return [
        n if names.count(n) == 1 else f"{n}_{names[:k].count(n) + 1}" for k, n in enumerate(names)
    ]


def _tensors(
    facts: DraftFacts, layers: CheckpointLayers, outside: DraftedOutside, stacks: list[_Stack]
) -> str:
    format = facts.opened.checkpoint.format
    lines = [f"[tensors.{format}]" if format in ("gguf", "llama2c") else "[tensors]"]
    ignored = {_glob(part) for part in layers.ignored.values()} | set(outside.ignored)
    if ignored:
        lines.append(f"ignore = [{', '.join(sorted(ignored))}]")
    names = {tensor.rpartition(".")[2] for tensor in facts.opened.checkpoint.tensors}
    if names & {"gamma", "beta"}:
        lines.append('suffixes = { gamma = "weight", beta = "bias" }')
    if outside.copies:
        lines.append(f"copies = {inline_text(outside.copies)}")
    found: dict[str, Any] = dict(outside.tensors)
    for stack in stacks:
        for kind in stack.kinds:
            own = {f"{stack.name}.{{i}}.{name}": place for name, place in kind.tensors.items()}
            _merge_tensors(found, own)
    lines += [f"{json.dumps(name)} = {_value(place)}" for name, place in found.items()]
    return "\n".join(lines)


def _glob(part: Part) -> str:
    leaf = next((f".{leaf}" for leaf in part.leaves if leaf), "")
    return json.dumps(part.name.replace("{i}", "*").replace("{e}", "*") + leaf)


def _unplaced(layers: CheckpointLayers, outside: DraftedOutside, stacks: list[_Stack]) -> str:
    """A line for each module of the file that has no place in the draft."""
    parts = [*outside.unplaced, *layers.elsewhere.values()]
    parts += [part for stack in stacks for kind in stack.kinds for part in kind.unplaced]
    found = {part.name: part.shape for part in parts}
    return "\n".join(
        f"# no name found for {json.dumps(name)}, {' x '.join(map(str, shape)) or 'one number'}"
        for name, shape in found.items()
    )
