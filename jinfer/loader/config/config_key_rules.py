"""Config keys that nothing read: whether a model does what they say nevertheless.

A rule compares the key's value with what was built: it changes nothing, or the specification says
it as well, in another way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jinfer.modelspec.blocks import (
    ACTIVATION_ALIASES,
    AlibiSpec,
    AttentionSpec,
    Block,
    GatedMLPSpec,
    LatentAttentionSpec,
    LayerNormSpec,
    MLPSpec,
    MoESpec,
    RMSNormSpec,
    RopeSpec,
)
from jinfer.modelspec.feed_forward_blocks import CLAMPED
from jinfer.modelspec.layer_spec import LayerSpec
from jinfer.modelspec.model_spec import ModelSpec

# Whether a model does what a value says.
type Rule = Callable[[Any, ModelSpec], bool]

_NAME = re.compile(r"\w+")
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d*)?(?:e-?\d+)?")


def layers_of(spec: ModelSpec) -> list[LayerSpec]:
    """The layers of all stacks."""
    return [layer for stack in spec.stacks for layer in stack.layers]


def _blocks(spec: ModelSpec) -> Iterator[Block]:
    groups = [spec.shared, *(stack.modules for stack in spec.stacks)]
    layers = {id(layer): layer for layer in layers_of(spec)}.values()
    yield from (block for group in groups for _, block in group)
    yield from (block for layer in layers for _, block in layer.modules)


def _positions(spec: ModelSpec) -> list[Any]:
    return [part for b in _blocks(spec) if (part := getattr(b, "position", None)) is not None]


def _ropes(spec: ModelSpec) -> list[RopeSpec]:
    return [part for part in _positions(spec) if isinstance(part, RopeSpec)]


def values_of(spec: ModelSpec, *names: str, of: type | tuple[type, ...] = object) -> set[Any]:
    """What the blocks of a model, and their positions, have in these fields."""
    parts = [*_blocks(spec), *_positions(spec)]
    return {
        getattr(part, name)
        for part in parts
        if isinstance(part, of)
        for name in names
        if hasattr(part, name)
    }


def _numbers(spec: ModelSpec) -> list[float]:
    """The numbers in a model's formulas: written out, or what names of sizes stand for."""
    formulas = [part for stack in spec.stacks for part in (stack.stem, stack.head)]
    formulas += [layer.wiring for layer in {id(x): x for x in layers_of(spec)}.values()]
    named = [number for each in formulas for _, number in each.constants]
    return named + [float(text) for each in formulas for text in _NUMBER.findall(each.text)]


def is_close(value: Any, other: Any) -> bool:
    """Whether numbers are equal but for rounding; other values, whether they are equal."""
    if isinstance(value, float) and isinstance(other, int | float):
        return math.isclose(value, other, rel_tol=1e-6)  # GGUF has float32
    return bool(value == other)


def no_effect(*values: Any) -> Rule:
    """Values that change nothing; what is off never does."""
    return lambda value, spec: not value or value in values


def if_true(test: Callable[[ModelSpec], Any]) -> Rule:
    """What a switch says if it is on."""
    return lambda value, spec: not value or bool(test(spec))


def equals(test: Callable[[ModelSpec], bool]) -> Rule:
    """What a switch says, on or off."""
    return lambda value, spec: bool(value) == test(spec)


def any_rope(test: Callable[[Any, RopeSpec], bool]) -> Rule:
    """What a value says of rotary positions, if there are any."""

    def rule(value: Any, spec: ModelSpec) -> bool:
        ropes = _ropes(spec)
        return not ropes or any(test(value, rope) for rope in ropes)

    return rule


def is_factor(value: Any, spec: ModelSpec) -> bool:
    """Whether a number is 1 or off, or formulas multiply by it, or divide."""
    if not value or value == 1:
        return True
    return any(is_close(float(value), n) or is_close(1 / float(value), n) for n in _numbers(spec))


def is_softcap(value: Any, spec: ModelSpec) -> bool:
    """Whether scores or logits are bounded by it, by an attention or in a formula."""
    known = [*values_of(spec, "softcap"), *_numbers(spec)]
    return not value or any(is_close(float(value), each) for each in known if each is not None)


def has_value(*names: str, of: type | tuple[type, ...] = object) -> Rule:
    """A value that a block of the model has in one of these fields, or no block has them at all."""

    def rule(value: Any, spec: ModelSpec) -> bool:
        built = values_of(spec, *names, of=of)
        return (of is not object and not built) or any(is_close(value, each) for each in built)

    return rule


