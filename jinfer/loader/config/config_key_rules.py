"""Rules for config keys that nothing read: whether a model complies with their values.

A rule compares the value with the model: either the value has no effect, or the specification has
the same effect without reading the key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jinfer.modelspec.attention_blocks import AttentionSpec, LatentAttentionSpec
from jinfer.modelspec.block import Block
from jinfer.modelspec.blocks import LayerNormSpec, RMSNormSpec
from jinfer.modelspec.feed_forward_blocks import (
    ACTIVATION_ALIASES,
    CLAMPED,
    GatedMLPSpec,
    MLPSpec,
    MoESpec,
)
from jinfer.modelspec.layer_spec import LayerSpec
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.position_blocks import AlibiSpec, RopeSpec

# Whether a model complies with a value.
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
    """Return the values of these fields in the blocks of a model and their positions."""
    parts = [*_blocks(spec), *_positions(spec)]
    return {
        getattr(part, name)
        for part in parts
        if isinstance(part, of)
        for name in names
        if hasattr(part, name)
    }


def _numbers(spec: ModelSpec) -> list[float]:
    """Return the numbers in a model's formulas, including the values of named sizes."""
    formulas = [part for stack in spec.stacks for part in (stack.stem, stack.head)]
    formulas += [layer.wiring for layer in {id(x): x for x in layers_of(spec)}.values()]
    named = [number for each in formulas for _, number in each.constants]
    return named + [float(text) for each in formulas for text in _NUMBER.findall(each.text)]


def is_close(value: Any, other: Any) -> bool:
    """Whether values are equal; floats, except for rounding."""
    if isinstance(value, float) and isinstance(other, int | float):
        return math.isclose(value, other, rel_tol=1e-6)  # GGUF has float32
    return bool(value == other)


def no_effect(*values: Any) -> Rule:
    """Accept values without an effect: these and anything false."""
    return lambda value, spec: not value or value in values


def if_true(test: Callable[[ModelSpec], Any]) -> Rule:
    """Check the model if the value is true."""
    return lambda value, spec: not value or bool(test(spec))


def equals(test: Callable[[ModelSpec], bool]) -> Rule:
    """Check that the value, as a bool, equals the result of `test`."""
    return lambda value, spec: bool(value) == test(spec)


def any_rope(test: Callable[[Any, RopeSpec], bool]) -> Rule:
    """Check that a rotary position of the model passes `test`, if there is any."""

    def rule(value: Any, spec: ModelSpec) -> bool:
        ropes = _ropes(spec)
        return not ropes or any(test(value, rope) for rope in ropes)

    return rule


def is_factor(value: Any, spec: ModelSpec) -> bool:
    """Whether a number is 1 or unset, or formulas multiply or divide by it."""
    if not value or value == 1:
        return True
    return any(is_close(float(value), n) or is_close(1 / float(value), n) for n in _numbers(spec))


def is_softcap(value: Any, spec: ModelSpec) -> bool:
    """Whether an attention or a formula bounds scores or logits by this number."""
    known = [*values_of(spec, "softcap"), *_numbers(spec)]
    return not value or any(is_close(float(value), each) for each in known if each is not None)


def has_value(*names: str, of: type | tuple[type, ...] = object) -> Rule:
    """Check that a block has the value in a field, or that no block has such a field."""

    def rule(value: Any, spec: ModelSpec) -> bool:
        built = values_of(spec, *names, of=of)
        return (of is not object and not built) or any(is_close(value, each) for each in built)

    return rule


def unset_or_value(*names: str, of: type | tuple[type, ...] = object) -> Rule:
    """Check that the value is unset, or that a block has it in a field."""
    return lambda value, spec: (
        not value or any(is_close(value, each) for each in values_of(spec, *names, of=of))
    )


def has_attention(field: str) -> Rule:
    """Check that the value is false, or that a block has this field set."""
    return if_true(lambda spec: values_of(spec, field) - {None, False})


def same_activation(value: Any, spec: ModelSpec) -> bool:
    """Whether a block has this activation; files mix up "gelu" and its tanh form."""
    name = ACTIVATION_ALIASES.get(value, value) if isinstance(value, str) else value
    built = {str(each).removesuffix("_tanh") for each in values_of(spec, "activation", "function")}
    if name in ("swiglu", "geglu") and values_of(spec, "activation", of=GatedMLPSpec):
        name = {"swiglu": "silu", "geglu": "gelu"}[name]
    return str(name).removesuffix("_tanh") in built or not built.isdisjoint(CLAMPED)


def same_window(value: Any, spec: ModelSpec) -> bool:
    """Whether a window is unset, longer than any text, or the window of a layer.

    For encoders half of it is on either side.
    """
    if not value or not isinstance(value, int | float):
        return not value
    reach, built = spec.dims.get("context"), values_of(spec, "window")
    halved = value // 2 + 1 if spec.decoder is None else value
    return (reach is not None and value >= reach) or value in built or halved in built


