"""Distributed pipeline: the stages of a model on several hosts, one process on each.

Each process runs the same chain of programs, launches those of its own devices, and takes part in
the collectives that move values between devices of several processes. Process 0, which has the
scheduler, sends each call to the others first; what a call returns is moved to it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jinfer.engine.requests import EngineError
from jinfer.engine.runner.compiled_programs import CompiledPrograms, Program
from jinfer.engine.runner.step_forms import CacheStep, EncoderStep, ForwardStep, StateStep, Step
from jinfer.engine.runner.step_key import StepKey
from jinfer.parallel.device_groups import DeviceGroup, first_replica
from jinfer.parallel.distributed.broadcast import broadcast_from_first, per_device
from jinfer.parallel.distributed.process_group import ProcessGroup
from jinfer.parallel.pipeline import Pipeline
from jinfer.parallel.stage_programs import Launcher


class KeptResult:
    """A result that stays where it was computed, for a later call.

    Attributes:
        number: of the call.
        index: of the result among the call's.
        shape: of the array.
    """

    def __init__(self, number: int, index: int, shape: tuple[int, ...] = ()) -> None:
        self.number, self.index, self.shape = number, index, shape


@dataclass(frozen=True, eq=False)
class FetchedArray:
    """An array of a call's results on process 0; conversion to NumPy waits.

    Attributes:
        array: the result, possibly still pending.
        failed: called with an error of the computation, which shows only when waiting for it.
    """

    array: Array
    failed: Callable[[BaseException], None]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        try:
            array = np.asarray(self.array)
        except Exception as error:
            self.failed(error)
            raise
        return array if dtype is None else array.astype(dtype)

    def __int__(self) -> int:
        return int(np.asarray(self))


class SynchronousLauncher(Launcher):
    """Runs one program after another.

    On CPUs a collective starts as soon as its inputs are there, in any order of the programs, and
    gloo pairs the collectives of two processes by their order alone.
    """

    def __init__(self) -> None:
        super().__init__(threaded=False)

    def __call__(self, name: str, program: Callable[..., Any], *given: Any) -> Any:
        """The result of a program, computed."""
        return jax.block_until_ready(program(*given))


@dataclass(kw_only=True)
class DistributedPipeline(Pipeline):
    """The stages of all processes, as one process has them.

    Attributes:
        group: the job's processes.
        leaves, caches, states: of a worker; process 0's engine has its own.
    """

    group: ProcessGroup
    leaves: Any = ()
    caches: Any = ()
    states: Any = ()
    _kept: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    _zero_rows: dict[Any, Array] = field(default_factory=dict)
    _dropped: deque[int] = field(default_factory=deque)
    _numbers: Iterator[int] = field(default_factory=count)

    @cached_property
    def launch(self) -> Launcher:
        """Launches in the calling thread: collectives need one order in all processes."""
        on_cpu = self.home_device.platform == "cpu"
        return SynchronousLauncher() if on_cpu else Launcher(threaded=False)

    def release(self) -> None:
        """As `Pipeline.release`; process 0 has all processes do so."""
        self._send(release=True)
        self.group.one_way = False
        super().release()
        self.leaves = self.caches = self.states = ()
        self._kept.clear()
        self._zero_rows.clear()

    def allocate_kv_cache(self) -> Any:
        """As `Pipeline.allocate_kv_cache`, in all processes."""
        self._send(reset="cache")
        return super().allocate_kv_cache()

    def empty_state(self) -> Any:
        """As `Pipeline.empty_state`, in all processes."""
        self._send(reset="state")
        return super().empty_state()

    def _send(self, **message: Any) -> None:
        if self.group.rank == 0:
            with self._reported_errors():
                self.group.send(message)

    def program(self, step: Step, key: StepKey) -> Program:
        """The program of a step; on process 0 as an engine calls it."""
        own = _own_arguments(step)
        self._send(announce=asdict(key))  # the others compile it at the same time
        run = super().program(step, key)
        if self.group.rank:
            return partial(self._follow, step, run)

        def program(*arguments: Any) -> Any:
            with self.group.ordered:
                number, given = next(self._numbers), arguments[own:]
                self._send_call(number, key, given)
                return self._run(step, run, number, arguments[:own], self._with_kept(given))

        return program

    def _send_call(self, number: int, key: StepKey, given: tuple[Any, ...]) -> None:
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        self.drop(dropped)
        described, arrays = list[Any](), list[np.ndarray]()
        for leaf in jax.tree.leaves(given):
            if isinstance(leaf, KeptResult):
                described.append([leaf.number, leaf.index])
            else:
                described.append(None)
                arrays.append(np.asarray(leaf))
        message = {"call": number, "key": asdict(key), "arguments": described, "drop": dropped}
        with self._reported_errors():
            self.group.send(message, arrays)
        self.group.one_way = True  # workers that run calls wait for the next message

    def decoded(
        self, step: Any, described: Sequence[list[int] | None], arrays: Sequence[np.ndarray]
    ) -> tuple[Any, ...]:
        """The arguments of a call that process 0 has sent, in the structure of a step's."""
        rest = iter(arrays)
        leaves = [
            next(rest) if kept is None else KeptResult(kept[0], kept[1]) for kept in described
        ]
        given = jax.tree.unflatten(jax.tree.structure(step.arguments), leaves)
        return self._with_kept(given)

    def _with_kept(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        def value(leaf: Any) -> Any:
            return self._kept[leaf.number][leaf.index] if isinstance(leaf, KeptResult) else leaf

        return tuple(jax.tree.map(value, given))

    def drop(self, numbers: Sequence[int]) -> None:
        """Drops the results that calls have left for later ones."""
        for number in numbers:
            self._kept.pop(number, None)

    def _follow(self, step: Step, run: Program, number: int, given: tuple[Any, ...]) -> None:
        """A worker's share of a call."""
        own: Any = (self.states,)
        if isinstance(step, CacheStep):
            own = (self.caches,)
        elif not isinstance(step, StateStep):
            own = (self.leaves, self.caches, self.states)[: _own_arguments(step)]
        results = self._run(step, run, number, own, given)
        if not isinstance(step, ForwardStep) and not (isinstance(step, StateStep) and step.returns):
            results = (results,)
        if isinstance(step, StateStep):
            self.states = results[0]
        elif not isinstance(step, EncoderStep) or step.want is None:
            self.caches = results[0]
        if isinstance(step, ForwardStep) and step.samples:
            self.states = results[1]

    def _run(
        self, step: Step, run: Program, number: int, own: tuple[Any, ...], given: tuple[Any, ...]
    ) -> Any:
        """Runs a call; its outputs are moved to process 0, or kept for later calls."""
        with self._reported_errors():
            results = run(*own, *given)
            match step:
                case EncoderStep(want=None) | CacheStep():
                    return results
                case EncoderStep():
                    return self._fetched(results)
                case StateStep() if not step.returns:
                    return results
            state = 2 if isinstance(step, ForwardStep) and step.samples else 1
            outputs = results[state:]
            kept = step.kept if isinstance(step, ForwardStep) else 0
            if kept:
                self._kept[number] = outputs[:kept]
                if self.group.rank == 0:
                    outputs = (*self._keeping(number, outputs[:kept]), *outputs[kept:])
            moved = self._fetched(outputs[kept:])
            return *results[:state], *outputs[:kept], *moved

    def _keeping(self, number: int, values: Sequence[Any]) -> list[KeptResult]:
        """References to kept results, which are dropped once the first is garbage-collected."""
        kept = [
            KeptResult(number, i, getattr(value, "shape", ())) for i, value in enumerate(values)
        ]
        weakref.finalize(kept[0], self._dropped.append, number).atexit = False
        return kept

    def _fetched(self, outputs: Any) -> Any:
        """Outputs moved from home to process 0."""
        first = next(device for device in jax.devices() if device.process_index == 0)
        moved = self.move(outputs, self.home, DeviceGroup((first,)))
        if self.group.rank:
            return moved
        return jax.tree.map(lambda array: FetchedArray(array, self.group.fail), moved)

    def move(self, tree: Any, source: DeviceGroup | None, target: DeviceGroup) -> Any:
        """As `Pipeline.move`, between processes by a collective."""
        if not jax.tree.leaves(tree):
            return tree
        here = jax.process_index()
        there = {device.process_index for device in target.devices}
        have = set() if source is None else {device.process_index for device in source.devices}
        if source is None or there <= have:
            return super().move(tree, source, target) if target.local else _abstract(tree)
        if here not in {source.devices[0].process_index, *there}:
            return _abstract(tree)
        return self._exchange(tree, source.devices[0], target)

    def _exchange(self, tree: Any, source: jax.Device, target: DeviceGroup) -> Any:
        """A collective of the source and the target's devices."""
        leaves, structure = jax.tree.flatten(tree)
        devices = tuple(dict.fromkeys((source, *target.devices)))
        local = [device for device in devices if device.process_index == jax.process_index()]
        given: list[Array] = []
        for leaf in leaves:
            own = [
                _replica_on(leaf, device)
                if device == source
                else self._zeros(leaf.shape, leaf.dtype, device)
                for device in local
            ]
            given.append(per_device(own, devices))
        moved = self.launch("move", broadcast_from_first(devices), jax.block_until_ready(given))
        if not target.local:
            return jax.tree.unflatten(structure, [_abstract(leaf) for leaf in leaves])
        copies = [
            _copies(array, leaf.shape, target) for array, leaf in zip(moved, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, copies)

    def _zeros(self, shape: tuple[int, ...], dtype: Any, device: jax.Device) -> Array:
        """Zeros, which are kept until the model is released: no program changes them."""
        key = shape, np.dtype(dtype), device
        if key not in self._zero_rows:
            self._zero_rows[key] = jax.device_put(np.zeros(shape, dtype), device)
        return self._zero_rows[key]

    @contextmanager
    def _reported_errors(self) -> Iterator[None]:
        """Ends the job where a computation fails, as it does when a process is lost."""
        try:
            yield
        except Exception as error:  # XLA's errors have several classes
            self.group.fail(error)


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


def key_of(fields: dict[str, Any]) -> StepKey:
    """A step key from its fields as JSON has them, with lists for tuples."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return StepKey(**values)


def _own_arguments(step: Step) -> int:
    """How many of a call's first arguments are parameters, cache and state."""
    match step:
        case StateStep():
            return 1
        case CacheStep() if not step.reads and step.rows is None:
            return 1
        case ForwardStep() if not step.drafted:
            return 2 if step.begin is None else 3
        case EncoderStep():
            return 2
    raise EngineError("this cannot be computed by several processes; leave out [partition]")


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _replica_on(leaf: Array, device: jax.Device) -> Array:
    """The copy of a replicated array on a device."""
    if len(leaf.sharding.device_set) == 1:
        return first_replica(leaf)
    return next(shard.data for shard in leaf.addressable_shards if shard.device == device)


def _copies(array: Array, shape: tuple[int, ...], target: DeviceGroup) -> Array:
    """The parts, which are equal, of an array on each device of a group."""
    parts = {shard.device: shard.data for shard in array.addressable_shards}
    own = [parts[target.devices[i]] for i in target.local]
    own = own if shape else [jnp.reshape(part, ()) for part in own]
    if len(target.devices) == 1:
        return own[0]
    return jax.make_array_from_single_device_arrays(shape, target.replicated, own)
