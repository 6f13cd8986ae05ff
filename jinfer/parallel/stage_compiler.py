"""Pipeline parallelism: compiles the programs of single stages, each once.

`pipeline` and `jinfer.distributed` put them together to steps of the whole model. A stage's share
of the forward pass runs on the stage's devices; batch preparation and sampling run on the device
that has the sampling state ("home"), the first one of the last stage.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from jinfer.engine.runner import device_state as states
from jinfer.engine.runner import head_steps
from jinfer.engine.runner.encoder_steps import fill_encoded
from jinfer.engine.runner.flat_batch import FlatBatch
from jinfer.engine.runner.program_cache import compiled
from jinfer.engine.runner.step_forms import CacheStep
from jinfer.engine.runner.step_key import Sizes, StepKey
from jinfer.engine.runner.step_table import abstract_tables, int32
from jinfer.engine.runner.verify import accept_states
from jinfer.modelspec.eagle_head import tap_names
from jinfer.nn.abstract_model import AbstractModel, Want
from jinfer.nn.row_edits import IMAGES
from jinfer.ops.attention.kv_cache import STATE, zero_cache
from jinfer.ops.backend import target_platform
from jinfer.ops.recurrence.drafted_scan import join_inputs, split_inputs
from jinfer.parallel import stage_forward
from jinfer.parallel.device_groups import DeviceGroup
from jinfer.parallel.microbatches import MicroBatches
from jinfer.parallel.pipeline_stage import PipelineStage, abstract_leaves, with_flat_parameters
from jinfer.progress import task


def with_own_images(batch: FlatBatch, stage: PipelineStage) -> FlatBatch:
    """A flat batch with the features that enter in a stage, by its own numbers of layers."""
    images: Any = batch.tables.get(IMAGES)
    if images is None:
        return batch
    part = stage.model.slice
    layers = part.layers["decoder"]
    names = {f"decoder.{layer}.x": f"decoder.{layer - layers.start}.x" for layer in layers}
    before = [name for name in images.edits if not name.endswith(".x")]
    names |= dict(zip(before, before, strict=True)) if part.first else {}
    edits = {names[name]: edit for name, edit in images.edits.items() if name in names}
    return batch._replace(tables={**batch.tables, IMAGES: images._replace(edits=edits)})


@dataclass(frozen=True)
class CompiledStage:
    """A compiled program, and the abstract arrays that it returns."""

    program: Callable[..., Any]
    out: Any


@dataclass
class StageCompiler:
    """Compiles programs of stages, and caches them.

    Attributes:
        model: the whole model.
        sizes: the engine's sizes, which all programs share.
        lanes: how slots are divided among micro-batches.
    """

    model: AbstractModel
    sizes: Sizes
    stages: tuple[PipelineStage, ...]
    lanes: MicroBatches
    _tracing: threading.Lock = field(default_factory=threading.Lock)
    _made: dict[Any, Future[CompiledStage]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def forget(self) -> None:
        """Drops all programs."""
        with self._lock:
            self._made.clear()

    @property
    def home(self) -> DeviceGroup:
        """The device that has the sampling states, and samples tokens."""
        return DeviceGroup(self.stages[-1].device_group.devices[:1])

    def empty_state(self) -> states.State:
        """A micro-batch's state without running sequences."""
        if not self.home.local:
            return self.state
        sizes = self.sizes
        state = states.empty_state(self.lanes.rows, sizes.context, sizes.vocab)
        return jax.device_put(state, self.home.replicated)

    @cached_property
    def state(self) -> Any:
        """The abstract state of a micro-batch."""
        sizes = self.sizes
        state = partial(states.empty_state, self.lanes.rows, sizes.context, sizes.vocab)
        return self.home.abstract_replicated(jax.eval_shape(state))

    def empty_cache(self, stage: PipelineStage) -> Any:
        """A stage's KV cache pools, filled with zeros; abstract ones of another process's stage."""
        if not stage.device_group.local:
            return self.cache(stage)
        return sharded_zeros(self.cache(stage))

    def decoder(
        self, batch: FlatBatch, last: Any, wants: tuple[Want, ...], *, drafted: bool = False
    ) -> tuple[CompiledStage, ...]:
        """`stage_forward.decoder_forward` of each stage.

        Args:
            batch: the abstract flat batch.
            last: the abstract indices of the tokens whose results are wanted; None: all.
            wants: the results that the last stage returns.
            drafted: as of `stage_forward.decoder_forward`.
        """
        made, x = list[CompiledStage](), None
        for stage in self.stages:
            which, named = (last, wants) if stage.last else (None, ())
            own = with_own_images(batch, stage)
            make = partial(self._decoder, stage, x, own, which, named, drafted)
            key = ("forward", stage.kind, repr((own, which)), named, drafted)
            made.append(self.cached(key, make))
            x = made[-1].out[1]
        return tuple(made)

    def _decoder(
        self,
        stage: PipelineStage,
        x: Any,
        batch: FlatBatch,
        last: Any,
        wants: tuple[Want, ...],
        drafted: bool,
    ) -> CompiledStage:
        function = partial(stage_forward.decoder_forward, stage.model, wants, drafted)
        own = abstract_leaves(stage), self.cache(stage)
        flat = with_flat_parameters(stage, function)
        return self.compile_stage(stage, flat, 1, own, (x, batch, last), (True, False))

    def accept(
        self, number: int, forward: CompiledStage, batch: FlatBatch, roots: Any
    ) -> CompiledStage | None:
        """`verify.accept_states` of a stage after its forward pass; None without states.

        Args:
            batch, roots: the abstract flat batch, and the abstract roots of its trees.
        """
        stage = self.stages[number]
        if STATE not in {cache.group for cache in stage.model.model.caches.values()}:
            return None

        def make() -> CompiledStage:
            given = batch, roots, int32(*batch.tokens.shape, *roots.shape)
            own = split_inputs(stage.device_group.as_shards(forward.out[0]))

            def function(cache: Any, inputs: Any, *given: Any) -> Any:
                return accept_states(join_inputs(cache, inputs), *given)

            made = self.compile_stage(stage, function, 0, own, given, True)

            def run(cache: Any, *given: Any) -> Any:
                return made.program(*split_inputs(cache), *given)

            return CompiledStage(run, made.out)

        return self.cached(("accept", stage.kind, repr((batch, roots))), make)

    def encoder(self, texts: Any, want: Want) -> tuple[CompiledStage | None, ...]:
        """`stage_forward.encoder_forward` of each stage; None for stages without encoder layers.

        Args:
            texts: the abstract token ids.
        """
        made, x = list[CompiledStage | None](), None
        for stage in self.stages:
            model_slice = stage.model.slice
            if not (model_slice.first or model_slice.last or model_slice.layers["encoder"]):
                made.append(None)
                continue
            named = (want,) if stage.last else ()
            make = partial(self._encoder, stage, x, texts, named)
            program = self.cached(("encode", stage.kind, texts.shape, named), make)
            made.append(program)
            x = program.out
        return tuple(made)

    def _encoder(
        self, stage: PipelineStage, x: Any, texts: Any, wants: tuple[Want, ...]
    ) -> CompiledStage:
        function = partial(stage_forward.encoder_forward, stage.model, wants)
        flat, own = with_flat_parameters(stage, function), (abstract_leaves(stage),)
        batch = x, texts, texts, int32(texts.shape[0])
        return self.compile_stage(stage, flat, (), own, batch, False)

    def fill(self, number: int, encoded: Any) -> CompiledStage:
        """`encoder_steps.fill_encoded` of a stage: the keys and values of its cross-attention."""
        stage = self.stages[number]

        def make() -> CompiledStage:
            model = stage.model.model

            def function(parameters: Any, *rest: Any) -> Any:
                return fill_encoded(model.module(parameters), *rest)

            own = abstract_leaves(stage), self.cache(stage)
            text = encoded, int32(1), int32(1, self.sizes.table)
            flat = with_flat_parameters(stage, function)
            return self.compile_stage(stage, flat, 1, own, text, True)

        return self.cached(("fill", stage.kind, encoded.shape), make)

    def tapped(self, number: int, tokens: int) -> CompiledStage | None:
        """Reads a stage's tapped hidden states for a draft head; None for stages without taps."""
        stage = self.stages[number]
        names = tap_names(stage.model.model.caches)
        if not names:
            return None

        def make() -> CompiledStage:
            cache, sizes = self.cache(stage), self.sizes
            batch = int32(tokens), int32(tokens), abstract_tables(sizes, sizes.slots)
            own = (tuple(cache[name] for name in names),)
            return self.compile_stage(stage, head_steps.gather_taps, (), own, batch, False)

        return self.cached(("kept", number, tokens), make)

    def of_cache(self, number: int, key: StepKey, step: CacheStep) -> CompiledStage:
        """A step of a stage's KV cache."""
        stage = self.stages[number]

        def make() -> CompiledStage:
            model, arguments = stage.model.model, list(step.arguments)
            own, parts = [self.cache(stage)], [True]
            for index, argument in enumerate(arguments):
                sharded = index == step.rows
                own.append(argument[number] if sharded else argument)
                parts.append(sharded)
            donated = () if step.reads else 0
            return self.compile_parts(stage, partial(step.function, model), donated, own, parts)

        # Rows have the shapes of a stage's own cache.
        which = stage.kind if step.rows is None else number
        return self.cached((key, which), make)

    def at_home(
        self, key: Any, function: Callable[..., Any], donated: Any, *given: Any
    ) -> CompiledStage:
        """A function compiled for home.

        Args:
            key: of the program, which is compiled once.
            given: abstract arguments: arrays of the host, or such as `on_home` gives.
        """
        return self.cached(("home", key), lambda: self.compile(function, donated, given))

    def on_home(self, tree: Any) -> Any:
        """Abstract arrays that are at home."""
        return self.home.abstract_replicated(tree)

    def cached(self, key: Any, make: Callable[[], CompiledStage]) -> CompiledStage:
        """The cached program of a key, compiled by the first thread that asks for it."""
        with self._lock:
            future = self._made.get(key)
            if is_first := future is None:
                future = self._made[key] = Future()
        assert future is not None, "cached, or set above"
        if is_first:
            try:
                with task("compiling for these devices, once"):
                    future.set_result(make())
            except BaseException as error:
                with self._lock:
                    self._made.pop(key, None)
                future.set_exception(error)
        return future.result()

    def compile(
        self,
        function: Callable[..., Any],
        donated: Any,
        given: Any,
        device_group: DeviceGroup | None = None,
    ) -> CompiledStage:
        """Compiles a function for a stage's devices or for home.

        The program of another process's devices returns abstract arrays.

        Args:
            donated: the arguments whose buffers may be reused.
            given: the abstract arguments.
        """
        where = device_group or self.home
        with self._tracing, target_platform(where.platform):
            if not where.local:
                out = jax.eval_shape(function, *given)
                return CompiledStage(lambda *_: out, out)
            lowered = jax.jit(function, donate_argnums=donated).lower(*given)
        return CompiledStage(compiled(lowered), lowered.out_info)

    def compile_stage(
        self,
        stage: PipelineStage,
        function: Callable[..., Any],
        donated: Any,
        own: tuple[Any, ...],
        replicated: tuple[Any, ...],
        out: Any,
    ) -> CompiledStage:
        """Compiles a function for a stage's devices.

        Args:
            own: its first arguments, of which each device has its own shard.
            replicated: its other arguments.
            out: whether the results are sharded: a boolean, or a tuple of them.
        """
        parts = (True,) * len(own) + (False,) * len(replicated)
        return self.compile_parts(stage, function, donated, (*own, *replicated), parts, out)

    def compile_parts(
        self,
        stage: PipelineStage,
        function: Callable[..., Any],
        donated: Any,
        arguments: Sequence[Any],
        parts: Sequence[bool],
        out: Any = True,
    ) -> CompiledStage:
        """As `compile_stage`; `parts` says of each argument whether it is sharded."""
        group = stage.device_group
        placed = [
            argument if sharded else group.abstract_replicated(argument)
            for argument, sharded in zip(arguments, parts, strict=True)
        ]
        return self.compile(group.shard_map(function, parts, out), donated, placed, group)

    def cache(self, stage: PipelineStage) -> Any:
        """A stage's abstract KV cache pools on its devices."""
        return self.pools(stage, self.sizes.blocks)

    def pools(
        self,
        stage: PipelineStage,
        blocks: Mapping[str, int],
        device_group: DeviceGroup | None = None,
    ) -> Any:
        """A stage's abstract pools with a number of blocks for each cache group.

        Groups without blocks have no pool.
        """
        shapes = {n: s for n, s in stage.model.model.caches.items() if blocks.get(s.group)}
        counts = {name: blocks[shape.group] for name, shape in shapes.items()}
        pools = jax.eval_shape(lambda: zero_cache(shapes, counts, self.sizes.kv_cache))
        return (device_group or stage.device_group).abstract_shards(pools)


def sharded_zeros(abstract: Any) -> Any:
    """Zeros with the shapes, dtypes and shardings of abstract arrays."""
    shardings = jax.tree.map(lambda array: array.sharding, abstract)
    zeros = partial(jax.tree.map, lambda array: jnp.zeros(array.shape, array.dtype), abstract)
    return jax.jit(zeros, out_shardings=shardings)()
