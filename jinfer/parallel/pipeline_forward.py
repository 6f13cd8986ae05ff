"""Pipeline parallelism, forward pass: a call of all stages over a flat batch, one after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jinfer.engine.runner.flat_batch import FlatBatch
from jinfer.parallel.device_groups import DeviceGroup, first_replica
from jinfer.parallel.launcher import Launcher
from jinfer.parallel.pipeline_stage import PipelineStage
from jinfer.parallel.stage_programs import CompiledStage
from jinfer.parallel.timeline import Timeline
from jinfer.parallel.weight_offload import WeightPrefetcher

type StageCaches = tuple[Any, ...]


class Pipeline(Protocol):
    """What a forward pass uses of `PipelinePrograms`."""

    timeline: Timeline | None

    @property
    def stages(self) -> tuple[PipelineStage, ...]: ...
    @property
    def streams(self) -> dict[int, WeightPrefetcher]: ...
    @property
    def launch(self) -> Launcher: ...
    def leaves_of(self, number: int, leaves: Any, /) -> Any: ...


@dataclass(frozen=True)
class PipelineForward:
    """The forward pass of all stages over a flat batch."""

    programs: Pipeline
    made: tuple[CompiledStage, ...]

    def __call__(
        self,
        leaves: Any,
        caches: StageCaches,
        batch: FlatBatch,
        last: Any,
        lane: int,
    ) -> tuple[StageCaches, Any]:
        """The caches, and the results at home."""
        new_caches, x = list[Any](), None
        programs, timeline = self.programs, self.programs.timeline
        batches: dict[DeviceGroup, FlatBatch] = {}

        def batch_on(device_group: DeviceGroup) -> FlatBatch:
            if device_group not in batches:
                batches[device_group] = device_group.replicate_tree(batch)
            return batches[device_group]

        for number, (stage, made) in enumerate(zip(programs.stages, self.made, strict=True)):
            hidden, here = stage.device_group.replicate_tree(x), batch_on(stage.device_group)
            weights = programs.leaves_of(number, leaves)
            arguments = weights, caches[number], hidden, here, last if stage.last else None
            on_host = () if stage.host is None else (batch_on(stage.host),)
            cache, x = programs.launch(f"stage {number}", made.program, *arguments, *on_host)
            # So that offloaded weights are freed as soon as the device has used them.
            del weights, arguments
            if stage.streamed:
                programs.streams[number].computed(x)
            new_caches.append(cache)
            if timeline is not None:
                timeline.note(number, lane, here.tokens if hidden is None else hidden, x)
        return tuple(new_caches), jax.tree.map(first_replica, x)
