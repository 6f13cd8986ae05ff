"""Expert terms: the low-rank matrices of a LoRA adapter for all experts of a projection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from jinfer.loader.adapters.lora_adapter import DAMAGED, LoraAdapter, LoraModule
from jinfer.loader.checkpoint import Tensor
from jinfer.loader.weights.tensor_mapping import LoadError, Origin, Shapes, parameter_shapes
from jinfer.modelspec.tensor_names import TensorMap, TensorSource
from jinfer.nn.abstract_model import AbstractModel

if TYPE_CHECKING:
    from jaxtyping import Float


type Pair = tuple[
    Float[np.ndarray, "experts rank inputs"], Float[np.ndarray, "experts outputs rank"]
]


@dataclass(frozen=True)
class ExpertStack:
    """A module of an adapter for a stack of experts' matrices, and a parameter of the stack.

    Attributes:
        adapter, name: the module.
        origin: the origin of the parameter in a file with the stack.
        shapes: of every parameter.
    """

    adapter: LoraAdapter
    name: str
    origin: Origin
    shapes: Shapes

    @property
    def _module(self) -> LoraModule:
        return self.adapter.modules[self.name]

    def whole(self) -> Pair:
        """A and B [experts, outputs, rank] of the stack; the module's factor is in B.

        Raises:
            LoadError: they are of other shapes than the model's, or not finite.
        """
        place, shape = self.origin.place, self.shapes[self.origin.parameter]
        parts = place.parts or (self.origin.parameter,)
        outputs, inputs = sum(self.shapes[part][1] for part in parts), shape[2]
        path, module = self.adapter.path, self._module
        known = (outputs, inputs), (inputs, outputs)
        if module.experts != shape[0] or module.shape not in known:
            raise LoadError(
                f"{path}: {self.name} is for {module.experts} matrices {list(module.shape)}, and "
                f"{self.origin.parameter} is of {shape[0]} matrices {[outputs, inputs]}: it "
                "belongs to another model"
            )
        if place.layers or place.pieces > 1 or (place.parts and place.axis != 1):
            raise LoadError(
                f"{path}: {self.name} holds several matrices of the model in an order that is not "
                "read; merge the adapter with PEFT"
            )
        a, b = module.read_a(), module.read_b()
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise LoadError(f"{path}: {self.name} has numbers that are not finite; {DAMAGED}")
        by_axes = module.by_axes and not place.transpose
        if by_axes if outputs == inputs else module.shape != known[0]:
            a, b = b.swapaxes(1, 2), a.swapaxes(1, 2)
        return a, module.scaled(b)

    def own(self) -> Pair:
        """`whole`, of the rows that are the parameter's."""
        a, b = self.whole()
        if self.origin.place.parts:
            b = self.origin.part(self.origin.tensors[0], b, self.shapes)
        return a, b


def find_stack(
    adapter: LoraAdapter,
    weight: str,
    place: TensorSource,
    tensors: Mapping[str, Tensor],
    shapes: Shapes,
) -> ExpertStack | None:
    """The stack in an adapter that a parameter [experts, outputs, inputs] is a part of.

    Args:
        tensors: of `named_modules`.
    """
    for choice in place.candidates():
        for name in choice.names:
            if (tensor := tensors.get(name)) is not None:
                origin = Origin(weight, (tensor,), False, choice, adapter.path)
                return ExpertStack(adapter, tensor.name.removesuffix(".weight"), origin, shapes)
    return None


def merged_stacks(
    adapter: LoraAdapter,
    model: AbstractModel,
    mapping: TensorMap,
    matrices: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, tuple[Tensor, Callable[[], np.ndarray]]], set[str]]:
    """Merge an adapter's stacks into a checkpoint's tensors.

    Args:
        matrices: the result of `named_modules`.
        tensors: the checkpoint's tensors by name.

    Returns:
        Name of each changed tensor -> the tensor and a function that returns its values in float32;
        and the names of the modules that were used.

    Raises:
        LoadError: the checkpoint has no tensors for a stack, or unfit tensors.
    """
    shapes, used = parameter_shapes(model), set[str]()
    changed = dict[str, tuple[Tensor, Callable[[], np.ndarray]]]()
    for weight, shape in shapes.items():
        place = mapping.source_of(weight) if len(shape) == 3 else None
        if place is None or not weight.endswith(".weight"):
            continue
        stack = find_stack(adapter, weight, place, matrices, shapes)
        if stack is None or not adapter.modules[stack.name].experts:
            continue
        used.add(stack.name)
        for tensor, read in _targets(stack, place, tensors):
            changed[tensor.name] = tensor, read
    return changed, used