def unset_or_value(*names: str, of: type | tuple[type, ...] = object) -> Rule:
    """Nothing, or a value that a block of the model has in one of these fields."""
    return lambda value, spec: (
        not value or any(is_close(value, each) for each in values_of(spec, *names, of=of))
    )


def has_attention(field: str) -> Rule:
    """Off, or an attention of the model has something in this field."""
    return if_true(lambda spec: values_of(spec, field) - {None, False})


def same_activation(value: Any, spec: ModelSpec) -> bool:
    """Whether a block has it. Files say gelu and mean its tanh form, so these are one."""
    name = ACTIVATION_ALIASES.get(value, value) if isinstance(value, str) else value
    built = {str(each).removesuffix("_tanh") for each in values_of(spec, "activation", "function")}
    if name in ("swiglu", "geglu") and values_of(spec, "activation", of=GatedMLPSpec):
        name = {"swiglu": "silu", "geglu": "gelu"}[name]
    return str(name).removesuffix("_tanh") in built or not built.isdisjoint(CLAMPED)


def same_window(value: Any, spec: ModelSpec) -> bool:
    """Whether a window is off, beyond any text, or that of a layer.

    Encoders count one half of it to either side.
    """
    if not value or not isinstance(value, int | float):
        return not value
    reach, built = spec.dims.get("context"), values_of(spec, "window")
    halved = value // 2 + 1 if spec.decoder is None else value
    return (reach is not None and value >= reach) or value in built or halved in built


def _attentions(spec: ModelSpec) -> list[AttentionSpec | None]:
    """The attention of each layer; None where it has another kind, or several."""
    found = []
    for layer in layers_of(spec):
        parts = [block for _, block in layer.modules if isinstance(block, AttentionSpec)]
        found.append(parts[0] if len(parts) == 1 else None)
    return found


def _indexer_top_k(spec: ModelSpec) -> list[int | None]:
    """How many keys an indexer chooses in each layer; None without one."""
    found = []
    for layer in layers_of(spec):
        indexers = (getattr(block, "indexer", None) for _, block in layer.modules)
        found.append(next((indexer.top_k for indexer in indexers if indexer is not None), None))
    return found


def same_indexer_top_k(value: Any, spec: ModelSpec) -> bool:
    """Whether that many keys are chosen for each query, or no text is longer."""
    reach = spec.dims.get("context")
    return (reach is not None and value >= reach) or set(_indexer_top_k(spec)) == {value}


def same_shared_indexers(value: Any, spec: ModelSpec) -> bool:
    """Whether those layers use keys chosen in others that a list of words, or a string, says do.

    Or, of how often a layer chooses, whether some do not.
    """
    shared = [bool(layer.reusing) for layer in layers_of(spec)]
    if isinstance(value, str | list):
        said = [word in ("shared", "S") for word in value]
        return said[: len(shared)] == shared
    return value in (0, 1) or any(shared)


_INDEXED = {"indexed_attention", "deepseek_sparse_attention"}
_WINDOWED = dict.fromkeys(("full_attention", "global"), False)
_WINDOWED |= dict.fromkeys(("sliding_attention", "local", "chunked_attention"), True)
_NO_ATTENTION = {"linear_attention", "mamba", "conv"}


def same_layers(value: Any, spec: ModelSpec) -> bool:
    """Whether those layers have a window that are said to, in the words of transformers.

    The value is a word for each layer; GPT-Neo's list of words and how often they come; or GGUF's
    flag for each layer, or every how many layers there is one without.
    """
    reach = spec.dims.get("context")
    built = [None if attn is None else _window(attn) for attn in _attentions(spec)]
    latent = [_has_latent_attention(layer) for layer in layers_of(spec)]
    if spec.follows is not None:  # a head, whose file describes the model it was trained for
        return True
    if isinstance(value, int) and not isinstance(value, bool):
        value = [bool((i + 1) % value) for i in range(len(built))] if value else []
    if not isinstance(value, list):
        return False
    if value and all(isinstance(each, list) and len(each) == 2 for each in value):
        value = [word for words, times in value for word in words * min(times, len(built))]
    if not _INDEXED.isdisjoint(each for each in value if isinstance(each, str)):
        return [each in _INDEXED for each in value] == [bool(k) for k in _indexer_top_k(spec)]
    said = [_WINDOWED.get(each, each) if isinstance(each, str) else each for each in value]
    said = [None if isinstance(each, str) and each in _NO_ATTENTION else each for each in said]
    if not any(said) and None not in said:
        return all(window in (None, 0, reach) for window in built)
    windowed = [None if window is None else window > 0 for window in built]
    return said == [False if own else each for each, own in zip(windowed, latent, strict=True)]


