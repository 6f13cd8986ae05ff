"""Programs of layers of whose cache a part is in host memory.

Blocks of a lower number are on the device, the others on the host; the engine knows of neither. A
layer's new queries, keys and values go to the host, what its attention finds there comes back, and
meanwhile the device attends to the blocks that it has: no block moves. So a layer takes several
programs, launched in turn: in one program for both, the host's part could not be a program of the
host's own, with its custom calls and threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from jax import Array

from jinfer.engine.runner import steps
from jinfer.engine.runner.flat_batch import Places, Tables
from jinfer.engine.runner.sampler_output import MAX_COPIES
from jinfer.nn.abstract_model import Want
from jinfer.ops.attention.kv_cache import ENCODER, Cache
from jinfer.parallel import split_attention
from jinfer.parallel.block_transfer import Exchange, Place, put, take
from jinfer.parallel.device_groups import Site
from jinfer.parallel.stage_programs import (
    Made,
    Making,
    Stage,
    int32,
    leaves_of,
    with_parts,
    zeros_like,
)

type Launch = Callable[..., Any]


class Pools(NamedTuple):
    """A stage's cache in two places. An attention whose blocks are all in one is in that alone."""

    device: Cache
    host: Cache


@dataclass(frozen=True)
class _Attention:
    """The programs of one attention."""

    name: str
    group: str
    ask: Callable[..., Any]
    here: Callable[..., Any] | None
    there: Callable[..., Any]


@dataclass(frozen=True)
class _Layer:
    """A layer's programs, to be called as one."""

    stage: Stage
    host: Site
    attentions: tuple[_Attention, ...]
    tell: Callable[..., Any]
    launch: Launch

    def __call__(
        self,
        leaves: Any,
        cache: Pools,
        x: Array,
        places: Places,
        tables: Tables,
        _: None,
        there: tuple[Places, Tables],
    ) -> tuple[Pools, Array]:
        """The cache and the layer's output.

        Args:
            there: places and tables, on the host.
        """
        device, host, told = dict(cache.device), dict(cache.host), dict[str, Any]()
        caches = self.stage.model.model.caches
        whole = {name: one for name, one in device.items() if caches[name].group == ENCODER}
        at, on_host = (places, tables), self.host
        for each in self.attentions:
            name, group, found = each.name, each.group, list[Any]()
            asked = each.ask(leaves, whole, x, *at, told)
            # First, as it need not wait: what is asked has to reach the host.
            if each.here is not None:
                given = asked, device[name], places.rows, places.positions, tables[group]
                part, device[name] = each.here(*given)
                found.append(part)
            own = (there[0].rows, there[0].positions, there[1][group])
            moved = on_host.taken(asked), host[name], *own
            part, host[name] = self.launch("host", each.there, *moved)
            told[name] = (*found, self.stage.site.taken(part))
        return Pools(device, host), self.tell(leaves, whole, x, *at, told)


