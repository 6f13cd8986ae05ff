"""Layers of a checkpoint, by its tensors' names: its stacks, and the kinds of their layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from jinfer.loader.checkpoint import Tensor

from .fold_names import numbered

type Shape = tuple[int, ...]

_LEAF = re.compile(r"\.(weight|bias|gamma|beta)$")
_STANDARD = {"gamma": "weight", "beta": "bias"}
_IGNORED = re.compile(
    r"(.*[._])?(inv_freq|masked_bias|position_ids|causal_mask|token_type_ids|slope_rate"
    r"|(query|key|diagonal)_decay|act_fn\.(beta|eps)"
    r"|attn_mask|expert_bias_update|tokens_per_expert|cos_cached|sin_cached)"
)
_INSIDE = re.compile(r"\w+\.\d+\.")
_LISTED = re.compile(r"((?:\w+\.)*?)(\w+)\.\{i\}((?:\..+)?)")
# Stacks of other modes than text, and heads that predict further tokens: not the model's layers.
_OTHER = re.compile(r"(^|\.)(visual|vision\w*|audio\w*|mtp|image\w*|\w*projector)\.")


@dataclass
class Part:
    """A module of the checkpoint.

    Attributes:
        name: without weight or bias, the layer's number as {i} and an expert's as {e}.
        inner: its name in the layer, or the whole name outside of layers.
        leaves: "weight", "bias" or, for a tensor that says neither, "" -> its shape.
    """

    name: str
    inner: str
    leaves: dict[str, Shape] = field(default_factory=dict)

    @property
    def shape(self) -> Shape:
        """Of the weight, without axes of length 1 at the ends of a vector's or a convolution's."""
        return self.leaves.get("weight", next(iter(self.leaves.values())))

    @property
    def vector(self) -> int:
        """The size of a vector, whatever axes of length 1 it has; 0 if it is none."""
        sizes = [size for size in self.shape if size != 1]
        return sizes[0] if len(sizes) == 1 else 1 if not sizes else 0

    @property
    def bias(self) -> bool:
        """Whether there is a bias."""
        return "bias" in self.leaves

    @property
    def last(self) -> str:
        """The last word of the name."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class LayerKind:
    """Layers that have the same tensors.

    Attributes:
        layers: their numbers.
        parts: name in the layer -> module.
    """

    layers: tuple[int, ...]
    parts: Mapping[str, Part]


@dataclass(frozen=True)
class CheckpointStack:
    """A stack of layers: kinds of them, in the order of their first layers."""

    name: str
    kinds: tuple[LayerKind, ...]

    @property
    def count(self) -> int:
        """How many layers there are."""
        return sum(len(kind.layers) for kind in self.kinds)

    @property
    def kind_of(self) -> list[int]:
        """The kind of each layer, by its place in `kinds`."""
        places = {i: place for place, kind in enumerate(self.kinds) for i in kind.layers}
        return [places.get(i, 0) for i in range(self.count)]


@dataclass(frozen=True)
class CheckpointLayers:
    """All modules of a checkpoint.

    Attributes:
        stacks: encoder and decoder, as far as there are.
        outside: modules of no layer.
        elsewhere: modules of other stacks, such as a vision tower's.
        ignored: modules that are buffers, and hold no weights.
    """

    stacks: tuple[CheckpointStack, ...]
    outside: Mapping[str, Part]
    elsewhere: Mapping[str, Part]
    ignored: Mapping[str, Part]


def leaf_of(name: str) -> str:
    """Whether the name is a "weight" or a "bias"; "" if it does not say."""
    found = _LEAF.search(name)
    return _STANDARD.get(found[1], found[1]) if found else ""


def module_name(name: str) -> str:
    """A tensor's name without weight or bias, the layer's number as {i} and an expert's as {e}."""
    module = _LEAF.sub("", name)
    return numbered(module, "ie" if re.search(r"experts?\.\d+(\.|$)", module) else "i")


def is_ignorable(tensor: Tensor) -> bool:
    """Whether it is a buffer that models do not need, such as a causal mask."""
    return bool(_IGNORED.fullmatch(tensor.name)) or (
        len(tensor.shape) == 4 and tensor.name.endswith(".bias")
    )


