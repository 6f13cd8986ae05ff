"""Worker: the loop of ranks above 0, which compute the calls that the coordinator broadcasts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinfer.distributed.distributed_pipeline import DistributedPipeline
from jinfer.distributed.process_group import ProcessGroup
from jinfer.engine.runner.compiled_programs import CompiledPrograms
from jinfer.engine.runner.step_key import StepKey


def worker_loop(group: ProcessGroup, programs: CompiledPrograms, leaves: Sequence[Any]) -> None:
    """Computes the coordinator's calls until it releases the model.

    Args:
        leaves: the parameters of all stages; abstract for stages of other ranks.
    """
    assert isinstance(programs.pipeline, DistributedPipeline), "this process has joined a job"
    worker = programs.pipeline.worker
    worker.leaves = leaves
    while True:
        match group.receive_from(0):
            case {"announce": shape}:
                programs.announce([_shape(shape)])
            case {"reset": what}:
                worker.reset(what)
            case {"call": call, "shape": shape, "given": given, "drop": dropped}:
                worker.drop(dropped)
                programs.get(_shape(shape))(call, *given)
            case {"release": True}:
                programs.release()
                return


def _shape(told: dict[str, Any]) -> StepKey:
    # A message has lists for tuples.
    fields: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in told.items()}
    return StepKey(**fields)