def _window(attention: AttentionSpec) -> int:
    """How far an attention sees, in a window or a chunk; 0: any distance."""
    return attention.window or attention.chunk or 0


def _has_latent_attention(layer: LayerSpec) -> bool:
    return any(isinstance(block, LatentAttentionSpec) for _, block in layer.modules)


def same_rotated_layers(value: Any, spec: ModelSpec) -> bool:
    """Whether those layers rotate whose number is not 0 (which `no_rope_layers` says)."""
    rotates = [attn is not None and attn.position is not None for attn in _attentions(spec)]
    return not value or spec.follows is not None or [bool(each) for each in value] == rotates


def same_scaling(value: Any, spec: ModelSpec) -> bool:
    """Whether positions are stretched by the rule that a name or a table says."""
    table = value if isinstance(value, Mapping) else {"type": value}
    name = table.get("rope_type", table.get("type"))
    ropes = _ropes(spec)
    if name in ("default", "none", "mrope", None) or not ropes:
        return True
    name = {"su": "longrope"}.get(name, name)  # as Phi-3's first files call it
    return any(rope.scaling is not None and rope.scaling.rope_type == name for rope in ropes)


def same_stretch(field: str) -> Rule:
    """Whether a number of a table of scaling is built, or positions are not stretched at all."""

    def rule(value: Any, spec: ModelSpec) -> bool:
        built = [getattr(rope.scaling, field) for rope in _ropes(spec) if rope.scaling]
        return not built or any(is_close(value, each) for each in built)

    return rule


def same_positions(value: Any, spec: ModelSpec) -> bool:
    """Whether positions are of the kind of a word: "rope_gptj", "rotary", "alibi", "absolute"."""
    word = str(value)
    kinds = {"rope": RopeSpec, "rota": RopeSpec, "alib": AlibiSpec}
    if word in ("absolute", "learned", "none"):
        return True
    kind = kinds.get(word[:4])
    return kind is not None and any(isinstance(part, kind) for part in _positions(spec))


def same_share(value: Any, spec: ModelSpec) -> bool:
    """Whether that share of each head is rotated."""
    attentions = [b for b in _blocks(spec) if isinstance(b, AttentionSpec | LatentAttentionSpec)]
    shares = [
        (b.position.dim, b.head_dim if isinstance(b, AttentionSpec) else b.nope_dim + b.rope_dim)
        for b in attentions
        if isinstance(b.position, RopeSpec)
    ]
    usual = value == 1 or not isinstance(value, int | float)
    scalings = [rope.scaling for rope in _ropes(spec) if rope.scaling is not None]
    scalings = [each for each in scalings if each.rope_type == "proportional"]
    return (
        (usual and value is not False)
        or not (attentions or _ropes(spec))
        or any(int(size * value) == dim for dim, size in shares)
        or any(is_close(value, each.partial_rotary_factor) for each in scalings)
    )


def usual_query_scale(value: Any, spec: ModelSpec) -> bool:
    """Whether scores are divided by the root of a number (`query_pre_attn_scalar`)."""
    if value == spec.dims.get("head_dim"):
        return True
    is_size = isinstance(value, int | float) and 0 < value < 1e30
    return is_size and any(
        is_close(value**-0.5, scale) for scale in values_of(spec, "scale") if scale
    )


def same_scale(value: Any, spec: ModelSpec) -> bool:
    """Whether scores, if there are any, are multiplied by it; none built is 1 / sqrt(head_dim)."""
    usual = spec.dims.get("head_dim", 1) ** -0.5
    scales = values_of(spec, "scale", of=AttentionSpec)
    kinds = (AttentionSpec, LatentAttentionSpec)
    if not any(isinstance(block, kinds) for block in _blocks(spec)):
        return True
    return any(is_close(float(value), usual if each is None else each) for each in scales)


def has_both_distances(value: Any, spec: ModelSpec) -> bool:
    """DeBERTa's kinds of distances: a list, or words between bars; both are built."""
    words = value.split("|") if isinstance(value, str) else value
    return isinstance(words, list) and sorted(map(str, words)) == ["c2p", "p2c"]


def is_gated(spec: ModelSpec) -> bool:
    """Whether an attention has a gate."""
    return values_of(spec, "gate", of=AttentionSpec) - {None} != set()


