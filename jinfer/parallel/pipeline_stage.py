"""Pipeline stage: a stage's model on its devices, with its parameters and offload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jinfer.parallel.device_groups import DeviceGroup
from jinfer.parallel.stage_model import StageModel


@dataclass(frozen=True)
class PipelineStage:
    """A pipeline stage on its devices.

    Attributes:
        model: the model that each of its devices runs.
        device_group: its devices.
        leaves: where its parameters stand among the flattened parameters of all stages.
        streamed: whether its weights are offloaded to host memory.
        host: the host's device, where some of its KV cache is; None: all is on `device_group`.
    """

    model: StageModel
    device_group: DeviceGroup
    leaves: slice
    streamed: bool = False
    host: DeviceGroup | None = None

    @cached_property
    def kind(self) -> str:
        """A key that is equal for stages with the same programs."""
        model_slice, where = self.model.slice, (self.device_group.devices, self.host)
        return repr((where, model_slice.first, model_slice.last, self.model.model.described()))

    @property
    def last(self) -> bool:
        """Whether it is the last stage, which returns results."""
        return self.model.slice.last


def with_flat_parameters(stage: PipelineStage, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a stage's parameters as one of its flattened parameters."""
    tree = jax.tree.structure(stage.model.model.parameters)

    def with_parts(leaves: Any, *rest: Any) -> Any:
        return function(jax.tree.unflatten(tree, leaves), *rest)

    return with_parts


def abstract_leaves(stage: PipelineStage) -> Any:
    """A stage's abstract parameters, flattened and sharded."""
    return stage.device_group.abstract_shards(tuple(jax.tree.leaves(stage.model.model.parameters)))
