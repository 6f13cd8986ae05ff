"""The compiled programs of single stages, each made once, from which whole calls are put together.

A stage's part of a forward pass runs on its devices; what comes before the first stage and after
the last one, on the device that has the state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from jinfer.engine.runner import device_state as states
from jinfer.engine.runner import head_steps, steps
from jinfer.engine.runner.compiled_programs import Shape, Sizes
from jinfer.engine.runner.flat_batch import Places, placed
from jinfer.engine.runner.program_cache import compiled
from jinfer.engine.runner.sampler_output import MAX_COPIES
from jinfer.engine.runner.verify import Nodes, planted, walk
from jinfer.modelspec.draft_head import taps
from jinfer.nn.abstract_model import AbstractModel, Want
from jinfer.nn.forward_context import Copies
from jinfer.ops.attention.kv_cache import empty
from jinfer.ops.backend import target
from jinfer.parallel import stage_forward
from jinfer.parallel.device_groups import Site
from jinfer.parallel.microbatches import Lanes
from jinfer.parallel.stage import StageModel
from jinfer.progress import task


@dataclass(frozen=True)
class Stage:
    """A stage and its devices.

    Attributes:
        leaves: which of all stages' parameters in their parts are its own.
        streamed: whether they stay in host memory until they are needed.
        host: where a part of its cache is, if it is one layer that has such.
    """

    model: StageModel
    site: Site
    leaves: slice
    streamed: bool = False
    host: Site | None = None

    @cached_property
    def kind(self) -> str:
        """Equal for stages that have the same programs."""
        part, where = self.model.part, (self.site.devices, self.host)
        return repr((where, part.first, part.last, self.model.model.described()))

    @property
    def last(self) -> bool:
        """Whether it gives results."""
        return self.model.part.last


@dataclass(frozen=True)
class Made:
    """A compiled program, and the abstract arrays that it gives."""

    program: Callable[..., Any]
    out: Any


@dataclass
class Making:
    """Makes programs of stages.

    Attributes:
        model: the whole.
        tracing: held while Python traces: threads side by side would all be late.
    """

    model: AbstractModel
    sizes: Sizes
    stages: tuple[Stage, ...]
    lanes: Lanes
    tracing: threading.Lock
    _made: dict[Any, Future[Made]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def forget(self) -> None:
        """Lets all programs go."""
        with self._lock:
            self._made.clear()

    @property
    def home(self) -> Site:
        """Where states are, and tokens are chosen."""
        return Site(self.stages[-1].site.devices[:1])

    @property
    def words(self) -> int:
        """Words of a mask with a bit for each token."""
        return int(self.state.mask.shape[1])

    def empty_state(self) -> states.State:
        """A lane's state, in which nobody runs."""
        sizes = self.sizes
        state = states.empty_state(self.lanes.rows, sizes.context, sizes.vocab)
        return jax.device_put(state, self.home.same)

    @cached_property
    def state(self) -> Any:
        """The abstract state of a lane."""
        sizes = self.sizes
        made = partial(states.empty_state, self.lanes.rows, sizes.context, sizes.vocab)
        return self.home.of_same(jax.eval_shape(made))

    def empty_cache(self, stage: Stage) -> Any:
        """A stage's pools, which nobody has written to."""
        return zeros_like(self._cache(stage))

    def begin(self, tokens: int, chosen: int) -> Made:
        """`placed`, at home."""
        given = self.state, int32(tokens), int32(tokens), int32(chosen)
        return self.once(("begin", tokens, chosen), lambda: self.lowered(placed, (), given))

    def choose(self, count: int, width: int, stages: tuple[str, ...]) -> Made:
        """`steps.choose`, at home, of logits of a width."""
        rows = self.home.of_same((float32(count, width), int32(count)))
        masks = jax.ShapeDtypeStruct((count, self.words), jnp.uint32)
        flag = jax.ShapeDtypeStruct((), jnp.bool_)
        function = partial(steps.choose, self.model, stages)
        return self.once(
            ("choose", count, stages),
            lambda: self.lowered(function, 0, (self.state, *rows, masks, flag)),
        )

    def plant(self, shape: Shape) -> Made:
        """`planted`, at home."""
        given = self.state, nodes_of(shape)
        return self.once(
            ("plant", shape.tokens, shape.chosen, shape.rows),
            lambda: self.lowered(planted, (), given),
        )

    def walk(self, shape: Shape, width: int) -> Made:
        """`walk`, at home, of logits of a width."""
        logits = self.home.of_same(float32(shape.tokens, width))
        masks = jax.ShapeDtypeStruct((shape.tokens, self.words), jnp.uint32)
        given = self.state, nodes_of(shape), logits, masks if shape.masked else None
        function = partial(walk, self.model, shape.stages)
        return self.once(("walk", shape), lambda: self.lowered(function, 0, given))

    def flow(
        self,
        tokens: int,
        rows: tuple[int, int],
        chosen: int | None,
        wants: tuple[Want, ...],
        copies: int = 0,
    ) -> tuple[Made, ...]:
        """`passes.flow` of each stage.

        Args:
            rows: of the tables, and how many are known the lengths of.
            copies: places of tokens that stand in several rows; 0: none does.
        """
        made, x = list[Made](), None
        for stage in self.stages:
            which, named = (chosen, wants) if stage.last else (None, ())
            make = partial(self._flow, stage, x, tokens, rows, which, named, copies)
            key = ("flow", stage.kind, tokens, rows, which, named, copies)
            made.append(self.once(key, make))
            x = made[-1].out[1]
        return tuple(made)

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
        function = with_parts(stage, partial(stage_forward.flow, stage.model, wants))
        shared = stage.site.shared(function, (True, True, *(False,) * 4), (True, False))
        given = stage.site.of_same((x, *self.flat(tokens, rows, chosen, copies)))
        return self.lowered(shared, 1, (leaves_of(stage), self._cache(stage), *given), stage.site)

    def flat(
        self, tokens: int, rows: tuple[int, int], chosen: int | None, copies: int
    ) -> tuple[Any, Any, Any]:
        """Abstract places, tables and choices of a flat batch; arguments as of `flow`."""
        ints, known = int32(tokens), int32(rows[1])
        tables = {group: int32(rows[0], self.sizes.table) for group in self.sizes.blocks}
        last = None if chosen is None else int32(chosen)
        return Places(ints, ints, ints, known, known, copies_of(copies, tokens)), tables, last

    def read(self, rows: int, tokens: int, wants: tuple[Want, ...]) -> tuple[Made | None, ...]:
        """`passes.read` of each stage; None of those that have nothing of the encoder."""
        made, x = list[Made | None](), None
        for stage in self.stages:
            part = stage.model.part
            if not (part.first or part.last or part.layers["encoder"]):
                made.append(None)
                continue
            named = wants if stage.last else ()
            make = partial(self._read, stage, x, rows, tokens, named)
            own = self.once(("read", stage.kind, rows, tokens, named), make)
            made.append(own)
            x = own.out
        return tuple(made)

    def _read(self, stage: Stage, x: Any, rows: int, tokens: int, wants: tuple[Want, ...]) -> Made:
        function = with_parts(stage, partial(stage_forward.read, stage.model, wants))
        shared = stage.site.shared(function, (True, *(False,) * 4), False)
        texts = int32(rows, tokens)
        given = stage.site.of_same((x, texts, texts, int32(rows)))
        return self.lowered(shared, (), (leaves_of(stage), *given), stage.site)

    def fill(self, number: int, encoded: Any) -> Made:
        """`passes.fill` of a stage."""
        stage = self.stages[number]

        def make() -> Made:
            function = with_parts(stage, partial(stage_forward.fill, stage.model))
            shared = stage.site.shared(function, (True, True, *(False,) * 3), True)
            given = stage.site.of_same((encoded, int32(1), int32(1, self.sizes.table)))
            return self.lowered(
                shared, 1, (leaves_of(stage), self._cache(stage), *given), stage.site
            )

        return self.once(("fill", stage.kind, encoded.shape), make)

    def kept(self, number: int, tokens: int) -> Made | None:
        """`follow.kept` of a stage; None where it keeps nothing of this."""
        stage = self.stages[number]
        names = taps(stage.model.model.caches)
        if not names:
            return None

        def make() -> Made:
            shared = stage.site.shared(head_steps.kept, (True, *(False,) * 3), False)
            cache, each = self._cache(stage), int32(tokens)
            tables = {
                group: int32(self.sizes.slots, self.sizes.table) for group in self.sizes.blocks
            }
            given = stage.site.of_same((each, each, tables))
            own = tuple(cache[name] for name in names)
            return self.lowered(shared, (), (own, *given), stage.site)

        return self.once(("kept", number, tokens), make)

    def copy(self, number: int) -> Made:
        """`steps.copy_blocks` of a stage."""
        stage = self.stages[number]

        def make() -> Made:
            which = {group: int32(MAX_COPIES) for group in self.sizes.blocks}
            function = partial(steps.copy_blocks, stage.model.model)
            shared = stage.site.shared(function, (True, *(False,) * 3), True)
            given = stage.site.of_same((which, which, int32()))
            return self.lowered(shared, 0, (self._cache(stage), *given), stage.site)

        return self.once(("copy", stage.kind), make)

    def admit(self) -> Made:
        """`states.admit`, at home."""
        row = jax.tree.map(
            lambda part: jax.ShapeDtypeStruct((1, *part.shape[1:]), part.dtype), self.state
        )
        given = self.state, row, int32()
        return self.once("admit", lambda: self.lowered(states.admit, 0, given))

    def finish(self, key: Any, function: Callable[..., Any], out: Any, *more: Any) -> Made:
        """What is made at home of what the last stage gives."""
        given = self.home.of_same(out), *more
        return self.once(("finish", key), lambda: self.lowered(function, (), given))

    def once(self, key: Any, make: Callable[[], Made]) -> Made:
        """A program, which several threads may ask for at a time."""
        with self._lock:
            future = self._made.get(key)
            if own := future is None:
                future = self._made[key] = Future()
        assert future is not None, "it was there, or is made here"
        if own:
            try:
                with task("compiling for these devices, once"):
                    future.set_result(make())
            except BaseException as error:
                with self._lock:
                    self._made.pop(key, None)
                future.set_exception(error)
        return future.result()

    def lowered(
        self, function: Callable[..., Any], donated: Any, given: Any, site: Site | None = None
    ) -> Made:
        """A program of a function, for a stage's site or for home; none for other processes'."""
        where = site or self.home
        with self.tracing, target(where.platform):
            if not where.here:
                return Made(_elsewhere, jax.eval_shape(function, *given))
            lowered = jax.jit(function, donate_argnums=donated).lower(*given)
        return Made(compiled(lowered), lowered.out_info)

    def _cache(self, stage: Stage) -> Any:
        """The abstract pools of all of a stage's devices."""
        return self.pools(stage, self.sizes.blocks)

    def pools(self, stage: Stage, blocks: Mapping[str, int], site: Site | None = None) -> Any:
        """The abstract pools of a stage with so many blocks of each group, where there are any."""
        shapes = {n: s for n, s in stage.model.model.caches.items() if blocks.get(s.group)}
        counts = {name: blocks[shape.group] for name, shape in shapes.items()}
        pools = jax.eval_shape(lambda: empty(shapes, counts, self.sizes.kv_cache))
        return (site or stage.site).of_parts(pools)