def is_parallel(spec: ModelSpec) -> bool:
    """Whether a line of a layer's formula calls an attention and a feed-forward."""
    return any(
        {"attention", "feed"}
        <= {_branch_kind(dict(layer.modules).get(name)) for name in _NAME.findall(line)}
        for layer in layers_of(spec)
        for line in layer.wiring.text.splitlines()
    )


def _branch_kind(block: Block | None) -> str:
    feed = isinstance(block, MLPSpec | GatedMLPSpec | MoESpec)
    return "feed" if feed else "attention" if isinstance(block, AttentionSpec) else ""


def norm_before(value: Any, spec: ModelSpec) -> bool:
    """Whether a branch begins with its norm if, and only if, a key says so."""
    first = next(iter(layers_of(spec)), None)
    if first is None:
        return True
    norms = [name for name, b in first.modules if isinstance(b, LayerNormSpec | RMSNormSpec)]
    after = re.compile(rf"\b({'|'.join(map(re.escape, norms)) or '-'})\(\s*x\s*\+")
    return bool(value) != bool(after.search(first.wiring.text))


def same_norm(value: Any, spec: ModelSpec) -> bool:
    """Whether there are RMS norms if, and only if, a word or a switch says so."""
    says = "rms" in value if isinstance(value, str) else bool(value)
    return says == any(isinstance(block, RMSNormSpec) for block in _blocks(spec))


def unbounded_steps(value: Any, spec: ModelSpec) -> bool:
    """Whether bounds, the least and the greatest, are beyond what a softplus gives."""
    least, most = (float(x["__float__"]) if isinstance(x, Mapping) else x for x in value)
    return bool(least <= min(values_of(spec, "least"), default=0) and most >= 1000)


def has_positions(kind: type) -> Callable[[ModelSpec], bool]:
    """Whether a model has positions of a kind."""
    return lambda spec: any(isinstance(part, kind) for part in _positions(spec))


# Scores are divided by the root of a head's size.
scaled_scores = equals(lambda spec: values_of(spec, "scale", of=AttentionSpec) != {1.0})


# Tokens see those before them only; those after them too.
def _is_causal(spec: ModelSpec) -> bool:
    """Whether no token sees those after it."""
    return spec.decoder is not None or values_of(spec, "causal", of=AttentionSpec) == {True}


causal = if_true(_is_causal)
not_causal = if_true(lambda spec: not _is_causal(spec))


def same_scoring(value: Any, spec: ModelSpec) -> bool:
    """Whether experts are scored so; GGUF numbers the functions, dots1 says how it chooses."""
    names = {"1": "softmax", "2": "sigmoid", "noaux_tc": "sigmoid"}
    return not value or names.get(str(value), str(value)) in (
        values_of(spec, "scoring") or {"softmax"}
    )


def same_choice(value: Any, spec: ModelSpec) -> bool:
    """Whether experts are chosen by that method, in DeepSeek's words."""
    if True in values_of(spec, "correction_bias"):
        return not value or value == "noaux_tc"
    groups = max(values_of(spec, "groups"), default=1)
    return not value or value in ("group_limited_greedy", "greedy" if groups == 1 else "")


def _dense(spec: ModelSpec) -> list[bool]:
    """Whether a layer has no experts, of each; empty where none has any.

    Empty for a head that drafts as well: its file describes the model that it was trained for.
    """
    if spec.follows is not None:
        return []
    dense = [
        not any(isinstance(block, MoESpec) for _, block in layer.modules)
        for layer in layers_of(spec)
    ]
    return [] if all(dense) else dense


def same_dense_prefix(value: Any, spec: ModelSpec) -> bool:
    """Whether that many layers at the beginning have no experts, and no more."""
    dense = _dense(spec)
    first = dense.index(False) if dense else 0
    return not dense or min(value, len(dense)) == first


def same_moe_period(value: Any, spec: ModelSpec) -> bool:
    """Whether experts are in every so-and-so-many-th layer, or in those that a list says.

    The list has 0 or "dense" for layers without.
    """
    dense = _dense(spec)
    if isinstance(value, list):
        return not dense or [each in (0, "dense") for each in value] == dense
    sparse = [i for i, without in enumerate(dense) if not without]
    return value in (0, 1) or len({i % value for i in sparse}) <= 1


def same_dense_layers(value: Any, spec: ModelSpec) -> bool:
    """Whether the layers of those numbers have no experts."""
    dense = _dense(spec)
    return not dense or not value or all(i < len(dense) and dense[i] for i in value)


def sigmoid_scoring(value: Any, spec: ModelSpec) -> bool:
    """Whether experts are scored by a sigmoid if a key says so."""
    return same_scoring("sigmoid" if value else "", spec)
