"""Rank 0, the coordinator: programs that broadcast each of the engine's calls to all ranks."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import numpy as np

from jinfer.distributed.distributed_programs import LOGITS, PAST, ROWS, DistributedPrograms
from jinfer.distributed.futures import remote_arrays
from jinfer.distributed.wire_format import ResultRef
from jinfer.distributed.worker_state import DONE
from jinfer.engine.runner.compiled_programs import Program
from jinfer.engine.runner.flat_batch import FlatBatch
from jinfer.engine.runner.sampler_output import SamplerOutput
from jinfer.engine.runner.step_key import StepKey

# How many of a program's first arguments are parameters, cache and state: each rank has its own.
_RANK_LOCAL_ARGUMENTS = {"logits": 3, "decode": 3, "sample": 1, "copy_blocks": 1, "set_slot": 1}
_RANK_LOCAL_ARGUMENTS |= dict.fromkeys(
    ("forward", "score", "beam", "contrastive", "fill_cross_attention", "encode"), 2
)
_ON_EACH_RANK = object()  # stands for a cache or a state, of which each rank has its own


class RemoteReference:
    """A reference to a result that stays on the rank that computed it, for a later call."""

    def __init__(self, ref: ResultRef, shape: tuple[int, ...] = (), lane: int = 0) -> None:
        self.ref, self.shape, self.lane = ref, shape, lane


@dataclass(kw_only=True)
class CoordinatorPrograms(DistributedPrograms):
    """The coordinator's programs, with the interface that the engine calls."""

    _dropped: deque[int] = field(default_factory=deque)

    def release(self) -> None:
        """As `CompiledPrograms.release`, on all ranks."""
        self.group.send_to_all(release=True)
        super().release()

    def allocate_kv_cache(self) -> Any:
        """Has all ranks empty their caches."""
        return self._reset("cache")

    def empty_state(self) -> Any:
        """Has all ranks reset their states."""
        return self._reset("state")

    def _reset(self, what: str) -> Any:
        self.group.send_to_all(reset=what)
        self.worker.reset(what)
        return _ON_EACH_RANK

    def _compile(self, shape: StepKey) -> Program:
        # The workers compile theirs at the same time.
        self.group.send_to_all(announce=asdict(shape))
        local = super()._compile(shape)

        def program(*arguments: Any) -> Any:
            self.worker.leaves = (
                arguments[0] if _RANK_LOCAL_ARGUMENTS[shape.kind] > 1 else self.worker.leaves
            )
            return self._called(shape, local, arguments[_RANK_LOCAL_ARGUMENTS[shape.kind] :])

        return program

    def _called(self, shape: StepKey, own: Program, given: tuple[Any, ...]) -> Any:
        """Has all ranks compute a call; returns what the engine expects of it.

        Args:
            own: this rank's program.
            given: the call's arguments without parameters, cache and state.
        """
        call, kind = next(self.group.calls), shape.kind
        if kind == "set_slot":
            given = ([np.asarray(leaf) for leaf in jax.tree.leaves(given[0])], *given[1:])
        arguments = [_serializable(argument) for argument in given]
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        self.group.send_to_all(shape=asdict(shape), call=call, given=arguments, drop=dropped)
        self.worker.drop(dropped)
        coming = self.worker.results.expect(call, DONE) if kind in _RETURNING else None
        own(call, *arguments)
        match kind:
            case "logits":
                lane, _ = self.lanes.of_slots(given[0])
                logits = self._keeping(
                    RemoteReference(ResultRef(call, LOGITS), (shape.chosen, self.width))
                )
                return _ON_EACH_RANK, logits, RemoteReference(ResultRef(call, ROWS), lane=lane)
            case "fill_cross_attention" | "copy_blocks" | "set_slot":
                return _ON_EACH_RANK
        assert coming is not None, "other kinds have returned above"

        def result(like: Any) -> Any:
            return remote_arrays(coming, like, self.group.fail)

        match kind:
            case "sample":
                return _ON_EACH_RANK, result(self._chosen)
            case "decode":
                return _ON_EACH_RANK, _ON_EACH_RANK, result(self._chosen)
            case "encode":
                return result(0)
            case "contrastive":
                past = self._keeping(RemoteReference(ResultRef(call, PAST)))
                return _ON_EACH_RANK, past, *result((0,) * 3)
            case "beam":
                return _ON_EACH_RANK, *result((0,) * 3)
            case "score":
                return _ON_EACH_RANK, result((0,) * 3)
        return _ON_EACH_RANK, result(0)

    @property
    def _chosen(self) -> Any:
        """A tree with the structure of the sampler's output."""
        progress = jax.tree.map(lambda _: 0, self.compiler.state.progress)
        return SamplerOutput(*(0,) * 4, progress)  # type: ignore[arg-type]

    def _keeping(self, kept: RemoteReference) -> RemoteReference:
        """Has a call's results dropped on their rank once the reference is garbage-collected."""
        weakref.finalize(kept, self._dropped.append, kept.ref.call).atexit = False
        return kept


_RETURNING = ("sample", "decode", "encode", "contrastive", "beam", "score", "forward")


def _serializable(given: Any) -> Any:
    """An argument as it is sent: NumPy arrays, and references to results on other ranks."""
    if isinstance(given, RemoteReference):
        if given.ref.name == ROWS:
            return {"lane": given.lane, "rows": given.ref}
        return given.ref
    if isinstance(given, dict | FlatBatch):
        return jax.tree.map(np.asarray, given)
    if isinstance(given, list):
        return given
    return np.asarray(given)
