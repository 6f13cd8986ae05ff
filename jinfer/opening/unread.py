"""What a checkpoint says of itself and nothing read: all of it, and what would change answers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

from jinfer.spec.blocks import (
    ACTIVATION_ALIASES,
    MLP,
    Attention,
    Block,
    GatedMLP,
    MixtureOfExperts,
    Rope,
)
from jinfer.spec.model import ModelSpec

# Read by others than specifications.
_ELSEWHERE = frozenset(
    {"architectures", "quantization_config", "text_config", "eos_token_id"}
    | {"decoder_start_token_id", "forced_bos_token_id", "general", "tokenizer", "split"}
)

_NAME = re.compile(r"\w+")

type _Rule = Callable[[Any, Mapping[str, Any], ModelSpec], bool]


def unread(config: Mapping[str, Any], asked: Set[str]) -> dict[str, Any]:
    """The keys that nothing looked up and that have a value, with it.

    Of a table of which some keys were looked up, the others, with dots.

    Args:
        config: config.json, or GGUF's metadata.
        asked: the keys that were looked up, with dots where they are in tables.
    """
    return dict(_unread(config, asked, ""))


def _unread(table: Mapping[str, Any], asked: Set[str], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        key = f"{prefix}{name}"
        if value is None or key in asked or key.partition(".")[0] in _ELSEWHERE:
            continue
        if isinstance(value, Mapping) and any(other.startswith(f"{key}.") for other in asked):
            yield from _unread(value, asked, f"{key}.")
        else:
            yield key, value


def consequences(
    keys: Mapping[str, Any], config: Mapping[str, Any], spec: ModelSpec
) -> dict[str, str]:
    """Keys of `unread` that are known to change the computation -> how.

    Those are left out whose value changes nothing, or says what the specification says as well.
    """
    architecture = f"{config.get('general.architecture', '')}."
    found = {}
    for key, value in keys.items():
        known = _KNOWN.get(key.removeprefix(architecture))
        if known is not None and not known[1](value, config, spec):
            found[key] = known[0]
    return found


def _blocks(spec: ModelSpec) -> Iterator[Block]:
    for _, block in spec.shared:
        yield block
    for stack in spec.stacks:
        for modules in (stack.modules, *(layer.modules for layer in stack.layers)):
            yield from (block for _, block in modules)


def _values(spec: ModelSpec, *names: str) -> set[Any]:
    """What the blocks of a model have in these fields, and their positions."""
    parts = [part for b in _blocks(spec) for part in (b, getattr(b, "position", None))]
    return {getattr(part, name) for part in parts for name in names if hasattr(part, name)}


def _usual(*values: Any) -> _Rule:
    """Values that change nothing; what is off never does."""
    return lambda value, config, spec: not value or value in values


def _is_built(*names: str) -> _Rule:
    """A value that a block of the model has in one of these fields."""
    return lambda value, config, spec: any(_near(value, each) for each in _values(spec, *names))


def _near(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, int | float):
        return math.isclose(value, other, rel_tol=1e-6)  # GGUF has float32
    return bool(value == other)


def _same_activation(value: Any, config: Mapping[str, Any], spec: ModelSpec) -> bool:
    """Whether a block has it. Files say gelu and mean its tanh form, so these are one."""
    name = ACTIVATION_ALIASES.get(value, value) if isinstance(value, str) else value
    built = {str(each).removesuffix("_tanh") for each in _values(spec, "activation", "function")}
    return str(name).removesuffix("_tanh") in built or "clamped_swiglu" in built


def _no_window(value: Any, config: Mapping[str, Any], spec: ModelSpec) -> bool:
    reaches = spec.dims.get("context")
    is_off = not value or config.get("use_sliding_window") is False
    return is_off or (reaches is not None and isinstance(value, int) and value >= reaches)


def _plain_layers(value: Any, config: Mapping[str, Any], spec: ModelSpec) -> bool:
    return isinstance(value, list) and all(each == "full_attention" for each in value)


def _no_scaling(value: Any, config: Mapping[str, Any], spec: ModelSpec) -> bool:
    table = value if isinstance(value, Mapping) else {"type": value}
    return not value or table.get("rope_type", table.get("type")) in ("default", "none", None)


def _usual_query_scale(value: Any, config: Mapping[str, Any], spec: ModelSpec) -> bool:
    if value == spec.dims.get("head_dim"):
        return True
    is_size = isinstance(value, int | float) and 0 < value < 1e30
    return is_size and any(_near(value**-0.5, scale) for scale in _values(spec, "scale") if scale)


def _turns(value: Any, config: Mapping[str, Any], spec: ModelSpec) -> bool:
    """Without rotary positions it does not matter how they turn."""
    ropes = [part for b in _blocks(spec) if isinstance(part := getattr(b, "position", None), Rope)]
    return not ropes or any(_near(value, rope.theta) for rope in ropes)


def _same_scoring(value: Any, config: Mapping[str, Any], spec: ModelSpec) -> bool:
    """Whether experts are scored so; GGUF numbers the functions."""
    name = {"1": "softmax", "2": "sigmoid"}.get(str(value), str(value))
    return not value or name in (_values(spec, "scoring") or {"softmax"})


def _same_choice(value: Any, config: Mapping[str, Any], spec: ModelSpec) -> bool:
    """Whether experts are chosen by that method, in DeepSeek's words."""
    if True in _values(spec, "correction_bias"):
        return not value or value == "noaux_tc"
    groups = max(_values(spec, "groups"), default=1)
    return not value or value in ("group_limited_greedy", "greedy" if groups == 1 else "")