def _targets(
    stack: ExpertStack, place: TensorSource, tensors: Mapping[str, Tensor]
) -> list[tuple[Tensor, Callable[[], np.ndarray]]]:
    """The tensors that a parameter is read from, and what they become."""
    count, origin = stack.shapes[stack.origin.parameter][0], stack.origin
    for choice in place.candidates():
        for name in choice.names:
            full = [name.replace("{e}", str(e)) for e in range(count)]
            if (
                "{e}" in name
                and all(expert_name in tensors for expert_name in full)
                and not choice.parts
            ):
                own = cache(stack.own)
                return [
                    (
                        tensors[expert_name],
                        _with_expert(stack, tensors[expert_name], choice, own, e),
                    )
                    for e, expert_name in enumerate(full)
                ]
            same = replace(choice, fallback=None) == replace(origin.place, fallback=None)
            if name in tensors and same:
                return [(tensors[name], _with_all(stack, tensors[name], choice))]
    raise LoadError(
        f"{stack.adapter.path}: {stack.name} is no stack of matrices of the checkpoint, nor are "
        f"there experts' own for {origin.parameter}; use the adapter without merge"
    )


def _with_expert(
    stack: ExpertStack, tensor: Tensor, place: TensorSource, read: Callable[[], Pair], e: int
) -> Callable[[], np.ndarray]:
    def values() -> np.ndarray:
        a, b = read()
        return _sum(stack, tensor, place, (a[e], b[e]))

    return values


def _with_all(stack: ExpertStack, tensor: Tensor, place: TensorSource) -> Callable[[], np.ndarray]:
    return lambda: _sum(stack, tensor, place, stack.whole())


def _sum(
    stack: ExpertStack, tensor: Tensor, place: TensorSource, pair: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    weight, (a, b) = tensor.read().astype(np.float32), pair
    with np.errstate(over="ignore", invalid="ignore"):  # found by `finite_sum`
        term = b @ a
    if place.transpose and tensor.codes is None:
        term = term.swapaxes(-1, -2)
    if weight.shape != term.shape:
        raise LoadError(
            f"{tensor.name} is {list(weight.shape)}, and its adapter is for {list(term.shape)}: it "
            "belongs to another model"
        )
    return finite_sum(weight, term, stack.adapter, tensor.name.removesuffix(".weight"))


def finite_sum(
    weight: Float[np.ndarray, "*experts outputs inputs"],
    term: Float[np.ndarray, "*experts outputs inputs"],
    adapter: LoraAdapter,
    name: str,
) -> Float[np.ndarray, "*experts outputs inputs"]:
    """The sum of a weight and the term of an adapter's module.

    Args:
        name: of the module.

    Raises:
        LoadError: finite weights become infinite, or NaN.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # found below
        whole = weight + term
    if not np.isfinite(whole).all() and np.isfinite(weight).all():
        raise LoadError(
            f"{adapter.path}: {name}: lora_B times lora_A times its scale (lora_alpha) is too "
            "large for float32; lower that, or train it again"
        )
    return whole


def with_lengths(
    weight: Float[np.ndarray, "outputs inputs"],
    magnitude: Float[np.ndarray, "outputs 1"],
    adapter: LoraAdapter,
    name: str,
) -> Float[np.ndarray, "outputs inputs"]:
    """A weight with rows of a DoRA's lengths.

    Raises:
        LoadError: a row has no direction, or no length in float32.
    """
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # found below
        length = np.linalg.norm(weight, axis=1, keepdims=True)
        factor = magnitude / length
    if not (np.isfinite(length).all() and np.isfinite(factor).all()) and np.isfinite(weight).all():
        raise LoadError(
            f"{adapter.path}: {name}: with its term, rows are 0 or too long for their magnitudes "
            "(DoRA) in float32; train it again, or lower its scale (lora_alpha)"
        )
    return weight * factor
