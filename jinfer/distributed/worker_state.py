"""A process's part of a model: the programs of its stages, and what flows between them.

A call is computed by all processes together. Each knows from the plan alone which of its pieces are
its own, and from where their inputs come: from a stage here, or from another process, which sends
them as soon as they are computed. So pieces are not launched in the order of calls but when their
inputs are there, and a stage of one process computes one lane while another has the next.

Between processes vectors go through the hosts: a device that waits in its queue for another host's
would keep from computing all that is behind. Only sums within a stage whose devices are of several
processes are exchanged by the devices themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from jinfer.distributed.futures import Results, Values
from jinfer.distributed.named_threads import Threads
from jinfer.distributed.process_group import Group
from jinfer.distributed.wire_format import Ref
from jinfer.engine.runner.flat_batch import Places
from jinfer.parallel.device_groups import first_copy
from jinfer.parallel.microbatches import Lanes
from jinfer.parallel.stage_programs import Made, Making, Stage

X = "x {}"  # the result's name of what a stage takes from the one before
OUT, PLACES, DONE = "out", "places", "done"


@dataclass(eq=False, kw_only=True)
class Part:
    """What this process has and does of a model.

    Attributes:
        leaves: parameters of all stages; those of stages elsewhere are abstract.
    """

    group: Group
    making: Making
    lanes: Lanes
    leaves: Sequence[Any] = ()
    caches: dict[int, Any] = field(default_factory=dict)
    states: dict[int, Any] = field(default_factory=dict)
    _kept: dict[int, dict[str, Values]] = field(default_factory=dict)

    @property
    def results(self) -> Results:
        """What calls give."""
        return self.group.results

    @cached_property
    def threads(self) -> Threads:
        """From which programs are launched."""
        several = [s for s in self.stages if s.site.here and len(s.site.here) < len(s.site.devices)]
        return Threads(self.group.fail, together=len(several) > 1)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All of them, wherever they are."""
        return self.making.stages

    @cached_property
    def own(self) -> dict[int, Stage]:
        """The stages that are here, or partly here, by their numbers."""
        return {number: stage for number, stage in enumerate(self.stages) if stage.site.here}

    @cached_property
    def home(self) -> int:
        """The process that has the states, and chooses tokens."""
        return self.making.home.devices[0].process_index

    @property
    def is_home(self) -> bool:
        """Whether that is this one."""
        return self.home == self.group.rank

    def owners(self, number: int) -> set[int]:
        """The processes that have devices of a stage."""
        return {device.process_index for device in self.stages[number].site.devices}

    def lane(self, lane: int, work: Callable[[], None]) -> None:
        """Has something done at home, in a lane's order; nothing elsewhere."""
        if self.is_home:
            self.threads.add(f"lane {lane}", work)

    def give(self, call: int, name: str, value: Any, to: set[int], sender: str) -> None:
        """Gives a result to those who expect it; from a thread of its own where they are others."""
        if self.group.rank in to:
            self.results.put(call, name, value)
        if others := to - {self.group.rank}:
            self.threads.add(f"{sender}, sending", partial(self._send, call, name, value, others))

    def _send(self, call: int, name: str, value: Any, others: set[int]) -> None:
        """Gives a result to other processes, as soon as it is computed."""
        here = jax.tree.map(np.asarray, value)
        for other in others:
            self.group.tell(other, result=name, call=call, value=here)

    def keep(self, call: int, name: str) -> Values:
        """A place at home for a result that later calls name with a `Ref`, until it is dropped."""
        place: Values = Future()
        if self.is_home:
            self._kept.setdefault(call, {})[name] = place
        return place

    def kept(self, given: Any) -> Callable[[], Any]:
        """What gives an argument, at home: itself, or what a `Ref` is kept of, once it is there."""
        if not isinstance(given, Ref) or not self.is_home:
            return lambda: given
        return self._kept[given.call][given.name].result

    def drop(self, calls: Sequence[int]) -> None:
        """Forgets kept results."""
        for call in calls:
            self._kept.pop(call, None)

    def reset(self, what: str) -> None:
        """Empties caches or states."""
        if what == "cache":
            for number, stage in self.own.items():
                self.threads.add(f"stage {number}", partial(self._empty, number, stage))
            return
        for lane in range(self.lanes.count):
            self.lane(lane, partial(self._fresh, lane))

    def _empty(self, number: int, stage: Stage) -> None:
        self.caches.pop(number, None)
        self.caches[number] = self.making.empty_cache(stage)

    def _fresh(self, lane: int) -> None:
        self.states[lane] = self.making.empty_state()

    def flow(
        self,
        call: int,
        made: tuple[Made, ...],
        places: Places | None,
        tables: Mapping[str, Any],
        last: Any,
    ) -> None:
        """Has all stages compute a flat batch; at home, `OUT` is their result.

        Args:
            places: where its tokens stand; None: home gives them as `PLACES`.
        """
        coming = None if places is not None else self.results.expect(call, PLACES)

        def run(number: int, x: Any) -> Any:
            stage = self.own[number]
            found = places if coming is None else Places(*coming.result())
            given, here = jax.tree.map(stage.site.take, (x, found))
            which = last if stage.last else None
            arguments = self.leaves[stage.leaves], self.caches[number], given, here, tables, which
            self.caches[number], out = made[number].program(*arguments)
            return out

        self._stages(call, run)

    def read(self, call: int, made: tuple[Made | None, ...], *texts: Any) -> None:
        """Has all stages of an encoder compute texts; at home, `OUT` is their result."""

        def run(number: int, x: Any) -> Any:
            stage = self.own[number]
            given, each = None if x is None else stage.site.take(x), made[number]
            if each is None:  # it has nothing of the encoder
                return given
            return each.program(self.leaves[stage.leaves], given, *texts)

        self._stages(call, run)

    def _stages(self, call: int, run: Callable[[int, Any], Any]) -> None:
        for number in self.own:
            coming = self.results.expect(call, X.format(number)) if number else None
            self.threads.add(f"stage {number}", partial(self._stage, call, number, coming, run))

    def _stage(
        self, call: int, number: int, coming: Values | None, run: Callable[[int, Any], Any]
    ) -> None:
        """Computes a stage, and gives the result to whoever is next."""
        out = run(number, None if coming is None else coming.result())
        owners, sender = self.owners(number), f"stage {number}"
        if self.stages[number].last:
            if self.is_home:
                self.give(call, OUT, jax.tree.map(first_copy, out), {self.home}, sender)
            return
        following = self.owners(number + 1)
        # Whoever has both takes it as it is; the first of the others' owners sends it to the rest.
        to = following & {self.group.rank}
        if self.group.rank == min(owners):
            to = to | (following - owners)
        value = out if to <= {self.group.rank} else first_copy(out)
        if to:
            self.give(call, X.format(number + 1), value, to, sender)

    def everybody(self) -> set[int]:
        """All processes."""
        return set(range(self.group.size))

    def state(self, lane: int, change: Callable[[Any], tuple[Any, Any]]) -> Any:
        """Gives a lane's state away and keeps the new one; what came beside it."""
        self.states[lane], out = change(self.states[lane])
        return out


def as_leaves(tree: Any) -> list[np.ndarray]:
    """A tree's arrays, as they are sent."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
