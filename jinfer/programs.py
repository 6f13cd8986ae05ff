"""The compiled programs: prefill and decode, the encoder, and the forward pass alone.

Pure functions of flat parameters, a donated cache and a small state; each is compiled ahead of
time for its shapes, so that a step never waits for a compilation that nobody announced.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jinfer.cache import Cache, Kind, empty
from jinfer.model import AbstractModel, Want
from jinfer.nn.attention import Step
from jinfer.sampling import Sampled, Sampler, empty_sampler, sample

# Bytes; XLA's passes recurse deeper than the 8 MiB that a thread's stack has by default.
_COMPILER_STACK = 64 << 20
_COMPILER_THREADS = 4


# jax.stages.Compiled; called with what the function of its kind takes after `logprobs` or `want`.
Program = Any


class State(NamedTuple):
    """What decoding carries from step to step, a row per slot.

    Attributes:
        tokens: the last token of each sequence, not yet in the cache.
        positions: where that token will stand.
        encoded: tokens of the encoder's output that each sequence may see.
        sampler: how each sequence's tokens are chosen.
    """

    tokens: Int[Array, " slots"]
    positions: Int[Array, " slots"]
    encoded: Int[Array, " slots"]
    sampler: Sampler


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


def empty_state(slots: int) -> State:
    """The state of slots that nobody uses."""
    zeros = jnp.zeros(slots, jnp.int32)
    return State(zeros, zeros, zeros, empty_sampler(slots))


def prefill(
    model: AbstractModel,
    logprobs: bool,
    leaves: tuple[Array, ...],
    cache: Cache,
    state: State,
    tokens: Int[Array, " tokens"],
    start: Int[Array, ""],
    count: Int[Array, ""],
    total: Int[Array, ""],
    slot: Int[Array, ""],
    row: Sampler,
) -> tuple[Cache, State, Sampled]:
    """Puts tokens start..start+count of a prompt into a slot, and chooses the token after them.

    Args:
        tokens: padded at the end; what the padding leaves in the cache is overwritten before
            anything looks at it.
        total: tokens of the whole prompt.
        row: the request's sampler, a batch of one.
    """
    positions = start + jnp.arange(tokens.shape[0], dtype=jnp.int32)
    encoded = jax.lax.dynamic_slice_in_dim(state.encoded, slot, 1)
    step = Step(positions[None], slot, encoded=encoded, total=total[None])
    logits, cache = model.module(leaves).decode(tokens[None], step, count[None] - 1, cache, "last")
    sampled, row = sample(_allowed(logits, model), row, logprobs=logprobs)
    new = State(sampled.tokens, (start + count)[None], encoded, row)
    state = jax.tree.map(
        lambda old, one: jax.lax.dynamic_update_slice_in_dim(old, one, slot, 0), state, new
    )
    return cache, state, sampled


def decode(
    model: AbstractModel,
    logprobs: bool,
    length: int,
    leaves: tuple[Array, ...],
    cache: Cache,
    state: State,
    active: Bool[Array, " slots"],
) -> tuple[Cache, State, Sampled]:
    """One token for every active slot; the others stay as they are.

    Args:
        length: of the cache. A slot that is full writes its last place over and over.
    """
    at = jnp.minimum(state.positions, length - 1)
    logits, cache = _one_each(model, leaves, cache, state.tokens, at, state.encoded)
    sampled, sampler = sample(_allowed(logits, model), state.sampler, logprobs=logprobs)
    tokens = jnp.where(active, sampled.tokens, state.tokens)
    positions = jnp.where(active, state.positions + 1, state.positions)
    return cache, State(tokens, positions, state.encoded, sampler), sampled


def _one_each(
    model: AbstractModel,
    leaves: tuple[Array, ...],
    cache: Cache,
    tokens: Int[Array, " slots"],
    positions: Int[Array, " slots"],
    encoded: Int[Array, " slots"],
) -> tuple[Float[Array, "slots vocab"], Cache]:
    """The logits after one more token of every slot, and the cache with those tokens in it."""
    step = Step(positions[:, None], jnp.int32(0), encoded=encoded)
    first = jnp.zeros_like(positions)
    return model.module(leaves).decode(tokens[:, None], step, first, cache, "last")


def _allowed(
    logits: Float[Array, "batch vocab"], model: AbstractModel
) -> Float[Array, "batch vocab"]:
    """The logits, -inf for tokens that are never chosen."""
    if not model.never:
        return logits
    return logits.at[:, jnp.array(model.never, jnp.int32)].set(-jnp.inf)


def forward(
    model: AbstractModel,
    want: Want,
    leaves: tuple[Array, ...],
    cache: Cache,
    tokens: Int[Array, "1 tokens"],
    start: Int[Array, ""],
    total: Int[Array, " 1"],
    encoded: Int[Array, " 1"],
) -> tuple[Cache, Float[Array, "tokens ..."]]:
    """Logits or last hidden states of every token, and the cache with the tokens in it.

    Args:
        total: tokens of the whole prompt.
        encoded: tokens of the encoder's output in the cache.
    """
    positions = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    step = Step(positions[None], jnp.int32(0), encoded=encoded, total=total)
    first = jnp.zeros(1, jnp.int32)
    out, cache = model.module(leaves).decode(tokens, step, first, cache, want)
    return cache, out[0]


def score(
    model: AbstractModel,
    leaves: tuple[Array, ...],
    cache: Cache,
    tokens: Int[Array, "1 tokens+1"],
    start: Int[Array, ""],
    total: Int[Array, " 1"],
    encoded: Int[Array, " 1"],
) -> tuple[Cache, Float[Array, " tokens"]]:
    """The log-probability of each token but the first; the last is not put into the cache."""
    given, next_ones = tokens[:, :-1], tokens[0, 1:, None]
    cache, logits = forward(model, "logits", leaves, cache, given, start, total, encoded)
    chosen = jnp.take_along_axis(logits, next_ones, axis=-1)[:, 0]
    return cache, chosen - jax.nn.logsumexp(logits, axis=-1)


def fill(
    model: AbstractModel,
    leaves: tuple[Array, ...],
    cache: Cache,
    tokens: Int[Array, "1 tokens"],
    lengths: Int[Array, " 1"],
    slot: Int[Array, ""],
) -> Cache:
    """The cache with what cross-attention needs of a text in a slot; once per request."""
    module = model.module(leaves)
    encoded = module.encode(tokens, jnp.zeros_like(tokens), lengths)
    return module.fill(encoded["hidden"], cache, slot)


def beam(
    model: AbstractModel,
    leaves: tuple[Array, ...],
    cache: Cache,
    parents: Int[Array, " beams"],
    tokens: Int[Array, " beams"],
    position: Int[Array, ""],
    encoded: Int[Array, " beams"],
    scores: Float[Array, " beams"],
) -> tuple[Cache, Int[Array, " top"], Int[Array, " top"], Float[Array, " top"]]:
    """One step of a beam search: the likeliest continuations of all beams together.

    Args:
        parents: the row of the cache that each beam continues.
        tokens: the last token of each beam, which stands at `position`.
        scores: sum of the log-probabilities of each beam.

    Returns:
        The cache; beam, token and score of twice as many candidates as beams, best first.
    """
    cache = jax.tree.map(lambda rows: rows[parents], cache)
    count = tokens.shape[0]
    at = jnp.broadcast_to(position, (count,))
    logits, cache = _one_each(model, leaves, cache, tokens, at, encoded)
    each = _allowed(jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1), model)
    sums = each + scores[:, None]
    # Without the barrier XLA:CPU turns a top_k that is used in part into a sort.
    best, which = jax.lax.optimization_barrier(jax.lax.top_k(sums.reshape(-1), 2 * count))
    return cache, which // sums.shape[1], which % sums.shape[1], best


def encode(
    model: AbstractModel,
    want: Want,
    leaves: tuple[Array, ...],
    cache: Cache,
    tokens: Int[Array, "batch tokens"],
    types: Int[Array, "batch tokens"],
    lengths: Int[Array, " batch"],
) -> Float[Array, "batch ..."]:
    """A result of the encoder over whole texts; there is no cache, it is empty."""
    return model.module(leaves).encode(tokens, types, lengths)[want].astype(jnp.float32)


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

    def announce(self, shapes: Iterable[Shape]) -> None:
        """Starts compiling in the background, several programs at a time."""
        with self._lock:
            new = [shape for shape in dict.fromkeys(shapes) if shape not in self._futures]
            if not new:
                return
            pool = _compiler_threads(min(len(new), _COMPILER_THREADS))
            for shape in new:
                self._futures[shape] = pool.submit(self._compile, shape)
                self.compilations += 1
            pool.shutdown(wait=False)

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
        function, arguments = self._lowered(shape)
        return jax.jit(function, donate_argnums=1).lower(*arguments).compile()

    def _lowered(self, shape: Shape) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function of a program, and the shapes of what it is called with."""
        model, leaves = self.model, self.model.parameters
        cache = self.cache_shapes(shape.slots, shape.length, shape.encoded)
        number, row = _int32(), _int32(1)
        state = _shapes(empty_state(shape.slots))
        tokens = _int32(shape.slots if shape.kind == "encode" else 1, shape.tokens)
        match shape.kind:
            case "decode":
                active = jax.ShapeDtypeStruct((shape.slots,), jnp.bool_)
                function: Any = partial(decode, model, shape.logprobs, shape.length)
                return function, (leaves, cache, state, active)
            case "prefill":
                sampler = _shapes(empty_sampler(1))
                at = (_int32(shape.tokens), number, number, number, number)
                return partial(prefill, model, shape.logprobs), (leaves, cache, state, *at, sampler)
            case "beam":
                beams = _int32(shape.slots)
                scores = jax.ShapeDtypeStruct((shape.slots,), jnp.float32)
                return partial(beam, model), (leaves, cache, beams, beams, number, beams, scores)
            case "forward":
                given: Any = (tokens, number, row, row)
                return partial(forward, model, shape.want), (leaves, cache, *given)
            case "score":
                given = (_int32(1, shape.tokens + 1), number, row, row)
                return partial(score, model), (leaves, cache, *given)
            case "fill":
                return partial(fill, model), (leaves, cache, tokens, row, number)
            case "encode":
                lengths = _int32(shape.slots)
                return partial(encode, model, shape.want), (leaves, {}, tokens, tokens, lengths)

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