@dataclass(kw_only=True)
class HostedMaking(Making):
    """Makes programs of stages of which some have a part of their cache in host memory.

    Attributes:
        hosted: blocks of each group that are there: those of the highest numbers.
        launch: launches the host's programs.
    """

    hosted: Mapping[str, int]
    launch: Launch

    def _there(self, stage: Stage) -> tuple[Site, Any]:
        """The host, and the abstract pools there."""
        assert stage.host is not None, "of stages with a part there alone"
        return stage.host, self.pools(stage, self.hosted, stage.host)

    def _cache(self, stage: Stage) -> Any:
        """The abstract pools on the stage's devices."""
        if stage.host is None:
            return super()._cache(stage)
        total = self.sizes.blocks
        return self.pools(stage, {group: self._boundary(group) for group in total})

    def _boundary(self, group: str) -> int:
        """The first block that is on the host."""
        return self.sizes.blocks[group] - self.hosted.get(group, 0)

    def empty_cache(self, stage: Stage) -> Any:
        """As `Making.empty_cache`, in both places."""
        device = super().empty_cache(stage)
        if stage.host is None:
            return device
        return Pools(device, zeros_like(self._there(stage)[1]))

    def _flow(
        self,
        stage: Stage,
        x: Any,
        tokens: int,
        rows: tuple[int, int],
        chosen: int | None,
        wants: tuple[Want, ...],
        copies: int,
    ) -> Made:
        if stage.host is None:
            return super()._flow(stage, x, tokens, rows, chosen, wants, copies)
        site, (host, pools) = stage.site, self._there(stage)
        device, caches = self._cache(stage), stage.model.model.caches
        whole = {name: one for name, one in device.items() if caches[name].group == ENCODER}
        places, tables, _ = self.flat(tokens, rows, chosen, copies)
        at = site.of_same((x, places, tables))
        attentions, told = list[_Attention](), dict[str, Any]()
        for _ in pools:
            question = split_attention.Question()
            function = with_parts(stage, partial(split_attention.ask, stage.model, question))
            given = leaves_of(stage), whole, *at, site.of_same(told)
            made = self.lowered(function, (), given, site)
            name, group = question.name, caches[question.name].group
            begin, end = self._boundary(group), self.sizes.blocks[group]
            of = partial(self._part, question, made.out, places, tables[group])
            there = of((begin, end), pools[name], host)
            here = of((0, begin), device[name], site) if begin else None
            parts = [each.out[0] for each in (here, there) if each is not None]
            told[name] = tuple(parts)
            programs = None if here is None else here.program, there.program
            attentions.append(_Attention(name, group, made.program, *programs))
        function = with_parts(stage, partial(split_attention.tell, stage.model))
        tell = self.lowered(function, (), (leaves_of(stage), whole, *at, site.of_same(told)), site)
        layer = _Layer(stage, host, tuple(attentions), tell.program, self.launch)
        return Made(layer, (Pools(device, pools), tell.out))

    def _part(
        self,
        question: split_attention.Question,
        asked: Any,
        places: Any,
        table: Any,
        blocks: tuple[int, int],
        pool: Any,
        site: Site,
    ) -> Made:
        """`apart.part` over some blocks, at a site."""
        given = *site.of_same((asked,)), pool, *site.of_same((places.rows, places.positions, table))
        function = partial(split_attention.part, question.rules, blocks)
        key = "part", site, blocks, repr(question.rules), repr(given)
        return self.once(key, lambda: self.lowered(function, 1, given, site))

    def fill(self, number: int, encoded: Any) -> Made:
        """As `Making.fill`: what is kept of an encoder's output is on the device."""
        made = super().fill(number, encoded)
        if self.stages[number].host is None:
            return made

        def run(leaves: Any, cache: Pools, *rest: Any) -> Pools:
            return cache._replace(device=made.program(leaves, cache.device, *rest))

        return Made(run, made.out)

    def copy(self, number: int) -> Made:
        """As `Making.copy`, also from one place to the other."""
        stage = self.stages[number]
        if stage.host is None:
            return super().copy(number)
        model, (host, pools) = stage.model.model, self._there(stage)
        boundaries = {group: self._boundary(group) for group in self.sizes.blocks}
        both = {name for name in pools if boundaries[model.caches[name].group]}
        which = {group: int32(MAX_COPIES) for group in self.sizes.blocks}
        blocks = self.pools(stage, dict.fromkeys(self.hosted, MAX_COPIES)) if both else {}

        def made(name: str, function: Any, donated: Any, given: Any, site: Site) -> Any:
            key = name, site, stage.kind
            return self.once(key, lambda: self.lowered(function, donated, given, site)).program

        places = []
        for site, own in ((stage.site, self._cache(stage)), (host, pools)):
            some = {name: own[name] for name in both}
            ids, new = site.of_same((which, blocks))
            given = own, ids, ids, *site.of_same((int32(),))
            copy = made("copy", partial(steps.copy_blocks, model), 0, given, site)
            taking = made("take", partial(take, model), (), (some, ids), site) if both else None
            putting = made("put", partial(put, model), 0, (own, new, ids), site) if both else None
            # The whole is launched by the stage's thread: a second time would wait for itself.
            launch = partial(self.launch, "host") if site is host else _at_once
            places.append(Place(site, copy, taking, putting, launch))
        exchange = Exchange(boundaries, frozenset(both), (places[0], places[1]))

        def run(cache: Pools, *given: Any) -> Pools:
            return Pools(*exchange((cache.device, cache.host), *given))

        return Made(run, Pools(self._cache(stage), pools))


def _at_once(program: Callable[..., Any], *given: Any) -> Any:
    return program(*given)
