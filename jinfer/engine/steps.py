"""What is compiled: prefill and decode, beam search, the encoder, and the forward pass alone.

Pure functions of flat parameters, a cache that is given away, and a small state.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, UInt

from jinfer.model import AbstractModel, Want
from jinfer.nn.attention import Step
from jinfer.ops.cache import Cache
from jinfer.sampling.rows import Progress, Sampler, empty_progress, empty_sampler, mask_words
from jinfer.sampling.sampler import Sampled, ends, sample

MAX_STEPS = 8  # of a call of `decode`


class State(NamedTuple):
    """What decoding carries from step to step, a row per slot.

    Attributes:
        tokens: the last token of each sequence, not yet in the cache.
        positions: where that token will stand.
        encoded: tokens of the encoder's output that each sequence may see.
        ended: whether that token ends the sequence.
        sampler, progress: how each sequence's tokens are chosen.
        history: the tokens of each sequence, that last one included.
        prompts: tokens of its prompt.
        mask, masked: the tokens that it may have, a bit each; whether it minds.
    """

    tokens: Int[Array, " slots"]
    positions: Int[Array, " slots"]
    encoded: Int[Array, " slots"]
    ended: Bool[Array, " slots"]
    sampler: Sampler
    progress: Progress
    history: Int[Array, "slots length"]
    prompts: Int[Array, " slots"]
    mask: UInt[Array, "slots words"]
    masked: Bool[Array, " slots"]


class Row(NamedTuple):
    """How a new request's tokens are chosen, a batch of one.

    Attributes:
        mask, masked: as those of `State`.
    """

    sampler: Sampler
    progress: Progress
    mask: UInt[Array, "1 words"]
    masked: Bool[Array, " 1"]


def empty_state(slots: int, length: int, vocab: int) -> State:
    """The state of slots that nobody uses, with room for sequences of `length` tokens."""
    zeros, row = jnp.zeros(slots, jnp.int32), empty_row(vocab, slots)
    no = jnp.zeros(slots, jnp.bool_)
    history = jnp.zeros((slots, length), jnp.int32)
    return State(
        zeros, zeros, zeros, no, row.sampler, row.progress, history, zeros, row.mask, row.masked
    )


def empty_row(vocab: int, rows: int = 1) -> Row:
    """Rows of requests that ask nothing."""
    mask = jnp.zeros((rows, mask_words(vocab)), jnp.uint32)
    return Row(empty_sampler(rows), empty_progress(rows), mask, jnp.zeros(rows, jnp.bool_))


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
    row: Row,
) -> tuple[Cache, State, Sampled]:
    """Puts tokens start..start+count of a prompt into a slot, and chooses the token after them.

    Args:
        tokens: padded at the end; what the padding leaves in the cache is overwritten before
            anything looks at it.
        total: tokens of the whole prompt.
        row: how the request's tokens are chosen.

    Returns:
        The token has a leading axis of one step.
    """
    positions = start + jnp.arange(tokens.shape[0], dtype=jnp.int32)
    encoded = jax.lax.dynamic_slice_in_dim(state.encoded, slot, 1)
    step = Step(positions[None], slot, encoded=encoded, total=total[None])
    logits, cache = model.module(leaves).decode(tokens[None], step, count[None] - 1, cache, "last")
    length = start + count
    history = jax.lax.dynamic_update_slice(state.history, tokens[None], (slot, start))
    sampled, progress = sample(
        _allowed(logits, model),
        row.sampler,
        row.progress,
        history,
        slot[None],
        length[None],
        total[None],
        logprobs=logprobs,
        mask=jax.lax.dynamic_update_slice_in_dim(state.mask, row.mask, slot, 0),
        masked=row.masked,
    )
    # A sequence as long as there is room has no next token; its last one is not to be moved.
    history = history.at[slot, length].set(sampled.tokens[0], mode="drop")
    new = State(
        sampled.tokens,
        length[None],
        encoded,
        ends(sampled.tokens, row.sampler),
        row.sampler,
        progress,
        jax.lax.dynamic_slice_in_dim(history, slot, 1),
        total[None],
        row.mask,
        row.masked,
    )
    state = jax.tree.map(
        lambda old, one: jax.lax.dynamic_update_slice_in_dim(old, one, slot, 0), state, new
    )
    return cache, state, jax.tree.map(lambda one: one[None], sampled)


def decode(
    model: AbstractModel,
    logprobs: bool,
    leaves: tuple[Array, ...],
    cache: Cache,
    state: State,
    limits: Int[Array, " slots"],
    steps: Int[Array, ""],
) -> tuple[Cache, State, Sampled]:
    """The next tokens of every sequence that has not ended; the others stay as they are.

    Args:
        limits: tokens that each sequence may have, prompt included; 0 where nobody is. At most
            the cache's length.
        steps: tokens of a sequence that are computed, at most `MAX_STEPS`.

    Returns:
        The tokens have a leading axis of `MAX_STEPS`; -1 stands where there is none.
    """

    def running(state: State) -> Bool[Array, " slots"]:
        return (state.positions + 1 < limits) & ~state.ended

    def step(leaves: Any, cache: Cache, state: State) -> tuple[Cache, State, Sampled]:
        going = running(state)
        # The others write where their next token would stand: below the limit that they had.
        at = state.positions
        logits, cache = _one_each(model, leaves, cache, state.tokens, at, state.encoded)
        slots = jnp.arange(at.shape[0], dtype=jnp.int32)
        sampled, progress = sample(
            _allowed(logits, model),
            state.sampler,
            state.progress,
            state.history,
            slots,
            at + 1,
            state.prompts,
            logprobs=logprobs,
            mask=state.mask,
            masked=state.masked,
        )
        tokens = jnp.where(going, sampled.tokens, state.tokens)
        positions = at + going.astype(jnp.int32)
        ended = state.ended | going & ends(tokens, state.sampler)
        state = state._replace(
            tokens=tokens,
            positions=positions,
            ended=ended,
            progress=progress,
            history=state.history.at[slots, positions].set(tokens, mode="drop"),
        )
        return cache, state, sampled._replace(tokens=jnp.where(going, sampled.tokens, -1))

    def one_more(carry: tuple[Array, Cache, State, Sampled]) -> tuple[Array, Any, State, Sampled]:
        i, cache, state, so_far = carry
        # Without the barrier XLA takes what depends on weights alone out of the loop, and with it
        # memory for all weights, unpacked.
        parts, state = jax.lax.optimization_barrier((leaves, state))
        cache, state, sampled = step(parts, cache, state)
        so_far = jax.tree.map(
            lambda all, one: jax.lax.dynamic_update_index_in_dim(all, one, i, 0), so_far, sampled
        )
        return i + 1, cache, state, so_far

    def more(carry: tuple[Array, Cache, State, Sampled]) -> Array:
        i, _, state, _ = carry
        return (i < steps) & jnp.any(running(state))

    one = jax.eval_shape(partial(step, leaves), cache, state)[2]
    none = jax.tree.map(lambda x: jnp.full((MAX_STEPS, *x.shape), -1, x.dtype), one)
    begin = (jnp.int32(0), cache, state, none)
    _, cache, state, sampled = jax.lax.while_loop(more, one_more, begin)
    return cache, state, sampled


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
