"""Abstract model: parameter names, shapes, axes and roles that follow from a specification.

Flax is imported, and modules are built, only if a program is traced or the parameters are not
cached yet: a start with compiled programs needs neither.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import numpy as np
from jax import Array

from jinfer.modelspec import blocks
from jinfer.modelspec.block import CachedState
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.quantization_table import Role
from jinfer.ops.attention import kv_cache
from jinfer.ops.attention.kv_cache import ENCODER, CacheShape, StateShape, cache_group

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from jinfer.disk_cache import DiskCache
    from jinfer.nn.activation_shapes import ActivationShape
    from jinfer.nn.lora_rows import AdapterSlots
    from jinfer.nn.transformer import Model

# Results per token; of an encoder "pooled" and "classes" per text.
Want = Literal["logits", "hidden", "pooled", "classes"]


@dataclass(eq=False)
class ModelModules:
    """The Flax modules of a specification, without parameters; built on first use.

    Attributes:
        adapters: their slots for LoRA adapters.
    """

    spec: ModelSpec
    dtype: DTypeLike
    adapters: AdapterSlots | None = None

    def make(self) -> None:
        """Builds the modules now: modules built inside a trace cannot be used in the next one."""
        _ = self.parts

    @cached_property
    def parts(self) -> tuple[Any, Any]:
        """Returns Flax's graph definition of the model, and the tree of its abstract parameters."""
        from flax import nnx

        from jinfer.nn.transformer import Model

        definition, state = nnx.split(Model(self.spec, self.dtype, self.adapters))
        return definition, state

    def merged(self, leaves: tuple[Array, ...], rounded: bool) -> Model:
        """Builds the model with these parameters; `rounded` as in `AbstractModel`."""
        from flax import nnx

        definition, state = self.parts
        tree = jax.tree.structure(state)
        model: Model = nnx.merge(definition, jax.tree.unflatten(tree, leaves))
        for stack in model.stacks.values():
            stack.rounded = rounded
        return model


@dataclass(frozen=True)
class AbstractModel:
    """A model without parameter values: shapes, types and axes, from which everything derives.

    Attributes:
        modules: its Flax modules.
        names: of the parameters, in the order of the tree's leaves.
        parameters: their shapes and types, in the same order: a `jax.ShapeDtypeStruct`, or a
            `QuantizedTensor` of them.
        axes: their logical axes, in the same order.
        normalized: parameters whose rows are normalized to length 1 at loading.
        roles: what each parameter is used for, in the same order.
        caches: module name -> sizes of its cache per token, or of its state per sequence.
        never: tokens that are never sampled.
        vocab: vocabulary size; 0 if the model has none.
        steady: as in `ModelSpec`.
        rounded: whether activations multiplied with bfloat16 may be rounded to it.
    """

    modules: ModelModules
    names: tuple[str, ...]
    parameters: tuple[Any, ...]
    axes: tuple[tuple[str, ...], ...]
    normalized: frozenset[str]
    roles: tuple[Role, ...]
    caches: dict[str, CacheShape | StateShape]
    never: tuple[int, ...] = ()
    vocab: int = 0
    steady: int | None = None
    rounded: bool = False

    def module(self, leaves: tuple[Array, ...]) -> Model:
        """Builds the model with these parameters; `leaves` in the order of `names`."""
        return self.modules.merged(leaves, self.rounded)

    @cached_property
    def layers(self) -> dict[str, slice]:
        """Layer name, such as "decoder.3" -> its slice of the flattened parameters."""
        stacks = "|".join(stack.name for stack in self.modules.spec.stacks)
        owner = re.compile(rf"({stacks})\.\d+(?=\.)")
        found: dict[str, slice] = {}
        end = 0
        for name, parameter in zip(self.names, self.parameters, strict=True):
            begin, end = end, end + len(jax.tree.leaves(parameter))
            if layer := owner.match(name):
                first = found.get(layer[0], slice(begin, begin))
                assert first.stop == begin, f"{name} is not adjacent to the others of its layer"
                found[layer[0]] = slice(first.start, end)
        return found

    @cached_property
    def activations(self) -> dict[str, ActivationShape]:
        """The values that can be captured by name, with their shapes and axes."""
        from jinfer.nn.activation_shapes import activation_shapes

        return activation_shapes(self)

    @property
    def has_cross_attention(self) -> bool:
        """Whether the decoder reads an encoder's output."""
        return any(shape.group == ENCODER for shape in self.caches.values())

    def described(self) -> str:
        """Cache key of programs compiled for this model, without the code version."""
        spec = self.modules.spec
        # Parameters of equal shape and type are often one object: its text is cached.
        alike = {id(parameter): parameter for parameter in self.parameters}
        texts = {key: repr(parameter) for key, parameter in alike.items()}
        parameters = ", ".join(texts[id(parameter)] for parameter in self.parameters)
        here: tuple[Any, ...] = (self.modules.dtype, self.caches)
        here += () if self.modules.adapters is None else (self.modules.adapters,)
        others = (spec.shared, spec.stacks, *here, self.never, self.steady, self.rounded)
        return f"{others!r}\n{parameters}"


