"""Bytes of weights per layer, as they are stored."""

from __future__ import annotations

from collections.abc import Iterable

from jinfer.modelspec.model_spec import ModelSpec
from jinfer.nn.abstract_model import AbstractModel
from jinfer.ops.attention.kv_cache import nbytes
from jinfer.parallel.layer_plan import ModelBytes
from jinfer.parallel.sharding_rules import ModelSlice, stage_spec


def model_bytes(spec: ModelSpec, model: AbstractModel) -> ModelBytes:
    """The bytes of a model's layers, and of the modules before and after them.

    Args:
        model: the model, with its parameters as they will be stored.
    """
    sizes = dict(zip(model.names, map(nbytes, model.parameters), strict=True))
    layers = {stack.name: [0] * len(stack.layers) for stack in spec.stacks}
    rest: dict[str, int] = {}
    for name, size in sizes.items():
        stack, number, *_ = (*name.split("."), "")
        if stack in layers and number.isdigit():
            layers[stack][int(number)] += size
        else:
            rest[name] = size
    ends = [
        sum(
            size
            for name, size in rest.items()
            if any(map(name.startswith, _prefixes_outside_layers(spec, *end)))
        )
        for end in ((True, False), (False, True))
    ]
    return ModelBytes(layers, *ends)


def _prefixes_outside_layers(spec: ModelSpec, first: bool, last: bool) -> Iterable[str]:
    """Prefixes of the parameter names of a stage without layers."""
    part = ModelSlice({stack.name: range(0) for stack in spec.stacks}, first, last)
    stage = stage_spec(spec, part)
    yield from (f"{name}." for name, _ in stage.shared)
    for stack in stage.stacks:
        yield from (f"{stack.name}.{name}." for name, _ in stack.modules)
