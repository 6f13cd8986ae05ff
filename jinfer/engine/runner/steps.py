"""What is compiled: steps over flat batches, the loop that decodes, and passes without choosing.

Pure functions of flat parameters, a cache and a state that are given away, and small arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jinfer.engine.runner.device_state import State
from jinfer.engine.runner.flat_batch import Tables, going, placed
from jinfer.engine.runner.sampler_output import MAX_STEPS, Chosen
from jinfer.engine.runner.search_steps import allowed, best_beams, best_candidate
from jinfer.nn.abstract_model import AbstractModel, Want
from jinfer.nn.forward_context import Step
from jinfer.ops.attention import block_copies
from jinfer.ops.attention.kv_cache import Cache, Placement
from jinfer.ops.fusion.weight_pointers import read_by
from jinfer.ops.interrupt import interrupted
from jinfer.sampling import penalties
from jinfer.sampling.logprobs import log_probabilities
from jinfer.sampling.param_ranges import MAX_LOGPROBS
from jinfer.sampling.sampler import ends, sample

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, UInt

type Leaves = tuple[Array, ...]


def logits(
    model: AbstractModel,
    leaves: Leaves,
    cache: Cache,
    state: State,
    rows: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    tables: Tables,
    last: Int[Array, " chosen"],
) -> tuple[Cache, Float[Array, "chosen vocab"], Int[Array, " chosen"]]:
    """Computes tokens of any sequences, up to the logits after some of them.

    Args:
        rows: the slot of each token; -1: padding.
        positions: where it stands in its sequence; -1: it is the last one known, which only the
            device may know.
        last: the tokens after which one is to be chosen; -1: none.

    Returns:
        The cache, the logits, and the rows of the state they are of: the spare one where there is
        nothing to choose.
    """
    places, chooses = placed(state, rows, positions, last)
    at, wanted = places.step(tables), jnp.maximum(last, 0)
    out, cache = model.module(leaves).decode(places.tokens, at, cache, "logits", wanted)
    return cache, out, chooses


def choose(
    model: AbstractModel,
    stages: Sequence[str],
    state: State,
    logits: Float[Array, "chosen vocab"],
    rows: Int[Array, " chosen"],
    mask: UInt[Array, "chosen words"],
    masked: Bool[Array, ""],
) -> tuple[State, Chosen]:
    """Chooses the next tokens of some sequences.

    Args:
        stages: of sampling, that these sequences may need.
        logits, rows: as `logits` gives them.
        mask: bit i % 32 of word i // 32 allows token i...
        masked: ...if this is so.

    Returns:
        What was chosen has a leading axis of one step.
    """
    every = jnp.arange(logits.shape[0], dtype=jnp.int32)
    guided = partial(penalties.masked, logits, mask, every, every >= 0)
    left = lax.cond(masked, guided, lambda: logits)
    state, chosen = choose_next(model, stages, state, left, rows)
    return state, jax.tree.map(lambda one: one[None], chosen)


def decode(
    model: AbstractModel,
    stages: Sequence[str],
    leaves: Leaves,
    cache: Cache,
    state: State,
    rows: Int[Array, " sequences"],
    tables: Tables,
    steps: Int[Array, ""],
    flag: Int[Array, ""],
) -> tuple[Cache, State, Chosen]:
    """The next tokens of sequences, until all of them have ended or the host interrupts.

    Args:
        stages: of sampling, that these sequences may need.
        rows: their slots; -1: none.
        steps: tokens of each, at most; not above `MAX_STEPS`.
        flag: with which the host says that it has something else to do.

    Returns:
        What was chosen has a leading axis of `MAX_STEPS`.
    """
    chooses = partial(choose_next, model, stages)
    none = nothing(state, rows.shape[0])
    return repeat(model, chooses, none, leaves, cache, state, rows, tables, steps, flag)


def repeat[One](
    model: AbstractModel,
    chooses: Callable[[State, Array, Array], tuple[State, One]],
    none: One,
    leaves: Leaves,
    cache: Cache,
    state: State,
    rows: Int[Array, " sequences"],
    tables: Tables,
    steps: Int[Array, ""],
    flag: Int[Array, ""] | None = None,
) -> tuple[Cache, State, One]:
    """Steps one after the other, each of which takes the token that the one before has chosen.

    Args:
        chooses: from a state, logits, and the rows they are of, what is chosen, and the state after
            it.
        none: what a step gives that is not made has its shapes, and is -1.
        rows, tables, steps, flag: see `decode`; nobody interrupts without a flag.

    Returns:
        What was chosen has a leading axis of `MAX_STEPS`.
    """
    count = rows.shape[0]
    every = jnp.arange(count, dtype=jnp.int32)
    newest = jnp.full(count, -1, jnp.int32)

    def compute(leaves: Leaves, cache: Cache, state: State) -> Any:
        return logits(model, leaves, cache, state, rows, newest, tables, every)

    anew = read_each_time(partial(compute, cache=cache, state=state), leaves)

    def one_more(carry: tuple[Array, Cache, State, One]) -> tuple[Array, Cache, State, One]:
        i, cache, state, so_far = carry
        parts, lengths = anew(state.lengths)
        cache, out, which = compute(parts, cache, state._replace(lengths=lengths))
        state, chosen = chooses(state, out, which)
        so_far = jax.tree.map(
            lambda all, one: lax.dynamic_update_index_in_dim(all, one, i, 0), so_far, chosen
        )
        return i + 1, cache, state, so_far

    def more(carry: tuple[Array, Cache, State, One]) -> Array:
        i, _, state, _ = carry
        goes_on = (i < steps) & jnp.any(going(state, rows))
        return goes_on if flag is None else goes_on & ~interrupted(flag, i)

    empty = jax.tree.map(lambda one: jnp.full((MAX_STEPS, *one.shape), -1, one.dtype), none)
    _, cache, state, chosen = lax.while_loop(more, one_more, (jnp.int32(0), cache, state, empty))
    return cache, state, chosen


def read_each_time(
    step: Callable[[Leaves], Any], leaves: Leaves
) -> Callable[[Array], tuple[Leaves, Array]]:
    """For the body of a loop: parameters in a form that XLA does not look through.

    Else it takes what depends on them alone out of the loop, and with it memory for all of them,
    unpacked.

    Args:
        step: what the loop does with them.

    Returns:
        What gives them, and a number again that is another one each time.
    """
    flat, tree = jax.tree.flatten(leaves)
    given = read_by(step, leaves)

    def anew(number: Array) -> tuple[Leaves, Array]:
        own = [leaf for leaf, is_given in zip(flat, given, strict=True) if is_given]
        *own, number = lax.optimization_barrier((*own, number))
        left = iter(own)
        parts = [next(left) if given else leaf for leaf, given in zip(flat, given, strict=True)]
        return jax.tree.unflatten(tree, parts), number

    return anew


def choose_next(
    model: AbstractModel, stages: Sequence[str], state: State, logits: Array, rows: Array
) -> tuple[State, Chosen]:
    """A new token for each of these rows of the state, the spare one excepted."""
    tokens, progress = sample(
        allowed(logits, model),
        state.sampler,
        state.progress,
        state.history,
        rows,
        state.lengths,
        state.prompts,
        mask=state.mask,
        masked=state.masked,
        stages=stages,
    )
    logprob, ids, top = log_probabilities(logits, tokens, state.logprobs[rows])
    there = rows < state.lengths.shape[0] - 1
    # None of these indices is negative, and finding that out would take a loop of its own.
    place = state.history.at[rows, state.lengths[rows]]
    put = partial(_put, rows)
    state = state._replace(
        history=place.set(tokens, mode="drop", wrap_negative_indices=False),
        lengths=state.lengths.at[rows].add(there.astype(jnp.int32), wrap_negative_indices=False),
        ended=put(state.ended, there & ends(tokens, state.sampler, rows)),
        progress=jax.tree.map(put, state.progress, progress),
    )
    return state, Chosen(jnp.where(there, tokens, -1), logprob, ids, top, progress)


def _put(rows: Array, all: Array, new: Array) -> Array:
    return all.at[rows].set(new, wrap_negative_indices=False)


def nothing(state: State, count: int) -> Chosen:
    """Rows in which nothing was chosen."""
    top = (count, MAX_LOGPROBS)
    none, zeros = jnp.full(count, -1, jnp.int32), jnp.zeros(count, jnp.float32)
    progress = jax.tree.map(lambda p: jnp.zeros((count, *p.shape[1:]), p.dtype), state.progress)
    ids, numbers = jnp.zeros(top, jnp.int32), jnp.zeros(top, jnp.float32)
    return Chosen(none, zeros, ids, numbers, progress)


def forward(
    model: AbstractModel,
    want: Want,
    leaves: Leaves,
    cache: Cache,
    tokens: Int[Array, " tokens"],
    rows: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    prompts: Int[Array, " rows"],
    tables: Tables,
    encoded: Int[Array, " rows"],
) -> tuple[Cache, Float[Array, "tokens width"]]:
    """Logits or last hidden states after every token, float32.

    Args:
        prompts: tokens of each sequence as far as they are known.
        encoded: tokens of the encoder's output that each sequence sees.
    """
    at = Step.flat(rows, positions, prompts, tables, encoded)
    out, cache = model.module(leaves).decode(tokens, at, cache, want)
    return cache, out.astype(jnp.float32)


def score(
    model: AbstractModel,
    leaves: Leaves,
    cache: Cache,
    tokens: Int[Array, " tokens"],
    rows: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    prompts: Int[Array, " rows"],
    tables: Tables,
    encoded: Int[Array, " rows"],
    following: Int[Array, " tokens"],
) -> tuple[Cache, tuple[Array, Array, Array]]:
    """The log-probability of the token that follows each one, and the likeliest ones there.

    As `log_probabilities` has them.
    """
    given = (tokens, rows, positions, prompts, tables, encoded)
    cache, out = forward(model, "logits", leaves, cache, *given)
    return cache, log_probabilities(out, following)


def beam(
    model: AbstractModel,
    leaves: Leaves,
    cache: Cache,
    tokens: Int[Array, " beams"],
    rows: Int[Array, " beams"],
    positions: Int[Array, " beams"],
    prompts: Int[Array, " rows"],
    tables: Tables,
    encoded: Int[Array, " rows"],
    scores: Float[Array, " beams"],
) -> tuple[Cache, Int[Array, " top"], Int[Array, " top"], Float[Array, " top"]]:
    """One step of a beam search: the likeliest continuations of all beams together.

    Args:
        tokens: the last token of each beam.
        scores: sum of the log-probabilities of each beam; -inf for one that is not there.

    Returns:
        The cache; beam, token and score of twice as many candidates as beams, best first.
    """
    given = (tokens, rows, positions, prompts, tables, encoded)
    cache, out = forward(model, "logits", leaves, cache, *given)
    return cache, *best_beams(model, out, scores)


def contrast(
    model: AbstractModel,
    leaves: Leaves,
    cache: Cache,
    tokens: Int[Array, " k"],
    rows: Int[Array, " k"],
    positions: Int[Array, " k"],
    prompts: Int[Array, " k"],
    tables: Tables,
    encoded: Int[Array, " k"],
    past: Float[Array, "context hidden"],
    probabilities: Float[Array, " k"],
    alpha: Float[Array, ""],
) -> tuple[Cache, Array, Array, Array, Array]:
    """One step of contrastive search: computes candidates, chooses one, and finds the next ones.

    Args:
        tokens: candidates for one place, of which the first is at `positions[0]` like all others.
        past: last hidden states of the tokens before.
        probabilities: of the candidates; 0 where there is none.

    Returns:
        The cache; `past` with the chosen one's; which was chosen; the candidates for the next
        place and their probabilities.
    """
    at = Step.flat(rows, positions, prompts, tables, encoded)
    both, cache = model.module(leaves).decode_all(tokens, at, cache)
    return cache, *best_candidate(model, both, positions[0], past, probabilities, alpha)


def fill(
    model: AbstractModel,
    leaves: Leaves,
    cache: Cache,
    tokens: Int[Array, "1 tokens"],
    lengths: Int[Array, " 1"],
    table: Int[Array, "1 blocks"],
) -> Cache:
    """The cache with what cross-attention needs of a text in some blocks; once per request."""
    module = model.module(leaves)
    encoded = module.encode(tokens, jnp.zeros_like(tokens), lengths)["hidden"]
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    rows = jnp.where(positions < lengths[0], 0, -1)
    return module.fill(encoded, cache, Placement(rows, positions, table))


def encode(
    model: AbstractModel,
    want: Want,
    leaves: Leaves,
    cache: Cache,
    tokens: Int[Array, "batch tokens"],
    types: Int[Array, "batch tokens"],
    lengths: Int[Array, " batch"],
) -> Float[Array, "batch ..."]:
    """A result of the encoder over whole texts; there is no cache, it is empty."""
    return model.module(leaves).encode(tokens, types, lengths)[want].astype(jnp.float32)


def copy_blocks(
    model: AbstractModel,
    cache: Cache,
    sources: Mapping[str, Int[Array, " copies"]],
    targets: Mapping[str, Int[Array, " copies"]],
    count: Int[Array, ""],
) -> Cache:
    """The cache with some blocks of each group copied."""
    copied = dict(cache)
    for group in sources:
        own = {name: cache[name] for name in cache if model.caches[name].group == group}
        arrays, tree = jax.tree.flatten(own)
        changed = block_copies.copy_blocks(arrays, sources[group], targets[group], count)
        copied |= jax.tree.unflatten(tree, changed)
    return copied