def _attentions(spec: ModelSpec) -> list[AttentionSpec | None]:
    """Return the attention of each layer; None for another kind, or for several."""
    found = []
    for layer in layers_of(spec):
        parts = [block for _, block in layer.modules if isinstance(block, AttentionSpec)]
        found.append(parts[0] if len(parts) == 1 else None)
    return found


def _indexer_top_k(spec: ModelSpec) -> list[int | None]:
    """Return the number of keys that the indexer of each layer chooses; None without an indexer."""
    found = []
    for layer in layers_of(spec):
        indexers = (getattr(block, "indexer", None) for _, block in layer.modules)
        found.append(next((indexer.top_k for indexer in indexers if indexer is not None), None))
    return found


def same_indexer_top_k(value: Any, spec: ModelSpec) -> bool:
    """Whether indexers choose this many keys for each query, or no text is longer."""
    reach = spec.dims.get("context")
    return (reach is not None and value >= reach) or set(_indexer_top_k(spec)) == {value}


def same_shared_indexers(value: Any, spec: ModelSpec) -> bool:
    """Whether the same layers reuse the keys that another layer chose.

    The value is a word or letter for each layer, or a period of layers that choose keys.
    """
    shared = [bool(layer.reusing) for layer in layers_of(spec)]
    if isinstance(value, str | list):
        expected = [word in ("shared", "S") for word in value]
        return expected[: len(shared)] == shared
    return value in (0, 1) or any(shared)


_INDEXED = {"indexed_attention", "deepseek_sparse_attention"}
_WINDOWED = dict.fromkeys(("full_attention", "global"), False)
_WINDOWED |= dict.fromkeys(("sliding_attention", "local", "chunked_attention"), True)
_NO_ATTENTION = {"linear_attention", "mamba", "conv"}


def same_layers(value: Any, spec: ModelSpec) -> bool:
    """Whether the same layers have a window.

    The value is a word of transformers for each layer; GPT-Neo's list of words with repetitions;
    or, in GGUF, a flag for each layer, or the period of layers without a window.
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
    expected = [_WINDOWED.get(each, each) if isinstance(each, str) else each for each in value]
    expected = [
        None if isinstance(each, str) and each in _NO_ATTENTION else each for each in expected
    ]
    if not any(expected) and None not in expected:
        return all(window in (None, 0, reach) for window in built)
    windowed = [None if window is None else window > 0 for window in built]
    return expected == [False if own else each for each, own in zip(windowed, latent, strict=True)]


def _window(attention: AttentionSpec) -> int:
    """Return the size of the window or chunk of an attention; 0: neither."""
    return attention.window or attention.chunk or 0


def _has_latent_attention(layer: LayerSpec) -> bool:
    return any(isinstance(block, LatentAttentionSpec) for _, block in layer.modules)


def same_rotated_layers(value: Any, spec: ModelSpec) -> bool:
    """Whether the layers whose number in `no_rope_layers` is not 0 have rotary positions."""
    rotates = [attn is not None and attn.position is not None for attn in _attentions(spec)]
    return not value or spec.follows is not None or [bool(each) for each in value] == rotates


def same_scaling(value: Any, spec: ModelSpec) -> bool:
    """Whether positions are scaled by the rule that a name or a table names."""
    table = value if isinstance(value, Mapping) else {"type": value}
    name = table.get("rope_type", table.get("type"))
    ropes = _ropes(spec)
    if name in ("default", "none", "mrope", None) or not ropes:
        return True
    name = {"su": "longrope"}.get(name, name)  # the name in Phi-3's first files
    return any(rope.scaling is not None and rope.scaling.rope_type == name for rope in ropes)


def same_stretch(field: str) -> Rule:
    """Check that the scaling of positions, if any, has this number in a field."""

    def rule(value: Any, spec: ModelSpec) -> bool:
        built = [getattr(rope.scaling, field) for rope in _ropes(spec) if rope.scaling]
        return not built or any(is_close(value, each) for each in built)

    return rule


def same_positions(value: Any, spec: ModelSpec) -> bool:
    """Whether positions are of this kind: "rope_gptj", "rotary", "alibi", "absolute"."""
    word = str(value)
    kinds = {"rope": RopeSpec, "rota": RopeSpec, "alib": AlibiSpec}
    if word in ("absolute", "learned", "none"):
        return True
    kind = kinds.get(word[:4])
    return kind is not None and any(isinstance(part, kind) for part in _positions(spec))


def same_share(value: Any, spec: ModelSpec) -> bool:
    """Whether this share of each head is rotated."""
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
    """Whether scores are divided by the square root of this number (`query_pre_attn_scalar`)."""
    if value == spec.dims.get("head_dim"):
        return True
    is_size = isinstance(value, int | float) and 0 < value < 1e30
    return is_size and any(
        is_close(value**-0.5, scale) for scale in values_of(spec, "scale") if scale
    )


def same_scale(value: Any, spec: ModelSpec) -> bool:
    """Whether scores are multiplied by this number; the default is 1 / sqrt(head_dim)."""
    usual = spec.dims.get("head_dim", 1) ** -0.5
    scales = values_of(spec, "scale", of=AttentionSpec)
    kinds = (AttentionSpec, LatentAttentionSpec)
    if not any(isinstance(block, kinds) for block in _blocks(spec)):
        return True
    return any(is_close(float(value), usual if each is None else each) for each in scales)


def has_both_distances(value: Any, spec: ModelSpec) -> bool:
    """Whether DeBERTa's kinds of distances, a list or words between bars, are both kinds."""
    words = value.split("|") if isinstance(value, str) else value
    return isinstance(words, list) and sorted(map(str, words)) == ["c2p", "p2c"]


