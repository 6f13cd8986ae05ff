"""Ahead-of-time compilation: the compiled steps of a model, one program for each step key.

Programs are compiled in the background before they are needed, so that a step rarely waits for a
compilation. Compiled ones are stored on disk for the next start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np
from jax import Array
from jax.sharding import Sharding, SingleDeviceSharding

from jinfer.disk_cache import DiskCache
from jinfer.engine.runner import device_state as states
from jinfer.engine.runner.aot_serialization import dumped, loaded, reader
from jinfer.engine.runner.mmap_limit import check_maps
from jinfer.engine.runner.program_cache import compiled, compiled_apart, surroundings
from jinfer.engine.runner.sampler_output import MAX_STEPS
from jinfer.engine.runner.step_key import Sizes, StepKey
from jinfer.engine.scheduling.cache_size import trim
from jinfer.engine.thread_pools import start_threads, submit
from jinfer.modelspec.eagle_head import tap_names
from jinfer.nn.abstract_model import AbstractModel
from jinfer.ops.attention.kv_blocks import BlockRows, abstract_rows
from jinfer.ops.attention.kv_cache import Cache, CacheShapes, abstract_cache
from jinfer.ops.backend import backend, target_platform
from jinfer.ops.cpu_library import cores
from jinfer.ops.fusion import weight_pointers
from jinfer.progress import task
from jinfer.quant_format import Kind
from jinfer.sampling.logits_processors import has_function
from jinfer.sampling.sampling_metadata import mask_words

if TYPE_CHECKING:
    from jinfer.engine.runner.step_forms import Step, StepFunction

# Bytes; XLA's passes recurse deeper than the 8 MiB that a thread's stack has by default.
_COMPILER_STACK = 64 << 20
_COMPILER_THREADS = 4  # at most, and one a core: more would hold memory and gain nothing

NOTHING = b""  # in the program cache: this program cannot be stored

# An `Executable`, `Reader` or `jax.stages.Compiled`, called with its `StepFunction`'s arguments.
Program = Any


class PipelineProtocol(Protocol):
    """What `CompiledPrograms` uses of the stages of a model on several devices."""

    hosted: Mapping[str, int]

    @property
    def slots(self) -> int: ...
    @property
    def home_device(self) -> jax.Device: ...
    def program(self, step: Step, key: StepKey) -> Program: ...
    def allocate_kv_cache(self) -> Any: ...
    def empty_state(self) -> Any: ...
    def abstract_rows(self, count: int) -> tuple[BlockRows, ...]: ...
    def hidden_taps(self, caches: Any) -> Any: ...
    def release(self) -> None: ...


@dataclass
class CompiledPrograms:
    """The programs of one model, compiled when first needed or announced.

    On several devices a program is a chain of the stages' programs; parameters and cache are then
    those of each stage, and there is a state for each micro-batch.

    Attributes:
        model: the model that they run.
        sizes: of the KV cache and the device state.
        program_cache: stores compiled programs for the next start.
        device: where they run; None: on JAX's default device, or in a pipeline.
        pipeline: the stages of a model on several devices; None: the model is on one.
        compilations: programs compiled, or found in the persistent cache, so far.
        waited: seconds that callers have waited for programs.
    """

    model: AbstractModel
    sizes: Sizes
    program_cache: DiskCache | None = None
    device: jax.Device | None = None
    pipeline: PipelineProtocol | None = None
    compilations: int = 0
    waited: float = 0.0
    _futures: dict[StepKey, Future[Program]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _tracing: threading.Lock = field(default_factory=threading.Lock)
    _describing: threading.Lock = field(default_factory=threading.Lock)

    def announce(self, keys: Iterable[StepKey]) -> list[Future[Program]]:
        """Starts compiling in the background, several programs at a time, in the given order."""
        wanted = list(dict.fromkeys(keys))
        with self._lock:
            new = [key for key in wanted if key not in self._futures]
            if new:
                pool = _compiler_threads(min(len(new), _COMPILER_THREADS, cores()))
                for key in new:
                    self._futures[key] = submit(pool, self._compile, key)
                    self.compilations += 1
                pool.shutdown(wait=False)
            return [self._futures[key] for key in wanted]

    def release(self) -> None:
        """Frees all programs; pending compilations are cancelled."""
        with self._lock:
            for future in self._futures.values():
                future.cancel()
            self._futures.clear()
        if self.pipeline is not None:
            self.pipeline.release()

    def stored(self, keys: Iterable[StepKey]) -> bool:
        """Whether all of these programs are in the program cache, so that none is compiled."""
        cache = self.program_cache
        return cache is not None and all(self._cache_entry(key) in cache for key in keys)

    def ready(self, key: StepKey) -> bool:
        """Whether a program is compiled already; if not, its compilation starts."""
        return self.announce([key])[0].done()

    def get(self, key: StepKey) -> Program:
        """A compiled program; waits until it is ready."""
        future = self._futures.get(key) or self.announce([key])[0]
        begun = 0.0 if future.done() else time.perf_counter()
        try:
            with task(key.task) if begun else nullcontext():
                program = future.result()
        except Exception:
            # The cause may have gone by the next call, which compiles again.
            with self._lock:
                if self._futures.get(key) is future:
                    del self._futures[key]
            raise
        self.waited += time.perf_counter() - begun if begun else 0.0
        return program

    def _compile(self, key: StepKey) -> Program:
        check_maps()
        if self.pipeline is not None:
            return self.pipeline.program(self.step(key), key)
        # Nothing tells a user's function from another one with its name, in the next process.
        program_cache = None if has_function(key.extras) else self.program_cache
        entry = "" if program_cache is None else self._cache_entry(key)
        content = None if program_cache is None else program_cache.get(entry)
        if content and (program := loaded(content)) is not None:
            trim()  # loading takes twice the memory of the program
            return program
        lowered = self._lowered(key)
        if program_cache is None or content == NOTHING:
            return reader(compiled(lowered))
        program = compiled_apart(lowered)
        # A stored program that failed to load is left to JAX's own cache from now on.
        program_cache.put(entry, NOTHING if content else dumped(program) or NOTHING)
        return reader(program)

    def _lowered(self, key: StepKey) -> jax.stages.Lowered:
        # Python runs one thread at a time: traced side by side, all programs would be late.
        with self._tracing, self._on_platform():
            function, donated, arguments = self.step_function(key)
            if self.device is None:
                return jax.jit(function, donate_argnums=donated).lower(*arguments)
            there = SingleDeviceSharding(self.device)
            placed = jax.tree.map(partial(_placed, there), arguments)
            jitted = jax.jit(function, donate_argnums=donated, out_shardings=there)
            return jitted.lower(*placed)

    def _on_platform(self) -> AbstractContextManager[None]:
        return nullcontext() if self.device is None else target_platform(self.device.platform)

    def _cache_entry(self, key: StepKey) -> str:
        """Name of a stored program: all that it depends on, except jinfer's own code."""
        with self._describing:  # once: all threads ask at the same time
            described = self._described
        return f"{described}\n{key!r}"

    @cached_property
    def _described(self) -> str:
        return f"{surroundings()}\n{self.model.described()}\n{self.sizes!r}"

    @cached_property
    def leaves(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Abstract weights as programs take them; see `with_weight_pointers`."""
        leaves = tuple(jax.tree.leaves(self.model.parameters))
        return (*leaves, *map(weight_pointers.abstract_table, self._pointer_arrays(leaves)))

    @property
    def pointer_layers(self) -> Mapping[str, slice]:
        """Layers whose weights programs read through a table of pointers: those on one CPU."""
        with self._on_platform():
            return self.model.layers if self.pipeline is None and backend() == "cpu" else {}

    def with_weight_pointers(self, parameters: tuple[Any, ...]) -> tuple[Array, ...]:
        """The weights as programs take them: arrays, then a table of pointers to some of them."""
        leaves = tuple(jax.tree.leaves(parameters))
        return (*leaves, *map(weight_pointers.table, self._pointer_arrays(leaves)))

    def _pointer_arrays[T](self, leaves: tuple[T, ...]) -> list[list[T]]:
        """The arrays of each pointer table."""
        arrays = [leaf for layer in self.pointer_layers.values() for leaf in leaves[layer]]
        return [arrays] if arrays else []

    @property
    def home_device(self) -> jax.Device | None:
        """The device with the sampling state, where drafts run too; None: JAX's default device."""
        return self.device if self.pipeline is None else self.pipeline.home_device

    @cached_property
    def cache(self) -> Cache:
        """The KV cache's abstract arrays, those of the whole model."""
        return abstract_cache(*self.cache_pools())

    @property
    def slots(self) -> int:
        """Sequences in a device state: those of a micro-batch in a pipeline."""
        return self.sizes.slots if self.pipeline is None else self.pipeline.slots

    @property
    def max_steps(self) -> int:
        """Steps in a call of "decode", at most."""
        return MAX_STEPS if self.pipeline is None else 1

    @cached_property
    def state(self) -> states.State:
        """The device state's abstract arrays."""
        sizes = self.sizes
        return jax.eval_shape(lambda: states.empty_state(self.slots, sizes.context, sizes.vocab))

    @property
    def words(self) -> int:
        """32-bit words of a bitmask over the vocabulary."""
        return mask_words(self.sizes.vocab)

    @cached_property
    def hidden(self) -> int:
        """Width of the last hidden states."""
        key = StepKey("forward", 1, rows=1, want="hidden")
        return int(self.abstract_result(key)[1].shape[-1])

    def hidden_taps(self, cache: Cache) -> Any:
        """The cached hidden states that "gather_taps" reads for a draft head, by layer."""
        if self.pipeline is not None:
            return self.pipeline.hidden_taps(cache)
        return tuple(cache[name] for name in tap_names(self.model.caches))

    def allocate_kv_cache(self) -> Any:
        """Allocates the paged KV cache: a pool of blocks for each attention, of each stage."""
        if self.pipeline is not None:
            return self.pipeline.allocate_kv_cache()
        return self._compile(StepKey("allocate_kv_cache"))(())

    def cache_pools(self) -> tuple[CacheShapes, dict[str, int], Kind]:
        """Shape of each attention's part of a block, its number of blocks, and the number format.

        How many blocks there are is decided by `jinfer.engine.scheduling.cache_size`.
        """
        shapes = self.model.caches
        blocks = {name: self.sizes.blocks[shape.group] for name, shape in shapes.items()}
        return shapes, blocks, self.sizes.kv_cache

    def abstract_rows(self, count: int) -> tuple[BlockRows, ...]:
        """The abstract results of "gather_blocks" of so many rows, for each part of the model."""
        if self.pipeline is not None:
            return self.pipeline.abstract_rows(count)
        return (abstract_rows(self.model.caches, self.cache, count),)

    def empty_state(self) -> Any:
        """A device state with all slots free, for each micro-batch of a pipeline."""
        if self.pipeline is not None:
            return self.pipeline.empty_state()
        state = states.empty_state(self.slots, self.sizes.context, self.sizes.vocab)
        return state if self.device is None else jax.device_put(state, self.device)

    def tables(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Abstract block tables, as `jinfer.engine.scheduling.block_manager` fills them."""
        shapes = self.sizes.table_shapes(rows)
        return {group: jax.ShapeDtypeStruct(shape, np.int32) for group, shape in shapes.items()}

    def step(self, key: StepKey) -> Step:
        """The parts of a step."""
        # A start that finds all its programs compiled does not import this.
        from jinfer.engine.runner.step_table import STEPS

        self.model.modules.make()
        return STEPS[key.kind](self, key)

    def step_function(self, key: StepKey) -> StepFunction:
        """What a step of the whole model is compiled from."""
        from jinfer.engine.runner.step_forms import StepFunction

        step = self.step(key)
        return step if isinstance(step, StepFunction) else step.on_one_device(self)

    def with_leaves(self, function: Callable[..., Any], *first: Any) -> Callable[..., Any]:
        """A function of the flat weights, from one of the model and its parameters.

        Flattening a tree of hundreds of parameters in each call would take too long.
        """
        tree: Any = jax.tree.structure(self.model.parameters)
        count = tree.num_leaves

        def with_parts(leaves: tuple[Any, ...], *rest: Any) -> Any:
            parameters = jax.tree.unflatten(tree, leaves[:count])
            with weight_pointers.use_weight_pointers(
                next(iter(leaves[count:]), None), self.pointer_layers
            ):
                return function(self.model, *first, parameters, *rest)

        return with_parts

    def abstract_result(self, key: StepKey) -> Any:
        """Shapes of what a step gives."""
        function, _, arguments = self.step_function(key)
        return jax.eval_shape(function, *arguments)


def _placed(there: Sharding, array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=there)


def _compiler_threads(count: int) -> ThreadPoolExecutor:
    """Threads with a stack deep enough; they start here, while that stack size is set."""
    pool = ThreadPoolExecutor(count, thread_name_prefix="compile")
    before = threading.stack_size(_COMPILER_STACK)
    try:
        start_threads(pool, count)
    finally:
        threading.stack_size(before)
    return pool
