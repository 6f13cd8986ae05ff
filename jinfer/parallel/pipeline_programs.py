"""The programs of a model whose stages are on several devices.

For the engine they are like those of one device: it gives leaves, cache and state, and gets them
back. Here leaves and cache are the stages' own, one after the other, and the state is that of each
lane, on the last stage's first device, where tokens are chosen. A call only launches: each stage
waits for what the one before gives, the host for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jinfer.engine.requests import EngineError
from jinfer.engine.runner import search_steps
from jinfer.engine.runner.compiled_programs import Program, Programs, Shape
from jinfer.engine.runner.flat_batch import Places
from jinfer.engine.runner.mmap_limit import check_maps
from jinfer.engine.runner.verify import Nodes
from jinfer.modelspec.draft_head import taps
from jinfer.nn.abstract_model import Want
from jinfer.ops.attention.kv_cache import ENCODER
from jinfer.parallel.device_groups import Site, first_copy
from jinfer.parallel.host_kv_cache import HostedMaking
from jinfer.parallel.launcher import Launcher
from jinfer.parallel.microbatches import LaneRows, Lanes, LaneStates
from jinfer.parallel.stage_programs import Made, Making, Stage, float32, int32
from jinfer.parallel.timeline import Timeline
from jinfer.parallel.weight_offload import Stream
from jinfer.sampling.logprobs import log_probabilities

type Caches = tuple[Any, ...]


@dataclass(kw_only=True)
class StagedPrograms(Programs):
    """The programs of several stages.

    Attributes:
        stages: in their order.
        lanes: how slots are divided.
        timeline: notes when stages are busy, if it is there.
        hosted: blocks of each group that are in host memory, where a stage's cache is divided.
        memory: what goes where, for people.
    """

    stages: tuple[Stage, ...]
    lanes: Lanes
    timeline: Timeline | None = None
    hosted: Mapping[str, int] = field(default_factory=dict)
    memory: str = ""
    most_steps: int = 1

    @cached_property
    def making(self) -> Making:
        """Makes the stages' programs."""
        given = self.model, self.sizes, self.stages, self.lanes, self._tracing
        if not self.hosted:
            return Making(*given)
        return HostedMaking(*given, hosted=self.hosted, launch=self.launch)

    @cached_property
    def streams(self) -> dict[int, Stream]:
        """What brings the weights of stages that stay in host memory."""
        found: dict[int, Stream] = {}
        for site in dict.fromkeys(stage.site for stage in self.stages if stage.streamed):
            turns = tuple(
                n for n, each in enumerate(self.stages) if each.streamed and each.site == site
            )
            found |= dict.fromkeys(turns, Stream(site, turns))
        return found

    @property
    def told(self) -> Mapping[str, slice]:
        """None: stages are given their weights, each where its devices have them."""
        return {}

    def leaves_of(self, number: int, leaves: Any) -> Any:
        """A stage's parameters, where its programs need them."""
        own = leaves[self.stages[number].leaves]
        if number not in self.streams:
            return own
        return self.streams[number].take(
            number, {n: leaves[self.stages[n].leaves] for n in self.streams[number].turns}
        )

    @cached_property
    def width(self) -> int:
        """Of logits."""
        shape = Shape("forward", 1, rows=1)
        return int(jax.eval_shape(*self._eval(shape))[1].shape[-1])

    @cached_property
    def launch(self) -> Launcher:
        """Launches the stages' programs, and those at home."""
        on_cpu = any(stage.site.platform == "cpu" for stage in self.stages)
        return Launcher(on_cpu and (len(self.stages) > 1 or bool(self.hosted)))

    def release(self) -> None:
        """As `Programs.release`."""
        super().release()
        self.making.forget()
        self.launch.close()
        for stream in self.streams.values():
            stream.forget()

    def empty_cache(self) -> Any:
        """The pools of each stage, which nobody has written to."""
        return tuple(map(self.making.empty_cache, self.stages))

    def empty_state(self) -> Any:
        """A state for each lane, in which nobody runs."""
        return tuple(self.making.empty_state() for _ in range(self.lanes.count))

    def _compile(self, shape: Shape) -> Program:
        check_maps()
        made: Callable[[Shape], Program] | None = getattr(self, f"_{shape.kind}", None)
        if made is None:
            raise EngineError(f"there is no {shape.kind} on several devices; leave out [partition]")
        return made(shape)

    def _logits(self, shape: Shape) -> Program:
        begin, flow = self._of_state(shape.tokens, shape.chosen)

        def run(
            leaves: Any, caches: Caches, states: LaneStates, slots: Any, positions: Any,
            tables: Any, last: Any,
        ) -> Any:  # fmt: skip
            lane, rows = self.lanes.of_slots(slots)
            given = states[lane], rows, positions, last
            places, chooses = self.launch(f"lane {lane}", begin, *given)
            own = self.lanes.tables(lane, tables)
            caches, out = flow(leaves, caches, places, own, last, lane)
            return caches, out["logits"], LaneRows(lane, chooses)

        return run

    def _choose(self, shape: Shape) -> Program:
        program = self.making.choose(shape.chosen, self.width, shape.stages).program

        def run(states: LaneStates, logits: Any, rows: Any, mask: Any, masked: Any) -> Any:
            known = isinstance(rows, LaneRows)
            lane, own = (rows.lane, rows.rows) if known else self.lanes.of_slots(rows)
            given = states[lane], logits, own, mask, masked
            state, chosen = self.launch(f"lane {lane}", program, *given)
            return self.lanes.changed(states, lane, state), chosen

        return run

    def _decode(self, shape: Shape) -> Program:
        count = shape.tokens
        begin, flow = self._of_state(count, count)
        choose = self.making.choose(count, self.width, shape.stages).program
        newest, every = np.full(count, -1, np.int32), np.arange(count, dtype=np.int32)
        unmasked = np.zeros((count, self.words), np.uint32), np.bool_(False)

        def run(
            leaves: Any, caches: Caches, states: LaneStates, slots: Any, tables: Any, *_: Any
        ) -> Any:  # of one step, which nobody interrupts
            lane, rows = self.lanes.of_slots(slots)
            given = states[lane], rows, newest, every
            places, chooses = self.launch(f"lane {lane}", begin, *given)
            own = self.lanes.tables(lane, tables)
            caches, out = flow(leaves, caches, places, own, every, lane)
            drawn = states[lane], out["logits"], chooses, *unmasked
            state, chosen = self.launch(f"lane {lane}", choose, *drawn)
            return caches, self.lanes.changed(states, lane, state), chosen

        return run

    def _verify(self, shape: Shape) -> Program:
        count = shape.tokens
        begin = self.making.plant(shape).program
        made = self.making.flow(count, (count, count), None, ("logits",), shape.rows)
        flow, choose = _Flow(self, made), self.making.walk(shape, self.width).program

        def run(
            leaves: Any, caches: Caches, states: LaneStates, nodes: Nodes, tables: Any,
            mask: Any = None,
        ) -> Any:  # fmt: skip
            lane, owners = self.lanes.of_slots(np.asarray(nodes.owners))
            own = nodes._replace(owners=cast("Any", owners))
            places = self.launch(f"lane {lane}", begin, states[lane], own)
            caches, out = flow(leaves, caches, places, tables, None, lane)
            given = states[lane], own, out["logits"], mask
            state, chosen = self.launch(f"lane {lane}", choose, *given)
            return caches, self.lanes.changed(states, lane, state), chosen

        return run

    def kept(self, cache: Any) -> Any:
        """As `Programs.kept`, of each stage."""
        of_stages = zip(self.stages, cache, strict=True)
        named = [(taps(stage.model.model.caches), own) for stage, own in of_stages]
        return tuple(tuple(own[name] for name in names) for names, own in named)

    def _kept(self, shape: Shape) -> Program:
        made = [self.making.kept(number, shape.tokens) for number in range(len(self.stages))]
        out = [one.out for one in made if one is not None]
        join = self.making.finish(shape, partial(jnp.concatenate, axis=-1), out).program

        def run(layers: Any, *given: Any) -> Any:
            parts = []
            for number, (one, own) in enumerate(zip(made, layers, strict=True)):
                if one is not None:
                    part = self.launch(f"stage {number}", one.program, own, *given)
                    parts.append(self.making.home.take(first_copy(part)))
            return join(parts)

        return run

    def _of_state(self, tokens: int, chosen: int) -> tuple[Program, _Flow]:
        """What comes before the first stage, and all stages, for sequences of a state."""
        rows = self.lanes.rows
        made = self.making.flow(tokens, (rows, rows + 1), chosen, ("logits",))
        return self.making.begin(tokens, chosen).program, _Flow(self, made)

    def _forward(self, shape: Shape) -> Program:
        return self._whole(shape, (shape.want,), lambda out: out[shape.want].astype(jnp.float32))

    def _score(self, shape: Shape) -> Program:
        def finish(out: Any, following: Array) -> Any:
            return log_probabilities(out["logits"].astype(jnp.float32), following)

        return self._whole(shape, ("logits",), finish, int32(shape.tokens))

    def _beam(self, shape: Shape) -> Program:
        def finish(out: Any, scores: Array) -> Any:
            return search_steps.best_beams(self.model, out["logits"].astype(jnp.float32), scores)

        return self._whole(shape, ("logits",), finish, float32(shape.tokens), several=True)

    def _contrast(self, shape: Shape) -> Program:
        def finish(out: Any, length: Array, *rest: Array) -> Any:
            past, probabilities, alpha = rest
            return search_steps.best_candidate(self.model, out, length, past, probabilities, alpha)

        more = (float32(self.sizes.context, self.hidden), float32(shape.tokens), float32())
        whole = self._whole(shape, ("logits", "hidden"), finish, int32(), *more, several=True)

        def run(leaves: Any, caches: Caches, tokens: Any, rows: Any, at: Any, *rest: Any) -> Any:
            return whole(leaves, caches, tokens, rows, at, *rest[:3], at[0], *rest[3:])

        return run

    def _whole(
        self,
        shape: Shape,
        wants: tuple[Want, ...],
        finish: Callable[..., Any],
        *more: Any,
        several: bool = False,
    ) -> Program:
        """A pass over sequences without a state, and what is made of its results at home.

        Args:
            more: of what shape `finish` gets what follows the flat batch.
            several: whether it gives several results, which follow the cache one by one.
        """
        made = self.making.flow(shape.tokens, (shape.rows, shape.rows), None, wants)
        flow, (_, out) = _Flow(self, made), made[-1].out
        end = self.making.finish(shape, finish, out, *more).program

        def run(
            leaves: Any, caches: Caches, tokens: Any, rows: Any, positions: Any, prompts: Any,
            tables: Any, encoded: Any, *rest: Any,
        ) -> Any:  # fmt: skip
            places = Places(tokens, rows, positions, prompts, encoded)
            caches, out = flow(leaves, caches, places, tables, None, 0)
            done = end(out, *rest)
            return (caches, *done) if several else (caches, done)

        return run

    def _fill(self, shape: Shape) -> Program:
        made = self.making.read(1, shape.tokens, ("hidden",))
        assert made[-1] is not None, "the last stage gives what an encoder gives"
        given = made[-1].out["hidden"]
        fills = {
            number: self.making.fill(number, given).program
            for number, stage in enumerate(self.stages)
            if any(kept.group == ENCODER for kept in stage.model.model.caches.values())
        }

        def run(leaves: Any, caches: Caches, tokens: Any, lengths: Any, table: Any) -> Any:
            encoded = self._read(made, leaves, tokens, np.zeros_like(tokens), lengths)["hidden"]
            done = list(caches)
            for number, fill in fills.items():
                stage = self.stages[number]
                given = stage.site.take(encoded), lengths, table
                arguments = self.leaves_of(number, leaves), caches[number], *given
                done[number] = self.launch(f"stage {number}", fill, *arguments)
                if stage.streamed:
                    # What it gives is given away to the next step.
                    jax.block_until_ready(done[number])
            return tuple(done)

        return run

    def _encode(self, shape: Shape) -> Program:
        made = self.making.read(shape.rows, shape.tokens, (shape.want,))

        def run(leaves: Any, caches: Any, tokens: Any, types: Any, lengths: Any) -> Any:
            out = self._read(made, leaves, tokens, types, lengths)[shape.want]
            return first_copy(out).astype(jnp.float32)

        return run

    def _read(self, made: tuple[Made | None, ...], leaves: Any, *texts: Any) -> Any:
        """What the last stage gives of an encoder."""
        x = None
        for number, (stage, each) in enumerate(zip(self.stages, made, strict=True)):
            if each is None:
                continue
            x = None if x is None else stage.site.take(x)
            x = each.program(self.leaves_of(number, leaves), x, *texts)
            if stage.streamed:
                self.streams[number].computed(x)
        return x

    def _copy(self, shape: Shape) -> Program:
        made = [self.making.copy(number).program for number in range(len(self.stages))]

        def run(caches: Caches, *given: Any) -> Any:
            return tuple(
                self.launch(f"stage {number}", copy, cache, *given)
                for number, (copy, cache) in enumerate(zip(made, caches, strict=True))
            )

        return run

    def _admit(self, shape: Shape) -> Program:
        program = self.making.admit().program

        def run(states: LaneStates, row: Any, slot: Any) -> LaneStates:
            lane, own = self.lanes.of_slots(np.array([slot]))
            state = self.launch(f"lane {lane}", program, states[lane], row, own[0])
            return self.lanes.changed(states, lane, state)

        return run


