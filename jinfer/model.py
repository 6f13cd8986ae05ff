"""The model: a specification built into modules, and its one function, the forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jinfer.cache import Cache
from jinfer.nn.attention import Attention, Step
from jinfer.nn.build import build_module
from jinfer.nn.linear import Head
from jinfer.spec import blocks
from jinfer.spec.model import LayerSpec, ModelSpec, StackSpec

Want = Literal["last", "logits", "hidden"]


class Layer(nnx.Module):
    """One layer: its modules, applied as its wiring says."""

    def __init__(self, spec: LayerSpec, dtype: DTypeLike) -> None:
        self.wiring = spec.wiring
        self.modules = nnx.Dict({name: build_module(b, dtype) for name, b in spec.modules})

    def __call__(
        self,
        x: Float[Array, "batch tokens hidden"],
        tokens: Int[Array, "batch tokens"],
        step: Step,
        cache: Cache,
        shared: dict[str, nnx.Module],
    ) -> tuple[Float[Array, "batch tokens hidden"], Cache]:
        """The layer's output, and its attentions' caches, keyed by module name."""
        cache = dict(cache)

        def call(name: str, arguments: list[Any]) -> Any:
            module: Any = self.modules[name] if name in self.modules else shared[name]
            if isinstance(module, Attention):
                (y,) = arguments
                out, cache[name] = module(y, step, cache[name])
                return out
            return module(*arguments)

        inputs = {"x": x, "tokens": tokens, "positions": step.positions}
        return self.wiring.run(inputs, call)[0], cache


@partial(jax.jit, static_argnums=0)
def _run_layer(
    definition: Any, state: Any, x: Array, tokens: Array, step: Step, cache: Cache
) -> tuple[Array, Cache]:
    """A layer as a function of its own, so that equal layers are traced and lowered once."""
    layer, shared = nnx.merge(definition, state)
    return layer(x, tokens, step, cache, shared)


class Stack(nnx.Module):
    """A stem, layers and a head."""

    def __init__(self, spec: StackSpec, dtype: DTypeLike) -> None:
        self.name = spec.name
        self.stem, self.head = spec.stem, spec.head
        self.layers = nnx.List([Layer(layer, dtype) for layer in spec.layers])
        self.modules = nnx.Dict({name: build_module(b, dtype) for name, b in spec.modules})

    def module(self, name: str, shared: nnx.Dict) -> Any:
        """A module of the stem or the head."""
        return self.modules[name] if name in self.modules else shared[name]


class Model(nnx.Module):
    """A whole model. Parameters are named `embed.weight`, `decoder.3.attn.q.weight`, ..."""

    def __init__(self, spec: ModelSpec, dtype: DTypeLike) -> None:
        self.shared = nnx.Dict({name: build_module(b, dtype) for name, b in spec.shared})
        self.stacks = nnx.Dict({stack.name: Stack(stack, dtype) for stack in spec.stacks})

    def __call__(
        self,
        tokens: Int[Array, "batch tokens"],
        step: Step,
        last: Int[Array, " batch"],
        cache: Cache,
        want: Want,
    ) -> tuple[Float[Array, "batch ..."], Cache]:
        """The decoder's forward pass over new tokens.

        Args:
            tokens: new tokens; a row may be padded at its end.
            step: where they stand.
            last: index of each row's last token that counts.
            cache: keys and values of the tokens before; comes back with the new ones in it.
            want: "last": logits after the last token [batch, vocab]; "logits": after every token
                [batch, tokens, vocab]; "hidden": last hidden states [batch, tokens, hidden].
        """
        stack = self.stacks["decoder"]
        shared = self.shared

        def call(name: str, arguments: list[Any]) -> Any:
            module = stack.module(name, shared)
            if isinstance(module, Head):
                (y,) = arguments
                hidden["hidden"] = y
                embed: Any = shared["embed"] if module.tied else None
                return module(y, embed)
            return module(*arguments)

        hidden: dict[str, Array] = {}
        x, _ = stack.stem.run({"tokens": tokens, "positions": step.positions}, call)
        cache = dict(cache)
        for i, layer in enumerate(stack.layers):
            prefix = f"{stack.name}.{i}."
            own = {k.removeprefix(prefix): v for k, v in cache.items() if k.startswith(prefix)}
            used = {n: shared[n] for n in layer.wiring.calls if n not in layer.modules}
            definition, state = nnx.split((layer, used))
            x, own = _run_layer(definition, state, x, tokens, step, own)
            cache |= {prefix + name: part for name, part in own.items()}
        if want == "last":
            x = jnp.take_along_axis(x, last[:, None, None], axis=1)
        out, assigned = stack.head.run({"x": x}, call)
        if want == "hidden":
            return assigned.get("hidden", hidden.get("hidden", out)).astype(jnp.float32), cache
        return (out[:, 0] if want == "last" else out), cache


@dataclass(frozen=True)
class AbstractModel:
    """A model without its numbers: shapes, types and axes, from which everything derives.

    Attributes:
        definition: Flax's static part of the module.
        state: the tree of abstract parameters.
        names: of the parameters, in the order of the tree's leaves.
        parameters: their shapes and types, in the same order.
        axes: their logical axes, in the same order.
        attention: name of each attention -> (kv_heads, head_dim) of its cache.
    """

    definition: Any
    state: Any
    names: tuple[str, ...]
    parameters: tuple[jax.ShapeDtypeStruct, ...]
    axes: tuple[tuple[str, ...], ...]
    attention: dict[str, tuple[int, int]]

    def module(self, leaves: tuple[Array, ...]) -> Model:
        """The module with these parameters; `leaves` in the order of `names`."""
        tree = jax.tree.structure(self.state)
        return nnx.merge(self.definition, jax.tree.unflatten(tree, leaves))


def build(spec: ModelSpec, dtype: DTypeLike) -> AbstractModel:
    """Builds a specification into a model whose parameters are yet to be loaded.

    Args:
        dtype: of the weights and of the computation; norms are float32.
    """
    abstract = nnx.eval_shape(lambda: Model(spec, dtype))
    definition, state = nnx.split(abstract)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    flat = nnx.to_flat_state(state)
    axes = {_name(path): variable.get_metadata()["axes"] for path, variable in flat}
    names = tuple(_name(tuple(_key(k) for k in path)) for path, _ in leaves)
    parameters = tuple(leaf for _, leaf in leaves)
    attention = dict(_attention_shapes(spec))
    return AbstractModel(
        definition, state, names, parameters, tuple(axes[name] for name in names), attention
    )


def _key(entry: Any) -> Any:
    """The plain key of an entry of a tree path."""
    return getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", None)))


def _name(path: tuple[Any, ...]) -> str:
    """("stacks", "decoder", "layers", 3, "modules", "attn", "q", "weight") -> "decoder.3...."."""
    structure = ("shared", "stacks", "layers", "modules", "value", None)
    return ".".join(str(part) for part in path if part not in structure)


def _attention_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, int]]]:
    for stack in spec.stacks:
        for i, layer in enumerate(stack.layers):
            for name, block in layer.modules:
                if isinstance(block, blocks.Attention):
                    yield f"{stack.name}.{i}.{name}", (block.kv_heads, block.head_dim)
