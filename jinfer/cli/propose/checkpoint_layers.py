"""Layers of a checkpoint, by its tensors' names: its stacks, and the kinds of their layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from jinfer.loader.checkpoint import Tensor

type Shape = tuple[int, ...]

NUMBER = re.compile(r"(?:(?<=[.\[])|^)\d+(?=[.\]]|$)")
_LEAF = re.compile(r"\.(weight|bias|gamma|beta)$")
_STANDARD = {"gamma": "weight", "beta": "bias"}
_BUFFER = re.compile(
    r"(.*[._])?(inv_freq|masked_bias|position_ids|causal_mask|token_type_ids|slope_rate"
    r"|(query|key|diagonal)_decay|act_fn\.(beta|eps)"
    r"|attn_mask|expert_bias_update|tokens_per_expert|cos_cached|sin_cached)"
)
# Stacks of other modes than text, and heads that predict further tokens: not the model's layers.
_OTHER = re.compile(r"(^|\.)(visual|vision\w*|audio\w*|mtp|image\w*|\w*projector)\.")
# Modules that layer 0 may have for all layers.
_SHARED = re.compile(r"(?:.*?\.)?(\d+)\.(?:.*\.)?(?:relative_attention_bias|pre_ln)(?:\.\w+)?")


@dataclass
class Part:
    """A module of the checkpoint.

    Attributes:
        name: without weight or bias, the layer's number as {i} and an expert's as {e}.
        inner: its name in the layer, or the whole name outside of layers.
        leaves: "weight", "bias" or, for a tensor whose name says neither, "" -> its shape.
    """

    name: str
    inner: str
    leaves: dict[str, Shape] = field(default_factory=dict)

    @property
    def shape(self) -> Shape:
        """The shape of the weight."""
        return self.leaves.get("weight", next(iter(self.leaves.values())))

    @property
    def vector(self) -> int:
        """The size of a vector, without axes of length 1; 0 for a matrix."""
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
class CheckpointStack:
    """A stack of layers.

    Attributes:
        kinds: the modules of each kind of layer, by their name in the layer.
        kind_of: the place in `kinds` of each layer.
    """

    name: str
    kinds: tuple[Mapping[str, Part], ...]
    kind_of: tuple[int, ...]


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


def numbered(name: str, letters: str) -> str:
    """Return a name with its numbers replaced by {i}, {e}, ... as a `[tensors]` table has them."""
    left = list(letters)
    return NUMBER.sub(lambda found: f"{{{left.pop(0)}}}" if left else found[0], name)


def leaf_of(name: str) -> str:
    """Return "weight" or "bias", whichever the name ends with; else ""."""
    found = _LEAF.search(name)
    return _STANDARD.get(found[1], found[1]) if found else ""


def module_name(name: str) -> str:
    """Return a tensor's name without weight or bias, its numbers as {i} and {e}."""
    module = _LEAF.sub("", name)
    return numbered(module, "ie" if re.search(r"experts?\.\d+(\.|$)", module) else "i")


def is_ignorable(tensor: Tensor) -> bool:
    """Return whether it is a buffer that models do not need, such as a causal mask."""
    return bool(_BUFFER.fullmatch(tensor.name)) or (
        len(tensor.shape) == 4 and tensor.name.endswith(".bias")
    )


def layers_of(tensors: Iterable[Tensor], only: str = "") -> CheckpointLayers:
    """Return the layers of a checkpoint's tensors.

    Args:
        only: the name of the one stack, where the tensors' names do not tell.
    """
    tensors = list(tensors)
    found: dict[str, dict[str, Part]] = {"ignored": {}, "elsewhere": {}, "outside": {}}
    layers: dict[str, dict[int, dict[str, Part]]] = {}
    numbers: dict[str, set[str]] = {}
    for tensor in tensors:
        if shared := _SHARED.fullmatch(tensor.name):
            numbers.setdefault(module_name(tensor.name), set()).add(shared[1])
    for tensor in tensors:
        name, leaf = module_name(tensor.name), leaf_of(tensor.name)
        prefix, mark, inner = name.partition("{i}.")
        if is_ignorable(tensor):
            place = "ignored"
        elif _OTHER.search(name):
            place = "elsewhere"
        elif mark and numbers.get(name) != {"0"}:
            number = int(tensor.name[len(prefix) :].partition(".")[0])
            parts = layers.setdefault(prefix, {}).setdefault(number, {})
            parts.setdefault(inner, Part(name, inner)).leaves[leaf] = tensor.shape
            continue
        else:
            place, name = "outside", name.replace("{i}", "0")
        found[place].setdefault(name, Part(name, name)).leaves[leaf] = tensor.shape
    chosen = _stacks(layers)
    if only and len(chosen) == 1:
        chosen = {only: next(iter(chosen.values()))}
    for prefix in layers.keys() - chosen.values():
        for parts in layers[prefix].values():
            found["elsewhere"].update({part.name: part for part in parts.values()})
    stacks = tuple(_stack(name, layers[prefix]) for name, prefix in chosen.items())
    return CheckpointLayers(stacks, found["outside"], found["elsewhere"], found["ignored"])


def _stacks(layers: Mapping[str, Mapping[int, Mapping[str, Part]]]) -> dict[str, str]:
    """Name of each stack -> the prefix of its layers: those with the most modules."""
    sizes = Counter({prefix: sum(map(len, numbers.values())) for prefix, numbers in layers.items()})
    chosen: dict[str, str] = {}
    for prefix, _ in sizes.most_common():
        words = prefix.lower()
        name = "encoder" if "encoder" in words and "decoder" not in words else "decoder"
        chosen.setdefault(name, prefix)
    return {name: chosen[name] for name in ("encoder", "decoder") if name in chosen}


def _stack(name: str, layers: Mapping[int, Mapping[str, Part]]) -> CheckpointStack:
    kinds: dict[object, Mapping[str, Part]] = {}
    keys = []
    for _, parts in sorted(layers.items()):
        shapes = ((inner, tuple(sorted(part.leaves.items()))) for inner, part in parts.items())
        keys.append(frozenset(shapes))
        kinds.setdefault(keys[-1], parts)
    places = {key: place for place, key in enumerate(kinds)}
    return CheckpointStack(name, tuple(kinds.values()), tuple(places[key] for key in keys))
