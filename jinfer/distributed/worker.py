"""Worker: the loop of processes above 0, which run the programs that process 0 runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinfer.distributed.distributed_pipeline import DistributedPipeline, key_of
from jinfer.distributed.process_group import ProcessGroup
from jinfer.engine.runner.compiled_programs import CompiledPrograms


def worker_loop(group: ProcessGroup, programs: CompiledPrograms, leaves: Sequence[Any]) -> None:
    """Runs the programs of process 0's calls until it releases the model.

    Args:
        leaves: the parameters of all stages; abstract for stages of other processes.
    """
    pipeline: Any = programs.pipeline
    assert isinstance(pipeline, DistributedPipeline), "this process has joined a job"
    pipeline.leaves = leaves
    while True:
        message, arrays = group.receive()
        match message:
            case {"announce": key}:
                programs.announce([key_of(key)])
            case {"reset": "cache"}:
                pipeline.caches = pipeline.allocate_kv_cache()
            case {"reset": "state"}:
                pipeline.states = pipeline.empty_state()
            case {"call": number, "key": key, "arguments": arguments, "drop": dropped}:
                group.one_way = True
                pipeline.drop(dropped)
                step = programs.step(key_of(key))
                given = pipeline.decoded(step, arguments, arrays)
                programs.get(key_of(key))(number, given)
            case {"release": True}:
                programs.release()
                return
            case {"end": _}:
                group.ended(message)
