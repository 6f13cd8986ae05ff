"""Compiled steps: prefill, decoding loop, sampling, and forward passes without sampling.

Pure functions of flat weights, of a KV cache and a device state that are donated, and of small
arrays. `jinfer.engine.runner.step_table` lists them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jinfer.engine.runner.captured_calls import POSITIONS
from jinfer.engine.runner.device_state import State
from jinfer.engine.runner.flat_batch import FlatBatch, Tables, can_continue, make_flat_batch
from jinfer.engine.runner.sampler_output import MAX_STEPS, SamplerOutput
from jinfer.engine.runner.search_steps import best_beams, best_candidate, mask_never_sampled
from jinfer.nn.abstract_model import AbstractModel, Want
from jinfer.nn.row_edits import CAPTURE, is_of_head
from jinfer.ops.attention import kv_blocks
from jinfer.ops.attention.kv_cache import Cache
from jinfer.ops.cpu_library import interrupted
from jinfer.ops.fusion.weight_pointers import used_arrays
from jinfer.sampling import penalties
from jinfer.sampling.logits_processors import process
from jinfer.sampling.logprobs import log_probabilities, log_probabilities_of
from jinfer.sampling.param_ranges import MAX_LOGPROBS
from jinfer.sampling.sampler import ends_sequence, filtered_logits, sample
from jinfer.sampling.stages import NOT_FINITE, STAGES
from jinfer.sampling.step_extras import Extra, processors_of
from jinfer.sampling.token_history import History

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, UInt

type Leaves = tuple[Array, ...]
type Stage = str | Extra


def logits(
    model: AbstractModel,
    leaves: Leaves,
    cache: Cache,
    state: State,
    rows: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    tables: Tables,
    last: Int[Array, " chosen"],
) -> Any:
    """Computes a flat batch of prompt chunks and decoding tokens, and logits after some of them.

    Args:
        rows: the slot of each token; -1: padding.
        positions: position of each token in its sequence; -1: the last token, which only the device
            may know.
        tables: block tables by slot.
        last: indices of the tokens after which one is sampled; -1: none.

    Returns:
        The cache, the logits, and the state rows that these belong to: the padding row where
        nothing is sampled. If the tables name activations to capture, also these, as
        `captured_rows` gives them.
    """
    batch, sampled = make_flat_batch(state, rows, positions, tables, last)
    at, wanted = batch.step(), jnp.maximum(last, 0)
    module = model.module(leaves)
    if CAPTURE not in tables:
        out, cache = module.decode(batch.tokens, at, cache, "logits", wanted)
        return cache, out, sampled
    # What the head computes is captured of all tokens.
    names: Any = tables[CAPTURE]
    every = any(map(is_of_head, names))
    results, cache = module.decode_all(batch.tokens, at, cache, None if every else wanted)
    out = results["logits"][wanted] if every else results["logits"]
    return cache, out, sampled, captured_rows(batch, results["captured"])


def captured_rows(batch: FlatBatch, captured: Mapping[str, Array]) -> dict[str, Array]:
    """Captured activations [tokens, ...], and the position of each token; -1: padding."""
    positions = jnp.where(batch.rows >= 0, batch.positions, -1)
    return {name: value[0] for name, value in captured.items()} | {POSITIONS: positions}


def sample_logits(
    model: AbstractModel,
    stages: Sequence[Stage],
    state: State,
    logits: Float[Array, "chosen vocab"],
    rows: Int[Array, " chosen"],
    mask: UInt[Array, "chosen words"],
    masked: Bool[Array, ""],
) -> tuple[State, SamplerOutput]:
    """Samples the next tokens of some sequences.

    Args:
        stages: sampling stages that these sequences may need, and extras.
        logits, rows: as `logits` returns them.
        mask: grammar bitmask: bit i % 32 of word i // 32 allows token i.
        masked: whether `mask` applies.

    Returns:
        The state, and the sampled tokens with a leading axis of one step.
    """
    every = jnp.arange(logits.shape[0], dtype=jnp.int32)
    guided = partial(penalties.masked, logits, mask, every, every >= 0)
    allowed = lax.cond(masked, guided, lambda: logits)
    state, output = sample_next(model, stages, state, allowed, rows)
    return state, jax.tree.map(lambda one: one[None], output)


def decode(
    model: AbstractModel,
    stages: Sequence[Stage],
    leaves: Leaves,
    cache: Cache,
    state: State,
    rows: Int[Array, " sequences"],
    tables: Tables,
    steps: Int[Array, ""],
    flag: Int[Array, ""],
) -> tuple[Any, ...]:
    """Decodes several steps, until all sequences have ended or the host interrupts.

    Args:
        stages: sampling stages that these sequences may need, and extras.
        rows: slots of the sequences; -1: none.
        tables: block tables by slot.
        steps: tokens of each sequence, at most `MAX_STEPS`.
        flag: number of the flag by which the host interrupts.

    Returns:
        The cache, the state, and the sampled tokens with a leading axis of `MAX_STEPS`; with it
        also captured activations, as of `logits`.
    """
    choose, none = partial(sample_next, model, stages), empty_output(state, rows.shape[0])
    compute = newest_logits(model, rows, tables)
    if CAPTURE not in tables:
        return decode_loop(compute, choose, none, leaves, cache, state, rows, steps, flag)

    def choose_beside(state: State, out: Any, which: Array) -> Any:
        state, output = choose(state, out[0], which)
        return state, (output, out[1])

    _, (_, seen), _, _ = jax.eval_shape(compute, leaves, cache, state, None)
    begun = leaves, cache, state, rows, steps, flag
    cache, state, both = decode_loop(compute, choose_beside, (none, seen), *begun)
    return cache, state, *both


def newest_logits(
    model: AbstractModel, rows: Int[Array, " sequences"], tables: Tables
) -> Callable[..., Any]:
    """`compute` of a `decode_loop`: logits after the last token of each sequence.

    With them, as a tuple, captured activations if the tables name any.
    """
    count = rows.shape[0]
    every, newest = jnp.arange(count, dtype=jnp.int32), jnp.full(count, -1, jnp.int32)

    def compute(leaves: Leaves, cache: Cache, state: State, hidden: None) -> Any:
        cache, out, which, *captured = logits(
            model, leaves, cache, state, rows, newest, tables, every
        )
        return cache, (out, *captured) if captured else out, which, hidden

    return compute


def decode_loop[One](
    compute: Callable[..., Any],
    choose: Callable[[State, Array, Array], tuple[State, One]],
    none: One,
    leaves: Leaves,
    cache: Cache,
    state: State,
    rows: Int[Array, " sequences"],
    steps: Int[Array, ""],
    flag: Int[Array, ""] | None = None,
    hidden: Any = None,
) -> tuple[Cache, State, One]:
    """Autoregressive loop: each step computes the token that the step before has chosen.

    Args:
        compute: from weights, cache, state and `hidden` to the cache, logits, their state rows and
            the next step's `hidden`.
        choose: from the state, logits and their state rows to the next state and the step's output.
        none: shapes of a step's output; the output of steps that do not run is -1.
        rows, steps, flag: as of `decode`; without a flag the loop is not interrupted.

    Returns:
        The cache, the state, and the steps' outputs with a leading axis of `MAX_STEPS`.
    """
    type Carry = tuple[Array, Cache, State, Any, Any]
    anew = reread_weights(partial(compute, cache=cache, state=state, hidden=hidden), leaves)

    def one_more(carry: Carry) -> Carry:
        i, cache, state, hidden, so_far = carry
        parts, lengths = anew(state.lengths)
        cache, out, which, hidden = compute(parts, cache, state._replace(lengths=lengths), hidden)
        state, output = choose(state, out, which)
        so_far = jax.tree.map(
            lambda all, one: lax.dynamic_update_index_in_dim(all, one, i, 0), so_far, output
        )
        return i + 1, cache, state, hidden, so_far

    def more(carry: Carry) -> Array:
        goes_on = (carry[0] < steps) & jnp.any(can_continue(carry[2], rows))
        return goes_on if flag is None else goes_on & ~interrupted(flag, carry[0])

    empty = jax.tree.map(lambda one: jnp.full((MAX_STEPS, *one.shape), -1, one.dtype), none)
    begun = (jnp.int32(0), cache, state, hidden, empty)
    _, cache, state, _, output = lax.while_loop(more, one_more, begun)
    return cache, state, output


def reread_weights(
    step: Callable[[Leaves], Any], leaves: Leaves
) -> Callable[[Array], tuple[Leaves, Array]]:
    """Weights behind an optimization barrier, for the body of a loop.

    Otherwise XLA hoists what depends on the weights alone out of the loop, and with it memory for
    all of them, dequantized. Only arrays that the step reads go through the barrier.

    Args:
        step: the loop's use of the weights.

    Returns:
        A function from a value that changes in each iteration to the weights and that value.
    """
    flat, tree = jax.tree.flatten(leaves)
    is_read = used_arrays(step, leaves)

    def anew(number: Array) -> tuple[Leaves, Array]:
        behind = [leaf for leaf, read in zip(flat, is_read, strict=True) if read]
        *behind, number = lax.optimization_barrier((*behind, number))
        next_read = iter(behind)
        parts = [
            next(next_read) if read else leaf for leaf, read in zip(flat, is_read, strict=True)
        ]
        return jax.tree.unflatten(tree, parts), number

    return anew


def sample_next(
    model: AbstractModel, stages: Sequence[Stage], state: State, logits: Array, rows: Array
) -> tuple[State, SamplerOutput]:
    """Samples a token for each of these state rows except the padding row, and appends it."""
    never = mask_never_sampled(logits, model)
    if processors := processors_of(stages):
        past = History(state.history, rows, state.lengths[rows], state.prompts[rows])
        never = process(never.astype(jnp.float32), processors, state.processors[rows], past)
    names = [one for one in stages if one in STAGES]
    of_sampler = (state.sampler, state.progress, state.history, rows, state.lengths, state.prompts)
    allowed: dict[str, Any] = {"mask": state.mask, "masked": state.masked, "stages": names}
    tokens, progress = sample(never, *of_sampler, **allowed)
    if "post_sampling_probs" in stages:
        left = filtered_logits(never, *of_sampler, **allowed)
        logits = jnp.where(state.filtered[rows][:, None], left, logits.astype(jnp.float32))
    logprob, ids, top = log_probabilities(logits, tokens, state.logprobs[rows])
    if "logprob_token_ids" in stages:
        ids, top = log_probabilities_of(logits, state.logprob_ids[rows], ids, top)
    there = rows < state.lengths.shape[0] - 1
    # No index is negative; wrapping negative ones would take another loop.
    place = state.history.at[rows, state.lengths[rows]]
    put, failed = partial(_put, rows), tokens == NOT_FINITE
    state = state._replace(
        history=place.set(jnp.maximum(tokens, 0), mode="drop", wrap_negative_indices=False),
        lengths=state.lengths.at[rows].add(there.astype(jnp.int32), wrap_negative_indices=False),
        ended=put(state.ended, there & (failed | ends_sequence(tokens, state.sampler, rows))),
        progress=jax.tree.map(put, state.progress, progress),
    )
    return state, SamplerOutput(jnp.where(there, tokens, -1), logprob, ids, top, progress)


def _put(rows: Array, all: Array, new: Array) -> Array:
    return all.at[rows].set(new, wrap_negative_indices=False)


def empty_output(state: State, count: int) -> SamplerOutput:
    """An output in which nothing was sampled."""
    top = (count, MAX_LOGPROBS)
    none, zeros = jnp.full(count, -1, jnp.int32), jnp.zeros(count, jnp.float32)
    progress = jax.tree.map(lambda p: jnp.zeros((count, *p.shape[1:]), p.dtype), state.progress)
    ids, numbers = jnp.zeros(top, jnp.int32), jnp.zeros(top, jnp.float32)
    return SamplerOutput(none, zeros, ids, numbers, progress)


def forward(
    model: AbstractModel,
    want: Want,
    leaves: Leaves,
    cache: Cache,
    batch: FlatBatch,
) -> tuple[Cache, Float[Array, "tokens width"]]:
    """Logits or last hidden states after every token, float32."""
    out, cache = model.module(leaves).decode(batch.tokens, batch.step(), cache, want)
    return cache, out.astype(jnp.float32)


def score(
    model: AbstractModel,
    leaves: Leaves,
    cache: Cache,
    batch: FlatBatch,
    following: Int[Array, " tokens"],
) -> tuple[Cache, tuple[Array, Array, Array]]:
    """Log-probability of the token after each one, and the likeliest tokens with theirs.

    Args:
        following: the token after each one.
    """
    cache, out = forward(model, "logits", leaves, cache, batch)
    return cache, log_probabilities(out, following)


def beam(
    model: AbstractModel,
    leaves: Leaves,
    cache: Cache,
    batch: FlatBatch,
    scores: Float[Array, " beams"],
) -> tuple[Cache, Int[Array, " top"], Int[Array, " top"], Float[Array, " top"]]:
    """A step of beam search: the likeliest continuations over all beams.

    Args:
        batch: the last token of each beam.
        scores: sum of the log-probabilities of each beam; -inf: no beam.

    Returns:
        The cache; beam, token and score of twice as many candidates as beams, best first.
    """
    cache, out = forward(model, "logits", leaves, cache, batch)
    return cache, *best_beams(model, out, scores)


def contrastive(
    model: AbstractModel,
    leaves: Leaves,
    cache: Cache,
    batch: FlatBatch,
    past: Float[Array, "context hidden"],
    probabilities: Float[Array, " k"],
    alpha: Float[Array, ""],
) -> tuple[Cache, Array, Array, Array, Array]:
    """A step of contrastive search: computes candidates, chooses one, and finds the next ones.

    Args:
        batch: candidates for one position.
        past: last hidden states of the tokens before.
        probabilities: of the candidates; 0: no candidate.
        alpha: weight of the degeneration penalty.

    Returns:
        The cache; `past` with the chosen candidate's hidden state; its index; the candidates for
        the next position and their probabilities.
    """
    both, cache = model.module(leaves).decode_all(batch.tokens, batch.step(), cache)
    return cache, *best_candidate(model, both, batch.positions[0], past, probabilities, alpha)


def copy_blocks(
    model: AbstractModel,
    cache: Cache,
    sources: Mapping[str, Int[Array, " copies"]],
    targets: Mapping[str, Int[Array, " copies"]],
    count: Int[Array, ""],
) -> Cache:
    """The KV cache with the first `count` of some blocks of each group copied."""
    copied = dict(cache)
    for group in sources:
        in_group = {name: cache[name] for name in cache if model.caches[name].group == group}
        arrays, tree = jax.tree.flatten(in_group)
        changed = kv_blocks.copy_blocks(arrays, sources[group], targets[group], count)
        copied |= jax.tree.unflatten(tree, changed)
    return copied
