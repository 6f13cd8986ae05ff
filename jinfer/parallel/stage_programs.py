"""Stage programs: functions compiled for groups of devices, and the calls of a step's programs.

A step of a model on several devices is a chain of calls, written as one function of `StepCalls`. It
runs with abstract arrays first, which compiles the programs, and then with real ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jinfer.engine.runner.program_cache import compiled
from jinfer.ops.backend import target_platform
from jinfer.parallel.device_groups import DeviceGroup, first_replica
from jinfer.progress import task

_REPLICATED = PartitionSpec()


class Launcher:
    """Launches programs, each in a thread chosen by name, and waits until they are launched.

    XLA:CPU runs the programs that one thread launches one after the other, on any devices. So on
    CPUs each stage, and each micro-batch's sampling, has its own launching thread, else stages
    would not overlap. Other devices have queues of their own, and need no threads.

    Attributes:
        threaded: whether to use threads; else the caller's thread launches.
    """

    def __init__(self, threaded: bool) -> None:
        self.threaded = threaded
        self._pools: dict[str, ThreadPoolExecutor] = {}

    def __call__(self, name: str, program: Callable[..., Any], *given: Any) -> Any:
        """Launches a program in the thread `name`; returns its result, possibly still pending."""
        if not self.threaded:
            return program(*given)
        if name not in self._pools:
            self._pools[name] = ThreadPoolExecutor(1, thread_name_prefix=name)
        return self._pools[name].submit(program, *given).result()

    def close(self) -> None:
        """Ends the threads; a later launch starts new ones."""
        for pool in self._pools.values():
            pool.shutdown(wait=False)
        self._pools = {}


@dataclass(frozen=True)
class CompiledStage:
    """A compiled program, and the abstract arrays that it returns."""

    program: Callable[..., Any]
    out: Any


@dataclass
class ProgramTable:
    """Compiled programs, each compiled once, by the first thread that asks for it."""

    _made: dict[Any, Future[CompiledStage]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _tracing: threading.Lock = field(default_factory=threading.Lock)

    def clear(self) -> None:
        """Drops all programs."""
        with self._lock:
            self._made.clear()

    def get(
        self,
        key: Any,
        group: DeviceGroup,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        donated: int | tuple[int, ...] = (),
        out: Any = _REPLICATED,
    ) -> CompiledStage:
        """The program of a function on a group of devices.

        The program of another process's devices returns abstract arrays.

        Args:
            key: equal for functions that are equal.
            arguments: arrays, usually abstract; without a sharding they are replicated.
            donated: indices of the arguments whose buffers may be reused.
            out: partition specs of the results.
        """
        placed = jax.tree.map(
            lambda each: each if getattr(each, "sharding", None) else group.abstract(each),
            arguments,
        )
        key = key, group, repr(placed)
        with self._lock:
            future = self._made.get(key)
            if is_first := future is None:
                future = self._made[key] = Future()
        if is_first:
            try:
                with task("compiling for these devices, once"):
                    future.set_result(self._compile(group, function, placed, donated, out))
            except BaseException as error:
                with self._lock:
                    self._made.pop(key, None)
                future.set_exception(error)
        return future.result()

    def _compile(
        self, group: DeviceGroup, function: Callable[..., Any], given: Any, donated: Any, specs: Any
    ) -> CompiledStage:
        with self._tracing, target_platform(group.platform):
            mapped, lowered = group.shard_map(function, given, specs), None
            if group.local:
                lowered = jax.jit(mapped, donate_argnums=donated).lower(*given)
            result = jax.eval_shape(mapped, *given) if lowered is None else lowered.out_info

        def placed(spec: PartitionSpec, results: Any) -> Any:
            sharding = group.sharding(spec)
            return jax.tree.map(
                lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding),
                results,
            )

        out = jax.tree.map(placed, specs, result, is_leaf=lambda x: isinstance(x, PartitionSpec))
        return CompiledStage((lambda *_: out) if lowered is None else compiled(lowered), out)


@dataclass(frozen=True)
class StepCalls:
    """The calls of a step's programs, which have names.

    Attributes:
        compiling: whether arrays are abstract: a call compiles a program and returns abstract
            results.
        table: the programs of all steps.
        launch: launches programs.
        mover: moves arrays between groups of devices, as `Pipeline.move`.
        programs: those of this step, by name.
    """

    compiling: bool
    table: ProgramTable
    launch: Launcher
    mover: Callable[[Any, DeviceGroup | None, DeviceGroup], Any]
    programs: dict[str, CompiledStage] = field(default_factory=dict)

    def __call__(
        self,
        name: str,
        group: DeviceGroup,
        function: Callable[..., Any],
        *arguments: Any,
        key: Any,
        donated: int | tuple[int, ...] = (),
        out: Any = _REPLICATED,
        thread: str = "",
    ) -> Any:
        """The results of a program, possibly still pending.

        Args:
            name: of the program in this step.
            group: the devices that run it.
            thread: that launches it; "": the program's name.
        """
        if self.compiling:
            made = self.table.get(key, group, function, arguments, donated, out)
            self.programs[name] = made
            return made.out
        return self.launch(thread or name, self.programs[name].program, *arguments)

    def move(self, tree: Any, source: DeviceGroup | None, target: DeviceGroup) -> Any:
        """Arrays of one group, or of the host (None), replicated on another; asynchronous."""
        return target.abstract(tree) if self.compiling else self.mover(tree, source, target)

    def first(self, tree: Any, group: DeviceGroup) -> Any:
        """The copies of replicated arrays that the first device of their group has."""
        if self.compiling:
            return DeviceGroup(group.devices[:1]).abstract(tree)
        return jax.tree.map(first_replica, tree)