def _is_parallel(value: Any, config: Mapping[str, Any], spec: ModelSpec) -> bool:
    """Whether a line of a layer's formula calls an attention and a feed-forward."""
    layers = [layer for stack in spec.stacks for layer in stack.layers]
    return not value or any(
        {"attention", "feed"}
        <= {_sort(dict(layer.modules).get(name)) for name in _NAME.findall(line)}
        for layer in layers
        for line in layer.wiring.text.splitlines()
    )


def _sort(block: Block | None) -> str:
    feed = isinstance(block, MLP | GatedMLP | MixtureOfExperts)
    return "feed" if feed else "attention" if isinstance(block, Attention) else ""


def _is_causal(value: Any, config: Mapping[str, Any], spec: ModelSpec) -> bool:
    return value is not False or spec.decoder is None


_WINDOW = ("attention reaches only so far back", _no_window)
_EPS = ("the small number that norms add", _is_built("eps"))
_THETA = ("how fast rotary positions turn", _turns)
_SCALING = ("rotary positions are stretched", _no_scaling)
_SHARE = ("only a part of each head is rotated", _usual(1))
_ACTIVATION = ("the activation function", _same_activation)
_SOFTCAP = ("it bounds scores or logits", _is_built("softcap"))
_SCALE = ("numbers are multiplied by it", _usual(1))
_QK_NORM = ("queries and keys are normed", _usual())
_ALIBI = ("attention has linear biases", _usual())
_CLIP = ("queries, keys and values are clipped", _usual())
_LAYERS = ("layers differ from each other", _plain_layers)
_PARALLEL = ("attention and feed-forward stand side by side", _is_parallel)
_ROUTING_HOW = "how experts are chosen and weighed"
_ROUTING = (_ROUTING_HOW, _usual(1))
_SCORING = (_ROUTING_HOW, _same_scoring)
_DENSE = ("some layers have no experts", _usual(1))
_SHARING = ("layers use what others computed", _usual())
_CLAMP = ("the gated unit is clamped", _is_built("limit", "alpha"))

# Keys that change the computation -> how, and which values change nothing.
_KNOWN: dict[str, tuple[str, _Rule]] = {
    **dict.fromkeys(("sliding_window", "attention.sliding_window", "window_size"), _WINDOW),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"), _EPS),
    **dict.fromkeys(("layernorm_epsilon", "norm_epsilon"), _EPS),
    **dict.fromkeys(("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"), _EPS),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope.freq_base"), _THETA),
    **dict.fromkeys(("rope_parameters.rope_theta", "rope_local_base_freq"), _THETA),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "rope.scaling.type"), _SCALING),
    "rope_parameters.rope_type": _SCALING,
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "rope_pct"), _SHARE),
    "rotary_dim": ("only a part of each head is rotated", _is_built("dim")),
    "rope.dimension_count": ("only a part of each head is rotated", _is_built("dim")),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), _ACTIVATION),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _SOFTCAP),
    **dict.fromkeys(("logit_scale", "logits_scaling", "lm_head_multiplier"), _SCALE),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "key_multiplier"), _SCALE),
    **dict.fromkeys(("scale_emb", "scale_depth", "embedding_scale", "residual_scale"), _SCALE),
    **dict.fromkeys(("dim_model_base", "scale_embedding", "attention.scale"), _SCALE),
    "attention_multiplier": ("scores are multiplied by it", _is_built("scale")),
    "query_pre_attn_scalar": ("scores are divided by its root", _usual_query_scale),
    **dict.fromkeys(("use_qk_norm", "qk_layernorm", "use_qk_layernorm", "qk_norm"), _QK_NORM),
    **dict.fromkeys(("alibi", "use_alibi", "attention.max_alibi_bias"), _ALIBI),
    **dict.fromkeys(("clip_qkv", "attention.clamp_kqv"), _CLIP),
    **dict.fromkeys(("layer_types", "attention_layers", "no_rope_layers"), _LAYERS),
    **dict.fromkeys(("parallel_attn", "use_parallel_residual"), _PARALLEL),
    "apply_residual_connection_post_layernorm": ("residuals start after the norm", _usual()),
    "position_embedding_type": ("another kind of positions", _usual("absolute", "rope", "rotary")),
    "scale_attn_by_inverse_layer_idx": ("scores are divided by the layer's number", _usual()),
    **dict.fromkeys(("norm_topk_prob", "routed_scaling_factor", "n_group"), _ROUTING),
    **dict.fromkeys(("expert_weights_scale", "expert_weights_norm"), _ROUTING),
    "moe_router_use_sigmoid": _ROUTING,
    **dict.fromkeys(("scoring_func", "expert_gating_func"), _SCORING),
    "topk_method": (_ROUTING_HOW, _same_choice),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step"), _DENSE),
    **dict.fromkeys(("mlp_only_layers", "leading_dense_block_count"), _DENSE),
    **dict.fromkeys(("swiglu_limit", "swiglu_alpha"), _CLAMP),
    "attention_chunk_size": ("attention sees only its own piece of the text", _usual()),
    "attn_temperature_tuning": ("scores depend on how long the text is", _usual()),
    **dict.fromkeys(("num_kv_shared_layers", "hidden_size_per_layer_input"), _SHARING),
    "use_bidirectional_attention": ("tokens see those after them", _usual()),
    "is_causal": ("tokens see those after them", _is_causal),
}
