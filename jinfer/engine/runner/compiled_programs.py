"""The compiled programs of a model.

Each is compiled ahead of time for its shapes, so that a step never waits for a compilation that
nobody announced.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, cast

import jax
import numpy as np
from jax import Array

from jinfer.engine.runner import device_state as states
from jinfer.engine.runner.aot_serialization import dumped, loaded, reader
from jinfer.engine.runner.mmap_limit import check_maps
from jinfer.engine.runner.program_cache import aside, can_keep, compiled, surroundings
from jinfer.engine.runner.sampler_output import MAX_COPIES, MAX_STEPS
from jinfer.engine.scheduling.cache_size import trim
from jinfer.engine.thread_pools import start_threads
from jinfer.guard.disk_cache import Shelf
from jinfer.modelspec.cache_dtype import Kind
from jinfer.modelspec.draft_head import taps
from jinfer.nn.abstract_model import AbstractModel, Want
from jinfer.ops.attention.kv_cache import BLOCK, Cache, CacheShape, abstract, unwritten
from jinfer.ops.backend import backend
from jinfer.ops.fusion import weight_pointers
from jinfer.progress import task
from jinfer.sampling.sampling_metadata import mask_words
from jinfer.xla import trees
from jinfer.xla.abstract import Abstract
from jinfer.xla.later import import_jax

# Bytes; XLA's passes recurse deeper than the 8 MiB that a thread's stack has by default.
_COMPILER_STACK = 64 << 20
_COMPILER_THREADS = 4

NOTHING = b""  # is kept of a program that cannot be

# A `Reader` or a `jax.stages.Compiled`; called with what the function of its kind takes after
# `model` and `want`.
Program = Any


@dataclass(frozen=True)
class Shape:
    """What a compiled program depends on.

    Attributes:
        kind: the function of `jinfer.engine.runner.steps`, "admit" of
            `jinfer.engine.runner.device_state`, or "empty": a cache.
        tokens: of a flat batch; sequences of "decode", "propose", "lead" and "beam"; of a text,
            padded.
        chosen: tokens of a flat batch after which one is chosen, at most; trees of "verify".
        rows: sequences of a flat batch without a state, or texts; places of "verify", 0 where
            each token has one.
        want: the result of "forward" and "encode".
        stages: of sampling, that "choose", "decode", "propose", "lead" and "verify" have.
        masked: whether "verify" is given masks.
    """

    kind: Literal[
        "logits", "choose", "decode", "forward", "score", "beam", "contrast",
        "fill", "encode", "copy", "admit", "verify", "propose", "kept", "absorb", "lead",
        "empty",
    ]  # fmt: skip
    tokens: int = 0
    chosen: int = 0
    rows: int = 0
    want: Want = "logits"
    stages: tuple[str, ...] = ()
    masked: bool = False

    @property
    def task(self) -> str:
        """What somebody who waits for it is told."""
        unit = "sequence" if self.kind in ("decode", "propose", "lead", "beam") else "token"
        many = f" for {self.tokens} {unit}{'s' * (self.tokens != 1)}" if self.tokens else ""
        return f"compiling{many}, once"


@dataclass(frozen=True)
class Sizes:
    """What all programs of an engine have in common.

    Attributes:
        slots: sequences that run at a time.
        context: tokens a sequence may have.
        vocab: tokens there are.
        blocks: of each group of attentions.
        kv_cache: what numbers of the cache are kept as.
    """

    slots: int
    context: int
    vocab: int
    blocks: Mapping[str, int]
    kv_cache: Kind

    @property
    def table(self) -> int:
        """Blocks of a sequence, at most."""
        return -(-self.context // BLOCK)


@dataclass
class Programs:
    """The programs of one model, compiled when first needed or announced.

    Attributes:
        model: what they run.
        sizes: of cache and state.
        shelf: where compiled ones are kept for the next start.
        compilations: programs compiled, or found in the persistent cache, so far.
        waited: seconds that callers have waited for programs.
        most_steps: that a call of "decode" computes.
    """

    model: AbstractModel
    sizes: Sizes
    shelf: Shelf | None = None
    compilations: int = 0
    waited: float = 0.0
    most_steps: int = MAX_STEPS
    _futures: dict[Shape, Future[Program]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _tracing: threading.Lock = field(default_factory=threading.Lock)
    _describing: threading.Lock = field(default_factory=threading.Lock)

    def announce(self, shapes: Iterable[Shape]) -> list[Future[Program]]:
        """Starts compiling in the background, several programs at a time, the first ones first."""
        wanted = list(dict.fromkeys(shapes))
        with self._lock:
            new = [shape for shape in wanted if shape not in self._futures]
            if new:
                pool = _compiler_threads(min(len(new), _COMPILER_THREADS))
                for shape in new:
                    self._futures[shape] = pool.submit(self._compile, shape)
                    self.compilations += 1
                pool.shutdown(wait=False)
            return [self._futures[shape] for shape in wanted]

    def release(self) -> None:
        """Lets all programs go; those that are not compiled yet never will be."""
        with self._lock:
            for future in self._futures.values():
                future.cancel()
            self._futures.clear()

    def ready(self, shape: Shape) -> bool:
        """Whether a program can be had without waiting; if not, it will be."""
        return self.announce([shape])[0].done()

    def get(self, shape: Shape) -> Program:
        """A program; waits for it where it is not ready."""
        future = self._futures.get(shape) or self.announce([shape])[0]
        begun = 0.0 if future.done() else time.perf_counter()
        try:
            with task(shape.task) if begun else nullcontext():
                program = future.result()
        except Exception:
            # What was in its way may be gone when it is asked for again.
            with self._lock:
                if self._futures.get(shape) is future:
                    del self._futures[shape]
            raise
        self.waited += time.perf_counter() - begun if begun else 0.0
        return program

    def _compile(self, shape: Shape) -> Program:
        check_maps()
        key = "" if self.shelf is None else self._key(shape)
        content = None if self.shelf is None else self.shelf.get(key)
        if content and (program := loaded(content)) is not None:
            trim()  # reading one takes twice the memory that it keeps
            return program
        import_jax()
        # Python runs one thread at a time: traced side by side, all programs would be late.
        with self._tracing:
            function, donated, arguments = self._function(shape)
            lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
        if self.shelf is None or content == NOTHING or not can_keep():
            return reader(compiled(lowered))
        with aside():
            program = compiled(lowered)
        # One that cannot be used as it is kept is left to JAX's cache from now on.
        self.shelf.put(key, NOTHING if content else dumped(program) or NOTHING)
        return reader(program)

    def _key(self, shape: Shape) -> str:
        """All that a program depends on, beside the code that makes it."""
        with self._describing:  # once: all threads ask at the same time
            described = self._described
        return f"{described}\n{shape!r}"

    @cached_property
    def _described(self) -> str:
        return f"{surroundings(self.shelf)}\n{self.model.described()}\n{self.sizes!r}"

    @cached_property
    def leaves(self) -> tuple[Abstract, ...]:
        """What programs are given of a model, abstract; see `with_tables`."""
        leaves = tuple(trees.leaves(self.model.parameters))
        return (*leaves, *map(weight_pointers.like, self._told_of(leaves)))

    @property
    def told(self) -> Mapping[str, slice]:
        """The layers whose weights programs are told the addresses of, where that is of use."""
        return self.model.layers if backend() == "cpu" else {}

    def with_tables(self, parameters: tuple[Any, ...]) -> tuple[Array, ...]:
        """What programs are given of a model: the arrays of its parameters, and tables of them."""
        leaves = tuple(trees.leaves(parameters))
        return (*leaves, *map(weight_pointers.table, self._told_of(leaves)))

    def _told_of[T](self, leaves: tuple[T, ...]) -> list[list[T]]:
        """Of which arrays there are tables."""
        own = [leaf for layer in self.told.values() for leaf in leaves[layer]]
        return [own] if own else []

    @cached_property
    def cache(self) -> Cache:
        """The cache's abstract arrays."""
        return abstract(*self._pools())

    @cached_property
    def state(self) -> states.State:
        """The state's abstract arrays."""
        return jax.eval_shape(self.empty_state)

    @property
    def words(self) -> int:
        """Words of a mask with a bit for each token."""
        return mask_words(self.sizes.vocab)

    @cached_property
    def hidden(self) -> int:
        """Width of the last hidden states."""
        shape = Shape("forward", 1, rows=1, want="hidden")
        return int(jax.eval_shape(*self._eval(shape))[1].shape[-1])

    def kept(self, cache: Cache) -> Any:
        """Those parts of the cache that "kept" is given, in the order of their layers."""
        return tuple(cache[name] for name in taps(self.model.caches))

    def empty_cache(self) -> Cache:
        """Pools that nobody has written to."""
        return cast("Cache", self._compile(Shape("empty"))(()))

    def _pools(self) -> tuple[dict[str, CacheShape], dict[str, int], Kind]:
        shapes = self.model.caches
        blocks = {name: self.sizes.blocks[shape.group] for name, shape in shapes.items()}
        return shapes, blocks, self.sizes.kv_cache

    def empty_state(self) -> states.State:
        """A state in which nobody runs."""
        return states.empty_state(self.sizes.slots, self.sizes.context, self.sizes.vocab)

    def tables(self, rows: int) -> dict[str, Abstract]:
        """Abstract tables of blocks."""
        return {group: _int32(rows, self.sizes.table) for group in self.sizes.blocks}

    def _function(self, shape: Shape) -> tuple[Callable[..., Any], Any, tuple[Any, ...]]:
        """The function of a program, which arguments it is given to keep, and their shapes."""
        # Here: a start that finds its programs made needs none of this.
        from jinfer.engine.runner import head_steps, steps
        from jinfer.engine.runner.draft_steps import propose
        from jinfer.engine.runner.verify import Nodes, verify
        from jinfer.nn.forward_context import Copies

        self.model.modules.make()
        tokens, chosen, rows = shape.tokens, shape.chosen, shape.rows
        leaves, cache, state = self.leaves, self.cache, self.state
        batch = (_int32(tokens), _int32(tokens), self.tables(self.sizes.slots))
        given = (_int32(tokens), _int32(tokens), _int32(tokens), _int32(rows), self.tables(rows))
        arguments: tuple[Any, ...]
        match shape.kind:
            case "logits":
                return self._of(steps.logits), 1, (leaves, cache, state, *batch, _int32(chosen))
            case "choose":
                words = Abstract((chosen, self.words), np.uint32)
                out = jax.eval_shape(*self._eval(Shape("logits", chosen, chosen)))[1:]
                function: Any = partial(steps.choose, self.model, shape.stages)
                flag = Abstract((), np.bool_)
                return function, 0, (state, *out, words, flag)
            case "decode" | "propose":
                of: Callable[..., Any] = propose
                arguments = (_int32(tokens), self.tables(self.sizes.slots), _int32())
                if shape.kind == "decode":
                    of, arguments = steps.decode, (*arguments, _int32())
                function = self._of(of, shape.stages)
                return function, (1, 2), (leaves, cache, state, *arguments)
            case "kept":
                return head_steps.kept, (), (self.kept(cache), *batch)
            case "absorb":
                arguments = (leaves, cache, state, *batch, self._vectors(tokens))
                return self._of(head_steps.absorb), 1, arguments
            case "lead":
                rest = (_int32(tokens), self.tables(self.sizes.slots), _int32())
                arguments = (leaves, cache, state, *rest, self._vectors(tokens))
                return self._of(head_steps.lead, shape.stages), (1, 2), arguments
            case "verify":
                place, each, root = (cast("Any", _int32(n)) for n in (rows, tokens, chosen))
                copies = Copies(place, place, place, each) if rows else None
                nodes = Nodes(each, each, each, each, each, root, copies)
                arguments = (leaves, cache, state, nodes, self.tables(tokens))
                if shape.masked:
                    words = Abstract((tokens, self.words), np.uint32)
                    arguments = (*arguments, words)
                return self._of(verify, shape.stages), (1, 2), arguments
            case "forward":
                arguments = (leaves, cache, *given, _int32(rows))
                return self._of(steps.forward, shape.want), 1, arguments
            case "score":
                arguments = (leaves, cache, *given, _int32(rows), _int32(tokens))
                return self._of(steps.score), 1, arguments
            case "beam":
                scores = Abstract((tokens,), np.float32)
                return self._of(steps.beam), 1, (leaves, cache, *given, _int32(rows), scores)
            case "contrast":
                past, numbers = (
                    Abstract(sizes, np.float32)
                    for sizes in ((self.sizes.context, self.hidden), (tokens,))
                )
                alpha = Abstract((), np.float32)
                arguments = (leaves, cache, *given, _int32(rows), past, numbers, alpha)
                return self._of(steps.contrast), 1, arguments
            case "fill":
                arguments = (
                    leaves,
                    cache,
                    _int32(1, tokens),
                    _int32(1),
                    _int32(1, self.sizes.table),
                )
                return self._of(steps.fill), 1, arguments
            case "encode":
                texts = _int32(rows, tokens)
                arguments = (leaves, {}, texts, texts, _int32(rows))
                return self._of(steps.encode, shape.want), 1, arguments
            case "copy":
                which = {group: _int32(MAX_COPIES) for group in self.sizes.blocks}
                function = partial(steps.copy_blocks, self.model)
                return function, 0, (cache, which, which, _int32())
            case "admit":
                row = trees.map(lambda p: Abstract((1, *p.shape[1:]), p.dtype), state)
                return states.admit, 0, (state, row, _int32())
            case "empty":  # of a cache that one device has whole
                return lambda _: unwritten(*self._pools()), (), ((),)

    def _vectors(self, tokens: int) -> Abstract:
        """What a head is given of another model."""
        follows = self.model.modules.spec.follows
        assert follows is not None, "only heads are given this"
        return Abstract((tokens, follows.width), np.float32)

    def _of(self, function: Callable[..., Any], *first: Any) -> Callable[..., Any]:
        """The function with the model, whose parameters come in their parts.

        Taking a tree of hundreds of parameters apart in each call would cost half a millisecond.
        """
        tree: Any = trees.structure_of(self.model.parameters)
        count = tree.num_leaves

        def with_parts(leaves: tuple[Any, ...], *rest: Any) -> Any:
            parameters = trees.unflatten(tree, leaves[:count])
            with weight_pointers.told(next(iter(leaves[count:]), None), self.told):
                return function(self.model, *first, parameters, *rest)

        return with_parts

    def _eval(self, shape: Shape) -> tuple[Any, ...]:
        function, _, arguments = self._function(shape)
        return function, *arguments


def _int32(*shape: int) -> Abstract:
    return Abstract(shape, np.int32)


def _compiler_threads(count: int) -> ThreadPoolExecutor:
    """Threads with a stack deep enough; they are started here, while that size is set."""
    pool = ThreadPoolExecutor(count, thread_name_prefix="compile")
    before = threading.stack_size(_COMPILER_STACK)
    try:
        start_threads(pool, count)
    finally:
        threading.stack_size(before)
    return pool
