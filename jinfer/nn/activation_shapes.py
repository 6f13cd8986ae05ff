"""Activation shapes: the named values of a model, found by abstract evaluation.

Nothing is computed: the forward pass is traced over abstract arrays, with a tap on every value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jinfer.nn.activation_taps import EVERY, ActivationTaps
from jinfer.nn.forward_context import ForwardBatch
from jinfer.ops.attention.kv_cache import BLOCK, abstract_cache
from jinfer.ops.backend import target_platform


class TracedModel(Protocol):
    """The part of `AbstractModel` that is traced."""

    @property
    def modules(self) -> Any: ...
    @property
    def parameters(self) -> tuple[Any, ...]: ...
    @property
    def caches(self) -> Any: ...
    def module(self, leaves: Any, /) -> Any: ...


# Unusual sizes, by which the axes are recognized.
_TOKENS, _BLOCKS = 1009, 19

# A module's part -> its axes after the token axes.
_PARTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("q", "k", "v", "heads"), ("heads", "head_dim")),
    **dict.fromkeys(("scores", "pattern"), ("heads", "keys")),
    **dict.fromkeys(("gate", "up", "hidden"), ("mlp",)),
    "router": ("experts",),
    **dict.fromkeys(("experts", "weights"), ("chosen",)),
    "latent": ("latent",),
}
# Names of the axes of a recurrent block's state, by their number.
_STATES = {1: ("channels",), 2: ("rows", "columns"), 3: ("heads", "rows", "columns")}


class ActivationShape(NamedTuple):
    """The shape of a named value.

    Attributes:
        sizes: size of each axis; for a free axis its name, "tokens" or "keys".
        axes: names of the axes.
    """

    sizes: tuple[int | str, ...]
    axes: tuple[str, ...]

    @property
    def of_token(self) -> tuple[int, ...] | None:
        """The shape of one token's value; None if another axis is free, or without token axis."""
        own = self.sizes[1:]
        if self.axes[:1] != ("tokens",):
            return None
        return tuple(size for size in own if isinstance(size, int))


def activation_shapes(model: TracedModel) -> dict[str, ActivationShape]:
    """Returns the values of a model by name, in the order of their computation."""
    found = dict[str, ActivationShape]()
    for stack in model.modules.spec.stacks:
        values = _encoder(model) if stack.name == "encoder" else _decoder(model)
        found |= {name: _shape(name, value.shape) for name, value in _in_order(values)}
    return found


def _decoder(model: TracedModel) -> Mapping[str, jax.ShapeDtypeStruct]:
    ints = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    tables = {shape.group: ints((1, _BLOCKS)) for shape in model.caches.values()}
    cache = abstract_cache(model.caches, _BLOCKS, jnp.float32)

    def run(leaves: Any, cache: Any, tokens: Any, tables: Any, one: Any) -> Any:
        batch = ForwardBatch.flat(jnp.zeros_like(tokens), tokens, one, tables, one)
        batch = batch._replace(taps=ActivationTaps(EVERY))
        return model.module(leaves).decode_all(tokens, batch, cache)[0]["captured"]

    return _evaluated(model, run, cache, ints((_TOKENS,)), tables, ints((1,)))


def _encoder(model: TracedModel) -> Mapping[str, jax.ShapeDtypeStruct]:
    ints = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)

    def run(leaves: Any, tokens: Any, lengths: Any) -> Any:
        taps = ActivationTaps(EVERY)
        return model.module(leaves).encode(tokens, tokens, lengths, taps)["captured"]

    return _evaluated(model, run, ints((1, _TOKENS)), ints((1,)))


def _evaluated(model: TracedModel, run: Any, *arguments: Any) -> Any:
    model.modules.make()
    # Without custom calls, which take longer to trace; shapes are the same.
    with target_platform("xla"):
        return jax.eval_shape(run, model.parameters, *arguments)


def _in_order(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Sort key: the stem, then layer by layer, then the head."""

    def place(name: str) -> tuple[int, int]:
        first, second, *_ = [*name.removeprefix("encoder.").split("."), ""]
        number = second if first == "decoder" else first
        if number.isdigit():
            return 1, int(number)
        return (0, 0) if "stem" in (first, second) or first == "embed" else (2, 0)

    # `sorted` keeps the order of equal ones.
    return iter(sorted(values.items(), key=lambda item: place(item[0])))


def _shape(name: str, shape: tuple[int, ...]) -> ActivationShape:
    """Returns the shape of a value [1, ...] without its first axis; free axes by name."""
    part, deep = name.rpartition(".")[2].partition("@")[0], name.count(".") >= 3
    if shape[1:2] != (_TOKENS,):
        own = shape[1:]
        named = ("hidden",) if len(own) == 1 and not deep else _STATES.get(len(own))
        return ActivationShape(own, named or tuple(f"axis {n}" for n in range(len(own))))
    rest = shape[2:]
    axes = _PARTS.get(part, ()) if deep else ("vocab",) if name.endswith("logits") else ()
    if len(axes) != len(rest):
        axes = ("hidden",) if len(rest) == 1 else tuple(f"axis {n}" for n in range(len(rest)))
    if axes == ("heads", "keys"):
        return ActivationShape((rest[0], "tokens", "keys"), ("heads", "tokens", "keys"))
    return ActivationShape(("tokens", *rest), ("tokens", *axes))


assert _BLOCKS * BLOCK != _TOKENS, "axes are recognized by their sizes"