def layers_of(tensors: Iterable[Tensor], only: str = "") -> CheckpointLayers:
    """The layers of a checkpoint's tensors.

    Args:
        only: what the one stack is, where the names do not decide that.
    """
    found: dict[str, dict[str, Part]] = {"ignored": {}, "elsewhere": {}, "outside": {}}
    layers: dict[str, dict[int, dict[str, Part]]] = {}
    tensors = list(tensors)
    once, split = _once(tensors), _split_lists(tensors)
    for tensor in tensors:
        name, leaf = module_name(tensor.name), leaf_of(tensor.name)
        prefix, mark, inner = name.partition("{i}.")
        before = prefix
        if (listed := _LISTED.fullmatch(name)) and listed[1] in split:
            before, mark = f"{listed[1]}{listed[2]}.", "{i}"
            prefix, inner = listed[1], f"{listed[2]}{listed[3]}"
        if is_ignorable(tensor):
            place = "ignored"
        elif _OTHER.search(name):
            place = "elsewhere"
        elif mark and name not in once:
            number = int(tensor.name[len(before) :].partition(".")[0])
            parts = layers.setdefault(prefix, {}).setdefault(number, {})
            part = parts.setdefault(inner, Part(name, inner))
            part.leaves[leaf] = tensor.shape
            continue
        else:
            place = "outside"
            name = name.replace("{i}", "0")
        found[place].setdefault(name, Part(name, name)).leaves[leaf] = tensor.shape
    chosen = _stacks(layers)
    if only and len(chosen) == 1:
        chosen = {only: next(iter(chosen.values()))}
    for prefix, numbers in layers.items():
        if prefix not in chosen.values():
            for parts in numbers.values():
                found["elsewhere"].update({part.name: part for part in parts.values()})
    stacks = tuple(CheckpointStack(n, _kinds(layers[prefix])) for n, prefix in chosen.items())
    return CheckpointLayers(stacks, found["outside"], found["elsewhere"], found["ignored"])


def repeated(layers: CheckpointLayers, count: int) -> CheckpointLayers:
    """The same where a stack's only layer in the file is each of `count` layers (ALBERT)."""
    stacks = []
    for stack in layers.stacks:
        if stack.count != 1:
            stacks.append(stack)
            continue
        parts = stack.kinds[0].parts
        inside = {found[0] if (found := _INSIDE.match(inner)) else "" for inner in parts}
        start = inside.pop() if len(inside) == 1 else ""
        number = str(stack.kinds[0].layers[0])
        shared = {
            inner.removeprefix(start): Part(
                part.name.replace("{i}", number), inner.removeprefix(start), part.leaves
            )
            for inner, part in parts.items()
        }
        stacks.append(CheckpointStack(stack.name, (LayerKind(tuple(range(count)), shared),)))
    return CheckpointLayers(tuple(stacks), layers.outside, layers.elsewhere, layers.ignored)


def _once(tensors: Iterable[Tensor]) -> set[str]:
    """Modules that layer 0 alone has for all layers, by their words."""
    layers: dict[str, set[str]] = {}
    for tensor in tensors:
        name = module_name(tensor.name)
        if re.search(r"\{i\}\.(.*\.)?(relative_attention_bias|pre_ln)$", name):
            number = re.search(r"\.(\d+)\.", tensor.name)
            layers.setdefault(name, set()).add(number[1] if number else "")
    return {name for name, found in layers.items() if found == {"0"}}


def _split_lists(tensors: Iterable[Tensor]) -> set[str]:
    """What stands before lists of which each has one sort of module of all layers.

    Such as `attentions.0`, `ffns.0` and `layer_norm1.0`, instead of `layers.0.attention`.
    """
    lists: dict[str, dict[str, set[str]]] = {}
    for tensor in tensors:
        if found := _LISTED.fullmatch(module_name(tensor.name)):
            number = tensor.name[len(found[1]) + len(found[2]) + 1 :].partition(".")[0]
            lists.setdefault(found[1], {}).setdefault(found[2], set()).add(number)
    return {
        parent
        for parent, words in lists.items()
        if len({frozenset(numbers) for numbers in words.values()}) == 1
        and any(re.search(r"att", word) for word in words)
        and any(re.search(r"ffn|mlp|feed|moe", word) for word in words)
    }


def _stacks(layers: Mapping[str, Mapping[int, Mapping[str, Part]]]) -> dict[str, str]:
    """Name of each stack -> the prefix of its layers: those with the most modules."""
    sizes = Counter({prefix: sum(map(len, numbers.values())) for prefix, numbers in layers.items()})
    chosen: dict[str, str] = {}
    for prefix, _ in sizes.most_common():
        words = prefix.lower()
        name = "encoder" if "encoder" in words and "decoder" not in words else "decoder"
        chosen.setdefault(name, prefix)
    marked = [prefix for prefix in layers if "decoder" in prefix.lower()]
    if set(chosen) == {"encoder", "decoder"} and not marked:
        # An encoder beside layers that are not called a decoder's: the greater of both.
        name = max(chosen, key=lambda name: sizes[chosen[name]])
        chosen = {name: chosen[name]}
    return {name: chosen[name] for name in ("encoder", "decoder") if name in chosen}


def _kinds(numbers: Mapping[int, Mapping[str, Part]]) -> tuple[LayerKind, ...]:
    kinds: dict[object, list[int]] = {}
    for number in sorted(numbers):
        parts = numbers[number].items()
        key = frozenset((inner, tuple(sorted(part.leaves.items()))) for inner, part in parts)
        kinds.setdefault(key, []).append(number)
    return tuple(LayerKind(tuple(same), numbers[same[0]]) for same in kinds.values())
