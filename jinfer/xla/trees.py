"""Trees of arrays: what `jax.tree` does, also before JAX is imported.

Trees are made of tuples, named tuples, lists, dictionaries, None and the records that `register`
was told of, as JAX has them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxlib import _jax

from jinfer.xla.later import once_imported

# JAX's own finds a record twice if it is told of it before JAX is there.
_registry = _jax.pytree.PyTreeRegistry()

type Structure = Any  # of the class that JAX has: `jax.tree_util.PyTreeDef`


def register[T](cls: type[T]) -> type[T]:
    """Makes a dataclass a part of trees, for JAX as well.

    Its fields are trees, but for those whose metadata call them static: by these two trees differ.
    """
    _registry.register_dataclass_node(cls, *_fields(cls))

    def for_jax() -> None:
        import jax

        jax.tree_util.register_dataclass(cls)

    once_imported(for_jax)
    return cls


def _fields(cls: Any) -> tuple[list[str], list[str]]:
    fields = dataclasses.fields(cls)
    static = [one.name for one in fields if one.metadata.get("static")]
    return [one.name for one in fields if one.name not in static], static


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """The leaves of a tree, and what is left."""
    found, structure = _registry.flatten(tree)
    return found, structure


def leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """The leaves of a tree, from left to right.

    Args:
        is_leaf: whether something is to be one that else would not be.
    """
    found: list[Any] = _registry.flatten(tree, is_leaf)[0]
    return found


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves with what stands behind the tree's name in Python to say each: `.words`, `[0]`."""
    found = _registry.flatten_with_path(tree)[0]
    return [("".join(str(key) for key in path), leaf) for path, leaf in found]


def structure_of(tree: Any) -> Structure:
    """A tree without its leaves."""
    return flatten(tree)[1]


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """A tree with other leaves."""
    return structure.unflatten(leaves)


def map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """A tree of what a function gives for each leaf, and those of others at its place."""
    first, structure = flatten(tree)
    more = [structure.flatten_up_to(other) for other in others]
    return structure.unflatten([function(*each) for each in zip(first, *more, strict=True)])
