"""The compiled programs of a model.

Each is compiled ahead of time for its shapes, so that a step never waits for a compilation that
nobody announced.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jinfer.engine import steps
from jinfer.model import AbstractModel, Want
from jinfer.ops.cache import empty
from jinfer.quant.kind import Kind

# Bytes; XLA's passes recurse deeper than the 8 MiB that a thread's stack has by default.
_COMPILER_STACK = 64 << 20
_COMPILER_THREADS = 4

# jax.stages.Compiled; called with what the function of its kind takes after `logprobs` or `want`.
Program = Any


@dataclass(frozen=True)
class Shape:
    """What a compiled program depends on.

    Attributes:
        kind: "prefill" and "decode" choose tokens; "beam" is a step of beam search; "forward" is
            the decoder's pass alone, "score" what it says of given tokens; "fill" puts an
            encoder's output into the cache; "encode" is the encoder's pass over texts.
        slots: rows of the cache, or texts.
        length, encoded: tokens of the decoder and the encoder that the cache has room for.
        tokens: new tokens of a row.
        logprobs: whether log-probabilities are computed.
        want: the result of "forward" and "encode".
    """

    kind: Literal["prefill", "decode", "beam", "forward", "score", "fill", "encode"]
    slots: int
    length: int = 0
    encoded: int = 0
    tokens: int = 1
    logprobs: bool = False
    want: Want = "logits"


@dataclass
class Programs:
    """The programs of one model, compiled when first needed or announced.

    Attributes:
        model: what they run.
        kv_cache: what numbers of the cache are kept as.
        compilations: programs compiled, or found in the persistent cache, so far.
        waited: seconds that callers have waited for programs.
    """

    model: AbstractModel
    kv_cache: Kind
    compilations: int = 0
    waited: float = 0.0
    _futures: dict[Shape, Future[Program]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _tracing: threading.Lock = field(default_factory=threading.Lock)

    def announce(self, shapes: Iterable[Shape]) -> None:
        """Starts compiling in the background, several programs at a time, the first ones first."""
        with self._lock:
            new = [shape for shape in dict.fromkeys(shapes) if shape not in self._futures]
            if not new:
                return
            pool = _compiler_threads(min(len(new), _COMPILER_THREADS))
            for shape in new:
                self._futures[shape] = pool.submit(self._compile, shape)
                self.compilations += 1
            pool.shutdown(wait=False)

    def ready(self, shape: Shape) -> bool:
        """Whether a program can be had without waiting; if not, it will be."""
        self.announce([shape])
        return self._futures[shape].done()

    def get(self, shape: Shape) -> Program:
        """A program; waits for it where it is not ready."""
        self.announce([shape])
        future = self._futures[shape]
        if future.done():
            return future.result()
        begun = time.perf_counter()
        program = future.result()
        self.waited += time.perf_counter() - begun
        return program

    def _compile(self, shape: Shape) -> Program:
        # Python runs one thread at a time: traced side by side, all programs would be late.
        with self._tracing:
            function, arguments = self._lowered(shape)
            lowered = jax.jit(function, donate_argnums=1).lower(*arguments)
        return lowered.compile()

    def _lowered(self, shape: Shape) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function of a program, and the shapes of what it is called with."""
        model, leaves = self.model, self.model.parameters
        cache = self.cache_shapes(shape.slots, shape.length, shape.encoded)
        number, row = _int32(), _int32(1)
        vocab = model.vocab
        state = _shapes(steps.empty_state(shape.slots, shape.length, vocab))
        tokens = _int32(shape.slots if shape.kind == "encode" else 1, shape.tokens)
        match shape.kind:
            case "decode":
                function: Any = partial(steps.decode, model, shape.logprobs)
                return function, (leaves, cache, state, _int32(shape.slots), number)
            case "prefill":
                sampler = _shapes(steps.empty_row(vocab))
                at = (_int32(shape.tokens), number, number, number, number)
                return partial(steps.prefill, model, shape.logprobs), (
                    leaves,
                    cache,
                    state,
                    *at,
                    sampler,
                )
            case "beam":
                beams = _int32(shape.slots)
                scores = jax.ShapeDtypeStruct((shape.slots,), jnp.float32)
                return partial(steps.beam, model), (
                    leaves,
                    cache,
                    beams,
                    beams,
                    number,
                    beams,
                    scores,
                )
            case "forward":
                given: Any = (tokens, number, row, row)
                return partial(steps.forward, model, shape.want), (leaves, cache, *given)
            case "score":
                given = (_int32(1, shape.tokens + 1), number, row, row)
                return partial(steps.score, model), (leaves, cache, *given)
            case "fill":
                return partial(steps.fill, model), (leaves, cache, tokens, row, number)
            case "encode":
                lengths = _int32(shape.slots)
                return partial(steps.encode, model, shape.want), (
                    leaves,
                    {},
                    tokens,
                    tokens,
                    lengths,
                )

    def cache_shapes(self, slots: int, length: int, encoded: int) -> Any:
        """The cache's abstract arrays."""
        shapes = self.model.caches
        return jax.eval_shape(lambda: empty(shapes, slots, length, encoded, self.kv_cache))


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _compiler_threads(count: int) -> ThreadPoolExecutor:
    """Threads with a stack deep enough; they are started here, while that size is set."""
    pool = ThreadPoolExecutor(count, thread_name_prefix="compile")
    before = threading.stack_size(_COMPILER_STACK)
    try:
        barrier = threading.Barrier(count + 1)
        for _ in range(count):
            pool.submit(barrier.wait)
        barrier.wait()
    finally:
        threading.stack_size(before)
    return pool