def build_abstract_model(
    spec: ModelSpec,
    dtype: DTypeLike,
    kept: DiskCache | None = None,
    adapters: AdapterSlots | None = None,
) -> AbstractModel:
    """Builds the abstract model of a specification.

    Args:
        dtype: of the weights and of the computation; norms are float32.
        kept: cache of the parameter descriptions, so that the next start builds no modules.
        adapters: slots for LoRA adapters, whose matrices are parameters of the model.
    """
    modules = ModelModules(spec, dtype, adapters)
    found = _cached_parameters(modules, kept) if kept is not None else _parameters(modules)
    return AbstractModel(
        modules=modules,
        names=tuple(one.name for one in found),
        parameters=tuple(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in found),
        axes=tuple(tuple(one.axes) for one in found),
        normalized=frozenset(one.name for one in found if one.normalize),
        roles=tuple(one.role for one in found),
        caches=dict(_cache_shapes(spec)),
        never=_suppressed_tokens(spec),
        vocab=spec.dims.get("vocab", 0),
        steady=spec.fixed_rope_length,
    )


def with_adapters(model: AbstractModel, adapters: AdapterSlots) -> AbstractModel:
    """Builds the same model with slots for LoRA adapters."""
    known = dict(zip(model.names, model.parameters, strict=True))
    built = build_abstract_model(model.modules.spec, model.modules.dtype, adapters=adapters)
    parameters = (
        known.get(name, own) for name, own in zip(built.names, built.parameters, strict=True)
    )
    return replace(built, parameters=tuple(parameters), never=model.never, rounded=model.rounded)


class _Parameter(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    normalize: bool
    role: Role


def _cached_parameters(modules: ModelModules, kept: DiskCache) -> list[_Parameter]:
    key = repr(("parameters", modules.spec.shared, modules.spec.stacks, modules.dtype))
    key += "" if modules.adapters is None else repr(modules.adapters)
    if (content := kept.get(key)) is not None:
        return [_Parameter(*one) for one in json.loads(content)]
    found = _parameters(modules)
    kept.put(key, json.dumps(found).encode())
    return found


def _parameters(modules: ModelModules) -> list[_Parameter]:
    """Returns the modules' parameters, in the order of the tree's leaves."""
    from flax import nnx

    _, state = modules.parts
    flat = nnx.to_flat_state(state)
    metadata = {_name(path): variable.get_metadata() for path, variable in flat}
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = _name(tuple(_key(entry) for entry in path))
        of = metadata[name]
        type_name = np.dtype(leaf.dtype).name
        found.append(
            _Parameter(name, leaf.shape, type_name, of["axes"], of["normalize"], of["role"])
        )
    return found


def _key(entry: Any) -> Any:
    """Returns the plain key of an entry in a tree path."""
    return getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", None)))


def _name(path: tuple[Any, ...]) -> str:
    """("stacks", "decoder", "layers", 3, "modules", "attn", "q", "weight") -> "decoder.3...."."""
    structure = ("shared", "stacks", "layers", "modules", "value", None)
    return ".".join(str(part) for part in path if part not in structure)


def _suppressed_tokens(spec: ModelSpec) -> tuple[int, ...]:
    own = spec.decoder.modules if spec.decoder else ()
    heads = (block for _, block in (*spec.shared, *own) if isinstance(block, blocks.HeadSpec))
    never = [token for head in heads for token in head.never or ()]
    if spec.image is not None and isinstance(spec.image.placeholder, int):
        never.append(spec.image.placeholder)
    return tuple(never)


def _cache_shapes(spec: ModelSpec) -> Iterator[tuple[str, CacheShape | StateShape]]:
    for i, layer in enumerate(spec.decoder.layers if spec.decoder else ()):
        for name, block in layer.modules:
            own = block.cached()
            if isinstance(own, CachedState):
                yield f"decoder.{i}.{name}", StateShape(own.arrays)
            elif own is not None:
                group = ENCODER if own.encoded else cache_group(own.window)
                widths = own.heads, own.key_width, own.value_width
                plain = not (own.encoded or own.index_width or own.score_mod)
                useful = plain and kv_cache.int8_keys_are_useful(*widths[1:], own.window)
                shape = CacheShape(*widths, group, own.window, own.index_width, useful)
                yield f"decoder.{i}.{name}", shape