@dataclass(frozen=True)
class _Flow:
    """A call of all stages over a flat batch."""

    programs: StagedPrograms
    made: tuple[Made, ...]

    def __call__(
        self,
        leaves: Any,
        caches: Caches,
        places: Places,
        tables: Mapping[str, Any],
        last: Any,
        lane: int,
    ) -> tuple[Caches, Any]:
        """The caches, and the results at home."""
        done, x = list[Any](), None
        programs, timeline = self.programs, self.programs.timeline
        known: dict[Site, tuple[Places, Any]] = {}

        def at(site: Site) -> tuple[Places, Any]:
            if site not in known:
                known[site] = site.taken((places, tables))
            return known[site]

        for number, (stage, made) in enumerate(zip(programs.stages, self.made, strict=True)):
            given, here = stage.site.taken(x), at(stage.site)
            own = programs.leaves_of(number, leaves)
            arguments = own, caches[number], given, *here, last if stage.last else None
            more = () if stage.host is None else (at(stage.host),)
            cache, x = programs.launch(f"stage {number}", made.program, *arguments, *more)
            # The device lets them go when it has computed.
            del own, arguments
            if stage.streamed:
                programs.streams[number].computed(x)
            done.append(cache)
            if timeline is not None:
                timeline.note(number, lane, here[0].tokens if given is None else given, x)
        return tuple(done), jax.tree.map(first_copy, x)