def zeros_like(abstract: Any) -> Any:
    """Zeros of these shapes, where they are to be."""
    shardings = jax.tree.map(lambda array: array.sharding, abstract)
    made = partial(jax.tree.map, lambda array: jnp.zeros(array.shape, array.dtype), abstract)
    return jax.jit(made, out_shardings=shardings)()


def with_parts(stage: Stage, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, given a stage's parameters in their parts."""
    tree = jax.tree.structure(stage.model.model.parameters)

    def with_parts(leaves: Any, *rest: Any) -> Any:
        return function(jax.tree.unflatten(tree, leaves), *rest)

    return with_parts


def _elsewhere(*_: Any) -> Any:
    raise AssertionError("another process has the devices of this program")


def leaves_of(stage: Stage) -> Any:
    """The abstract parameters of a stage, in their parts."""
    return stage.site.of_parts(tuple(jax.tree.leaves(stage.model.model.parameters)))


def nodes_of(shape: Shape) -> Nodes:
    """Abstract trees."""
    each, copies = int32(shape.tokens), copies_of(shape.rows, shape.tokens)
    return Nodes(each, each, each, each, each, int32(shape.chosen), copies)


def copies_of(places: int, tokens: int) -> Copies | None:
    """Abstract places of tokens that stand in several rows; of none, nothing."""
    place = int32(places)
    return Copies(place, place, place, int32(tokens)) if places else None


def int32(*shape: int) -> Any:
    """An abstract array of whole numbers."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def float32(*shape: int) -> Any:
    """An abstract array of numbers."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)
