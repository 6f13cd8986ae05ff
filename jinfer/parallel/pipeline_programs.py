"""Pipeline parallelism: the engine's programs for a model in stages on several devices.

The engine uses them like those of one device: it passes parameters, cache and state, and gets them
back. Here parameters and cache are those of each stage, and there is a state for each micro-batch,
on the last stage's first device ("home"), where tokens are sampled. Calls are asynchronous: each
stage waits for its input from the previous one, the host for none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jinfer.engine.requests import EngineError
from jinfer.engine.runner.compiled_programs import CompiledPrograms, Program
from jinfer.engine.runner.flat_batch import FlatBatch
from jinfer.engine.runner.mmap_limit import check_maps
from jinfer.engine.runner.search_steps import best_beams, best_candidate
from jinfer.engine.runner.step_key import StepKey, StepKind
from jinfer.engine.runner.step_table import float32, int32
from jinfer.engine.runner.verify import Nodes
from jinfer.modelspec.eagle_head import tap_names
from jinfer.nn.abstract_model import Want
from jinfer.ops.attention.kv_cache import ENCODER
from jinfer.parallel.device_groups import first_replica
from jinfer.parallel.host_kv_cache import HostCacheCompiler
from jinfer.parallel.launcher import Launcher
from jinfer.parallel.microbatches import MicroBatches, MicroBatchRows, MicroBatchStates
from jinfer.parallel.pipeline_forward import PipelineForward, StageCaches
from jinfer.parallel.pipeline_stage import PipelineStage
from jinfer.parallel.stage_programs import CompiledStage, StageCompiler
from jinfer.parallel.stage_transfers import abstract_stage_rows, make_gather, make_scatter
from jinfer.parallel.timeline import Timeline
from jinfer.parallel.weight_offload import WeightPrefetcher
from jinfer.sampling.logprobs import log_probabilities


@dataclass(kw_only=True)
class PipelinePrograms(CompiledPrograms):
    """The programs of a pipeline.

    Attributes:
        stages: the pipeline's stages, in order.
        lanes: how slots are divided among micro-batches.
        timeline: records when stages are busy; None: nothing is recorded.
        hosted: how many cache blocks of each group are in host memory (KV cache offload).
        memory: the memory plan as a table, to be shown.
    """

    stages: tuple[PipelineStage, ...]
    lanes: MicroBatches
    timeline: Timeline | None = None
    hosted: Mapping[str, int] = field(default_factory=dict)
    memory: str = ""
    most_steps: int = 1

    @cached_property
    def compiler(self) -> StageCompiler:
        """Compiles the stages' programs."""
        arguments = self.model, self.sizes, self.stages, self.lanes, self._tracing
        if not self.hosted:
            return StageCompiler(*arguments)
        return HostCacheCompiler(*arguments, hosted=self.hosted, launch=self.launch)

    @property
    def home_device(self) -> jax.Device:
        """As `CompiledPrograms.home_device`: the first one of the last stage."""
        return self.compiler.home.devices[0]

    @cached_property
    def streams(self) -> dict[int, WeightPrefetcher]:
        """Weight offload: the prefetcher of each offloaded stage, by the stage's number."""
        prefetchers: dict[int, WeightPrefetcher] = {}
        for device_group in dict.fromkeys(
            stage.device_group for stage in self.stages if stage.streamed
        ):
            turns = tuple(
                n
                for n, stage in enumerate(self.stages)
                if stage.streamed and stage.device_group == device_group
            )
            prefetchers |= dict.fromkeys(turns, WeightPrefetcher(device_group, turns))
        return prefetchers

    @property
    def pointer_layers(self) -> Mapping[str, slice]:
        """No weight pointers: stages get their weights as arguments."""
        return {}

    def leaves_of(self, number: int, leaves: Any) -> Any:
        """A stage's parameters, on its devices."""
        stage_leaves = leaves[self.stages[number].leaves]
        if number not in self.streams:
            return stage_leaves
        return self.streams[number].take(
            number, {n: leaves[self.stages[n].leaves] for n in self.streams[number].turns}
        )

    @cached_property
    def width(self) -> int:
        """The number of logits of a token."""
        shape = StepKey("forward", 1, rows=1)
        return int(self.abstract_result(shape)[1].shape[-1])

    @cached_property
    def launch(self) -> Launcher:
        """Launches the stages' programs, and those at home, where samples are drawn."""
        on_cpu = any(stage.device_group.platform == "cpu" for stage in self.stages)
        return Launcher(on_cpu and (len(self.stages) > 1 or bool(self.hosted)))

    def release(self) -> None:
        super().release()
        self.compiler.forget()
        self.launch.close()
        for stream in self.streams.values():
            stream.forget()

    def allocate_kv_cache(self) -> Any:
        """The KV cache pools of each stage, filled with zeros."""
        return tuple(map(self.compiler.empty_cache, self.stages))

    def empty_state(self) -> Any:
        """A state for each micro-batch, without running sequences."""
        return tuple(self.compiler.empty_state() for _ in range(self.lanes.count))

    def _compile(self, shape: StepKey) -> Program:
        check_maps()
        make = self.step_makers.get(shape.kind)
        if make is None:
            raise EngineError(f"there is no {shape.kind} on several devices; leave out [partition]")
        return make(shape)

    @property
    def step_makers(self) -> Mapping[StepKind, Callable[[StepKey], Program]]:
        """Table of the steps that several devices can run; those of one are in `step_table`."""
        return {
            "logits": self._logits,
            "sample": self._sample,
            "decode": self._decode,
            "verify": self._verify,
            "gather_taps": self._gather_taps,
            "forward": self._forward,
            "score": self._score,
            "encode": self._encode,
            "beam": self._beam,
            "contrastive": self._contrastive,
            "fill_cross_attention": self._fill_cross_attention,
            "copy_blocks": self._copy_blocks,
            "set_slot": self._set_slot,
            "gather_blocks": lambda shape: make_gather(self.compiler, self.launch, shape.rows),
            "scatter_blocks": lambda shape: make_scatter(self.compiler, self.launch, shape.rows),
        }

    def abstract_rows(self, count: int) -> tuple[Any, ...]:
        return abstract_stage_rows(self.compiler, count)

    def _logits(self, shape: StepKey) -> Program:
        flow = self._of_state(shape.tokens, shape.chosen)

        def run(*arguments: Any) -> Any:
            lane, caches, logits, rows = flow(*arguments)
            return caches, logits, MicroBatchRows(lane, rows)

        return run

    def _sample(self, shape: StepKey) -> Program:
        program = self.compiler.choose(shape.chosen, self.width, shape.sampling).program

        def run(states: MicroBatchStates, logits: Any, rows: Any, mask: Any, masked: Any) -> Any:
            in_lane = isinstance(rows, MicroBatchRows)
            lane, lane_rows = (rows.lane, rows.rows) if in_lane else self.lanes.of_slots(rows)
            arguments = states[lane], logits, lane_rows, mask, masked
            state, chosen = self.launch(f"lane {lane}", program, *arguments)
            return self.lanes.changed(states, lane, state), chosen

        return run

    def _decode(self, shape: StepKey) -> Program:
        count = shape.tokens
        flow = self._of_state(count, count)
        choose = self.compiler.choose(count, self.width, shape.sampling).program
        newest, every = np.full(count, -1, np.int32), np.arange(count, dtype=np.int32)
        unmasked = np.zeros((count, self.words), np.uint32), np.bool_(False)

        def run(
            leaves: Any, caches: StageCaches, states: MicroBatchStates, slots: Any, tables: Any,
            *_: Any,
        ) -> Any:  # fmt: skip
            # The other arguments are for several steps in one call, and for interrupts.
            sequences = leaves, caches, states, slots
            lane, caches, logits, rows = flow(*sequences, newest, tables, every)
            arguments = states[lane], logits, rows, *unmasked
            state, chosen = self.launch(f"lane {lane}", choose, *arguments)
            return caches, self.lanes.changed(states, lane, state), chosen

        return run

    def _verify(self, shape: StepKey) -> Program:
        count = shape.tokens
        begin = self.compiler.plant(shape).program
        made = self.compiler.decoder(
            count, (count, count), None, ("logits",), shape.rows, drafted=True
        )
        flow, choose = PipelineForward(self, made), self.compiler.walk(shape, self.width).program
        accepts = [self.compiler.accept(n, shape, stage) for n, stage in enumerate(made)]

        def run(
            leaves: Any, caches: StageCaches, states: MicroBatchStates, nodes: Nodes, tables: Any,
            mask: Any = None,
        ) -> Any:  # fmt: skip
            lane, owners = self.lanes.of_slots(np.asarray(nodes.owners))
            lane_nodes = nodes._replace(owners=cast("Any", owners))
            batch = self.launch(f"lane {lane}", begin, states[lane], lane_nodes, {})
            batch = batch._replace(tables=tables)
            caches, out = flow(leaves, caches, batch, None, lane)
            arguments = states[lane], lane_nodes, out["logits"], mask
            state, chosen = self.launch(f"lane {lane}", choose, *arguments)
            sampled = batch, nodes.roots, chosen.tokens
            caches = tuple(
                cache if accept is None else self._accept(number, accept, cache, sampled)
                for number, (accept, cache) in enumerate(zip(accepts, caches, strict=True))
            )
            return caches, self.lanes.changed(states, lane, state), chosen

        return run

    def _accept(self, number: int, accept: CompiledStage, cache: Any, sampled: Any) -> Any:
        """A stage's cache with the states after the accepted nodes."""
        here = self.stages[number].device_group.replicate_tree(sampled)
        return self.launch(f"stage {number}", accept.program, cache, *here)

    def hidden_taps(self, cache: Any) -> Any:
        """As `CompiledPrograms.hidden_taps`, for each stage."""
        of_stages = zip(self.stages, cache, strict=True)
        tapped = [(tap_names(stage.model.model.caches), pools) for stage, pools in of_stages]
        return tuple(tuple(pools[name] for name in names) for names, pools in tapped)

    def _gather_taps(self, shape: StepKey) -> Program:
        made = [self.compiler.tapped(number, shape.tokens) for number in range(len(self.stages))]
        out = [program.out for program in made if program is not None]
        join = self.compiler.finish(shape, partial(jnp.concatenate, axis=-1), out).program

        def run(layers: Any, *batch: Any) -> Any:
            hidden = []
            for number, (stage_program, tapped) in enumerate(zip(made, layers, strict=True)):
                if stage_program is not None:
                    states = self.launch(f"stage {number}", stage_program.program, tapped, *batch)
                    hidden.append(self.compiler.home.replicate(first_replica(states)))
            return join(hidden)

        return run

    def _of_state(self, tokens: int, chosen: int) -> Program:
        """The forward pass of all stages for sequences in a state.

        It returns their micro-batch, the caches, the logits, and the state rows of these.
        """
        rows = self.lanes.rows
        made = self.compiler.decoder(tokens, (rows, rows + 1), chosen, ("logits",))
        begin, flow = self.compiler.begin(tokens, chosen).program, PipelineForward(self, made)

        def run(
            leaves: Any, caches: StageCaches, states: MicroBatchStates, slots: Any, positions: Any,
            tables: Any, last: Any,
        ) -> Any:  # fmt: skip
            lane, rows = self.lanes.of_slots(slots)
            given: Any = states[lane], rows, positions, {}, last
            batch, sampled_rows = self.launch(f"lane {lane}", begin, *given)
            batch = batch._replace(tables=self.lanes.tables(lane, tables))
            caches, out = flow(leaves, caches, batch, last, lane)
            return lane, caches, out["logits"], sampled_rows

        return run

    def _forward(self, shape: StepKey) -> Program:
        return self._whole(shape, (shape.want,), lambda out: out[shape.want].astype(jnp.float32))

    def _score(self, shape: StepKey) -> Program:
        def finish(out: Any, following: Any) -> Any:
            return log_probabilities(out["logits"].astype(jnp.float32), following)

        return self._whole(shape, ("logits",), finish, int32(shape.tokens))

    def _beam(self, shape: StepKey) -> Program:
        def finish(out: Any, scores: Any) -> Any:
            return best_beams(self.model, out["logits"].astype(jnp.float32), scores)

        return self._whole(shape, ("logits",), finish, float32(shape.tokens), several=True)

    def _contrastive(self, shape: StepKey) -> Program:
        finish = partial(best_candidate, self.model)
        past = float32(self.sizes.context, self.hidden)
        more = int32(), past, float32(shape.tokens), float32()
        whole = self._whole(shape, ("logits", "hidden"), finish, *more, several=True)

        def run(*arguments: Any) -> Any:
            *first, batch, past, probabilities, alpha = arguments
            length = FlatBatch(*batch).positions[0]
            return whole(*first, batch, length, past, probabilities, alpha)

        return run

    def _whole(
        self,
        shape: StepKey,
        wants: tuple[Want, ...],
        finish: Callable[..., Any],
        *more: Any,
        several: bool = False,
    ) -> Program:
        """A forward pass over sequences without a state, and a function of its results at home.

        Args:
            finish: the function of the results and of the call's arguments after the flat batch.
            more: the abstract arrays of those arguments.
            several: whether `finish` returns a tuple, whose members follow the cache one by one.
        """
        made = self.compiler.decoder(shape.tokens, (shape.rows, shape.rows), None, wants)
        flow, (_, out) = PipelineForward(self, made), made[-1].out
        end = self.compiler.finish(shape, finish, out, *more).program

        def run(leaves: Any, caches: StageCaches, batch: FlatBatch, *rest: Any) -> Any:
            caches, out = flow(leaves, caches, batch, None, 0)
            finished = end(out, *rest)
            return (caches, *finished) if several else (caches, finished)

        return run

    def _fill_cross_attention(self, shape: StepKey) -> Program:
        made = self.compiler.encoder(1, shape.tokens, ("hidden",))
        assert made[-1] is not None, "the last stage returns the encoder's output"
        abstract = made[-1].out["hidden"]
        fills = {
            number: self.compiler.fill(number, abstract).program
            for number, stage in enumerate(self.stages)
            if any(cache.group == ENCODER for cache in stage.model.model.caches.values())
        }

        def run(leaves: Any, caches: StageCaches, tokens: Any, lengths: Any, table: Any) -> Any:
            encoded = self._read(made, leaves, tokens, np.zeros_like(tokens), lengths)["hidden"]
            filled = list(caches)
            for number, fill in fills.items():
                stage = self.stages[number]
                text = stage.device_group.replicate(encoded), lengths, table
                arguments = self.leaves_of(number, leaves), caches[number], *text
                filled[number] = self.launch(f"stage {number}", fill, *arguments)
                if stage.streamed:
                    # The prefetcher cannot wait for the result, which the next step donates.
                    jax.block_until_ready(filled[number])
            return tuple(filled)

        return run

    def _encode(self, shape: StepKey) -> Program:
        made = self.compiler.encoder(shape.rows, shape.tokens, (shape.want,))

        def run(leaves: Any, caches: Any, tokens: Any, types: Any, lengths: Any) -> Any:
            out = self._read(made, leaves, tokens, types, lengths)[shape.want]
            return first_replica(out).astype(jnp.float32)

        return run

    def _read(self, made: tuple[CompiledStage | None, ...], leaves: Any, *texts: Any) -> Any:
        """The results of an encoder's forward pass through all stages."""
        x = None
        for number, (stage, encoder) in enumerate(zip(self.stages, made, strict=True)):
            if encoder is None:
                continue
            x = None if x is None else stage.device_group.replicate(x)
            x = encoder.program(self.leaves_of(number, leaves), x, *texts)
            if stage.streamed:
                self.streams[number].computed(x)
        return x

    def _copy_blocks(self, shape: StepKey) -> Program:
        copies = [self.compiler.copy(number).program for number in range(len(self.stages))]

        def run(caches: StageCaches, *ids: Any) -> Any:
            return tuple(
                self.launch(f"stage {number}", copy, cache, *ids)
                for number, (copy, cache) in enumerate(zip(copies, caches, strict=True))
            )

        return run

    def _set_slot(self, shape: StepKey) -> Program:
        program = self.compiler.admit().program

        def run(states: MicroBatchStates, row: Any, slot: Any) -> MicroBatchStates:
            lane, rows = self.lanes.of_slots(np.array([slot]))
            state = self.launch(f"lane {lane}", program, states[lane], row, rows[0])
            return self.lanes.changed(states, lane, state)

        return run
