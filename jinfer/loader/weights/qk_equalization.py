"""Equalization of queries and keys: channels of like magnitudes, for a KV cache of few bits.

A block of a quantized cache has a single scale: a channel of the keys that is much larger than
others leaves them few levels. Scores do not change if a channel of the keys is divided by the
factor of the same channel of the queries; half of the difference in magnitude goes to each side, as
SmoothQuant does with activations and weights (arXiv 2211.10438). The factors are powers of two,
computed from the weights on loading and multiplied into them, so nothing is rounded, and nothing is
computed later. Channels that are rotated together share a factor. `jinfer.ops.attention.hadamard`
spreads the rest of a large channel over its head.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jinfer.loader.weights.plan_weights import WeightPlan
from jinfer.loader.weights.power_scaling import Magnitude, PowerScale, magnitude
from jinfer.loader.weights.read_parameter import Selection
from jinfer.loader.weights.read_weights import read
from jinfer.modelspec.attention_blocks import AttentionSpec, CrossAttentionSpec, ExpertAttentionSpec
from jinfer.modelspec.layer_spec import shared_keys
from jinfer.modelspec.position_blocks import RopeSpec
from jinfer.nn.abstract_model import AbstractModel
from jinfer.quant import QuantFormat

if TYPE_CHECKING:
    from jaxtyping import Int

_log = logging.getLogger("jinfer")

_LARGE = 2.0  # times the median of its head: what a channel has to have for anything to be done
_LEAST = 1.0  # octaves that a channel is moved by, else it stays as it is
_HELD = 2.0  # times the error of keys without large channels, as much as a layer may be left with
_LIMIT = float(np.finfo(np.float16).max) / 2


@dataclass(frozen=True)
class Heads:
    """The heads of an attention whose keys and queries can be equalized.

    Attributes:
        queries, keys: number of heads.
        size: channels of a head.
        rope: how channels are rotated.
        normed: queries and keys have a norm, whose weight is scaled...
        shared: ...and has the same numbers for all heads...
        by_head: ...or the shape [heads, size]...
        offset: ...to which this is added.
    """

    queries: int
    keys: int
    size: int
    rope: RopeSpec | None = None
    normed: bool = False
    shared: bool = False
    by_head: bool = False
    offset: float = 0.0

    def names(self, attention: str, letter: str) -> tuple[str, str]:
        """The parameters that give queries "q" or keys "k" their magnitude: factors, and a bias."""
        module = f"{attention}.{letter}" + ("_norm" if self.normed else "")
        return f"{module}.weight", f"{module}.bias"


def equalized(
    plan: WeightPlan, selected: Selection | None = None, *, progress: bool = False
) -> WeightPlan:
    """Add scales of queries and keys to a plan if the KV cache is quantized.

    A warning names the attentions whose keys are stored with larger errors than usual.

    Args:
        selected: the parameters to load; None: all.
        progress: show a bar if weights have to be quantized first.
    """
    if not isinstance(plan.kv_cache, QuantFormat):
        return plan
    selected = dict.fromkeys(plan.plain.names) if selected is None else selected
    found = {n: h for n, h in attentions(plan.plain) if h.names(n, "k")[0] in selected}
    keys = _magnitudes(plan, found, "k", progress, selected)
    large = {name: found[name] for name, own in keys.items() if _is_large(found[name], own)}
    scales, beyond = dict[str, PowerScale](), list[str]()
    for name, queries in _magnitudes(plan, large, "q", progress, selected).items():
        heads = found[name]
        exponents, error = exponents_of(heads, queries, keys[name])
        beyond += [name] if error > _HELD else []
        powers = {"q": np.repeat(exponents, heads.queries // heads.keys, axis=0), "k": -exponents}
        for letter, rows in powers.items():
            weight, bias = heads.names(name, letter)
            own = rows[0] if heads.shared else rows if heads.by_head else rows.reshape(-1)
            scales |= {weight: PowerScale(own, heads.offset), bias: PowerScale(own, 0.0)}
    if beyond:
        _log.warning(
            "%s: quantization.kv_cache = %s keeps the keys of %s worse than usual: some of their "
            "channels are far larger than the others; f16 keeps them",
            plan.plain.modules.spec.path,
            plan.kv_cache.name,
            ", ".join(beyond),
        )
    return replace(
        plan, scales={name: scale for name, scale in scales.items() if scale.exponents.any()}
    )


def attentions(model: AbstractModel) -> Iterator[tuple[str, Heads]]:
    """Each such attention of a model, by name; those that clip keys have none to move."""
    decoder = model.modules.spec.decoder
    layers = decoder.layers if decoder else ()
    shared = {(owner, name) for (_, name), owner in shared_keys(layers).items()}
    for i, layer in enumerate(layers):
        modules: tuple[tuple[str, Any], ...] = layer.modules
        for name, block in modules:
            # Other layers' queries would have to be scaled, too, or those of each expert.
            if (i, name) in shared or isinstance(block, ExpertAttentionSpec):
                continue
            match block:
                case AttentionSpec(
                    clip=None, kv_layer=None, tied_values=False, low_rank=None, qk_norm=norm
                ):
                    heads = Heads(
                        block.heads,
                        block.kv_heads,
                        block.head_dim,
                        block.position if isinstance(block.position, RopeSpec) else None,
                        normed=norm is not None,
                        shared=norm is not None and norm.over == "head",
                        by_head=norm is not None and norm.over == "heads",
                        offset=1.0 if norm is not None and norm.plus_one else 0.0,
                    )
                case CrossAttentionSpec():
                    heads = Heads(block.heads, block.keys, block.head_dim)
                case _:
                    continue
            yield f"decoder.{i}.{name}", heads


def exponents_of(
    heads: Heads, queries: Sequence[Magnitude], keys: Sequence[Magnitude]
) -> tuple[Int[np.ndarray, "kv_heads size"], float]:
    """Return the powers of two that multiply queries and divide keys, and the remaining error.

    Args:
        queries, keys: magnitudes of their parameters, for inputs of unit variance.

    Returns:
        The exponents, and the error relative to heads whose channels all equal the median.
    """
    k = _squares(heads, keys, heads.keys)
    q = _squares(heads, queries, heads.queries).reshape(heads.keys, -1, heads.size).mean(axis=1)
    tiny = np.finfo(np.float64).tiny
    octaves = (np.log2(np.maximum(k, tiny)) - np.log2(np.maximum(q, tiny))) / 4
    octaves = octaves - np.median(octaves, axis=1, keepdims=True)
    exponents = np.where(np.abs(octaves) < _LEAST, 0, np.rint(octaves)).astype(np.int64)
    above, below = (min(map(_doublings, side)) for side in (queries, keys))
    products = np.sqrt(q * k)
    errors = products.mean(axis=1) / np.maximum(np.median(products, axis=1), tiny)
    return np.clip(exponents, -below, above), float(errors.mean())


def _is_large(heads: Heads, keys: Sequence[Magnitude]) -> bool:
    """Whether a channel of the keys is much larger than the others of its head."""
    k = _squares(heads, keys, heads.keys)
    return bool((k > _LARGE**2 * np.median(k, axis=1, keepdims=True)).any())


def _magnitudes(
    plan: WeightPlan, some: Mapping[str, Heads], letter: str, progress: bool, selected: Selection
) -> dict[str, list[Magnitude]]:
    """Measure the parameters of queries or keys, by attention; not those that layers share."""
    owners = {
        full: (name, heads) for name, heads in some.items() for full in heads.names(name, letter)
    }
    known, shared = dict[str, list[Magnitude]](), set[str]()

    def look(named: Sequence[str], values: Any) -> None:
        name, heads = owners[next(full for full in named if full in owners)]
        if len(named) > 1:  # parameters that layers share do not change
            shared.add(name)
        else:
            if heads.normed:
                values = np.asarray(values).reshape(-1)
            offset = heads.offset if named[0].endswith(".weight") else 0.0
            known.setdefault(name, []).append(magnitude(values, offset))

    of_these = dict.fromkeys(n for n in plan.plain.names if n in owners and n in selected)
    if of_these:
        read(plan, look, of_these, progress=progress)
    return {name: magnitudes for name, magnitudes in known.items() if name not in shared}


def _squares(heads: Heads, parts: Sequence[Magnitude], count: int) -> np.ndarray:
    """Mean square of each channel [heads, size], alike for those that are rotated together."""
    found = np.zeros((count, heads.size))
    for part in parts:
        found += part.squares.reshape(-1, heads.size)
    if heads.rope is not None:
        end, pairs = heads.rope.dim, heads.rope.dim // 2
        adjacent = heads.rope.pairs == "adjacent"
        paired = found[:, :end].reshape(count, *((pairs, 2) if adjacent else (2, pairs)))
        both = paired.mean(axis=2 if adjacent else 1, keepdims=True)
        found[:, :end] = np.broadcast_to(both, paired.shape).reshape(count, end)
    return found


def _doublings(part: Magnitude) -> int:
    """Return how often the numbers can be doubled in their type."""
    return max(0, int(np.log2(_LIMIT / part.largest))) if part.largest else 64