def is_gated(spec: ModelSpec) -> bool:
    """Whether an attention has a gate."""
    return values_of(spec, "gate", of=AttentionSpec) - {None} != set()


def is_parallel(spec: ModelSpec) -> bool:
    """Whether an attention and a feed-forward are in the same line of a layer's formula."""
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
    """Whether branches begin with a norm exactly if the value is true."""
    first = next(iter(layers_of(spec)), None)
    if first is None:
        return True
    norms = [name for name, b in first.modules if isinstance(b, LayerNormSpec | RMSNormSpec)]
    after = re.compile(rf"\b({'|'.join(map(re.escape, norms)) or '-'})\(\s*x\s*\+")
    return bool(value) != bool(after.search(first.wiring.text))


def same_norm(value: Any, spec: ModelSpec) -> bool:
    """Whether the model has RMS norms exactly if the value, a name or a bool, means them."""
    says = "rms" in value if isinstance(value, str) else bool(value)
    return says == any(isinstance(block, RMSNormSpec) for block in _blocks(spec))


def unbounded_steps(value: Any, spec: ModelSpec) -> bool:
    """Whether bounds exclude no value of a softplus."""
    least, most = (float(x["__float__"]) if isinstance(x, Mapping) else x for x in value)
    return bool(least <= min(values_of(spec, "least"), default=0) and most >= 1000)


def has_positions(kind: type) -> Callable[[ModelSpec], bool]:
    """Return a test whether a model has positions of a kind."""
    return lambda spec: any(isinstance(part, kind) for part in _positions(spec))


# Scores are divided by the square root of a head's size.
scaled_scores = equals(lambda spec: values_of(spec, "scale", of=AttentionSpec) != {1.0})


# Attention to earlier tokens alone, or to later tokens as well.
def _is_causal(spec: ModelSpec) -> bool:
    """Whether no token attends to later tokens."""
    return spec.decoder is not None or values_of(spec, "causal", of=AttentionSpec) == {True}


causal = if_true(_is_causal)
not_causal = if_true(lambda spec: not _is_causal(spec))


def same_scoring(value: Any, spec: ModelSpec) -> bool:
    """Whether experts are scored by this function, a name or a number of GGUF."""
    names = {"1": "softmax", "2": "sigmoid", "noaux_tc": "sigmoid"}
    return not value or names.get(str(value), str(value)) in (
        values_of(spec, "scoring") or {"softmax"}
    )


def same_choice(value: Any, spec: ModelSpec) -> bool:
    """Whether experts are chosen by this method of DeepSeek's config.json."""
    if True in values_of(spec, "correction_bias"):
        return not value or value == "noaux_tc"
    groups = max(values_of(spec, "groups"), default=1)
    return not value or value in ("group_limited_greedy", "greedy" if groups == 1 else "")


def _dense(spec: ModelSpec) -> list[bool]:
    """Return whether each layer has no experts; empty for a model without experts.

    Empty for a draft head as well: its file describes the model that it was trained for.
    """
    if spec.follows is not None:
        return []
    dense = [
        not any(isinstance(block, MoESpec) for _, block in layer.modules)
        for layer in layers_of(spec)
    ]
    return [] if all(dense) else dense


def same_dense_prefix(value: Any, spec: ModelSpec) -> bool:
    """Whether exactly this many layers at the beginning have no experts."""
    dense = _dense(spec)
    first = dense.index(False) if dense else 0
    return not dense or min(value, len(dense)) == first


def same_moe_period(value: Any, spec: ModelSpec) -> bool:
    """Check an MoE layer period, or an explicit layer list.

    The list has 0 or "dense" for layers without experts.
    """
    dense = _dense(spec)
    if isinstance(value, list):
        return not dense or [each in (0, "dense") for each in value] == dense
    sparse = [i for i, without in enumerate(dense) if not without]
    return value in (0, 1) or len({i % value for i in sparse}) <= 1


def same_dense_layers(value: Any, spec: ModelSpec) -> bool:
    """Whether the layers with these numbers have no experts."""
    dense = _dense(spec)
    return not dense or not value or all(i < len(dense) and dense[i] for i in value)


def sigmoid_scoring(value: Any, spec: ModelSpec) -> bool:
    """Whether experts are scored by a sigmoid if the value is true."""
    return same_scoring("sigmoid" if value else "", spec)
