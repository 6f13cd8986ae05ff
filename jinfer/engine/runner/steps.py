"""Parts of compiled steps: flat batches, the decoding loop, sampling, search steps.

Pure functions of arrays, which `jinfer.engine.runner.step_table` puts together to steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jinfer.engine.runner.device_state import State
from jinfer.engine.runner.flat_batch import FlatBatch, Tables, can_continue, make_flat_batch
from jinfer.engine.runner.sampler_output import MAX_STEPS, SamplerOutput
from jinfer.engine.runner.search_steps import best_beams, best_candidate, mask_never_sampled
from jinfer.nn.abstract_model import AbstractModel
from jinfer.ops.attention import kv_blocks
from jinfer.ops.attention.kv_cache import Cache
from jinfer.ops.cpu_library import interrupted
from jinfer.ops.fusion.weight_pointers import used_arrays
from jinfer.sampling import penalties
from jinfer.sampling.logits_processors import Extra, process, processors_of
from jinfer.sampling.logprobs import log_probabilities, log_probabilities_of
from jinfer.sampling.param_types import MAX_LOGPROBS
from jinfer.sampling.sampler import ends_sequence, filtered_logits, sample
from jinfer.sampling.samplers import NOT_FINITE, SAMPLER_NAMES
from jinfer.sampling.token_history import History

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, UInt

type Leaves = tuple[Array, ...]
type Stage = str | Extra


def begin_logits(
    state: State,
    tables: Tables,
    rows: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    last: Int[Array, " chosen"],
) -> tuple[FlatBatch, Array, Array]:
    """A flat batch of prompt chunks and decoding tokens, with logits after some of them.

    Args:
        tables: block tables by slot.
        rows: the slot of each token; -1: padding.
        positions: position of each token in its sequence; -1: the last token, which only the device
            may know.
        last: indices of the tokens after which one is sampled; -1: none.

    Returns:
        The flat batch; `last`; the state rows that the logits belong to: the padding row where
        nothing is sampled.
    """
    batch, sampled = make_flat_batch(state, rows, positions, tables, last)
    return batch, last, sampled


def finish_logits(
    state: State, results: Mapping[str, Array], sampled: Int[Array, " chosen"], *_: Any
) -> tuple[Array, Array]:
    """The logits, and the state rows that they belong to."""
    return results["logits"], sampled


def begin_decode(
    state: State, tables: Tables, rows: Int[Array, " sequences"], *_: Any
) -> tuple[FlatBatch, Array, Array]:
    """As `begin_logits`, a flat batch of the last token of each sequence; -1: no sequence."""
    count = rows.shape[0]
    every, newest = jnp.arange(count, dtype=jnp.int32), jnp.full(count, -1, jnp.int32)
    return begin_logits(state, tables, rows, newest, every)


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


def finish_decode(
    model: AbstractModel,
    stages: Sequence[Stage],
    state: State,
    results: Mapping[str, Array],
    sampled: Int[Array, " sequences"],
    *_: Any,
) -> tuple[State, SamplerOutput]:
    """Samples the next token of each sequence.

    Args:
        stages: sampling stages that these sequences may need, and extras.
        sampled: the state rows of the logits.
    """
    return sample_next(model, stages, state, results["logits"], sampled)


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
        rows: slots of the sequences; -1: none.
        steps: tokens of each sequence, at most `MAX_STEPS`.
        flag: number of the flag by which the host interrupts; None: the loop is not interrupted.

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
    names = [one for one in stages if one in SAMPLER_NAMES]
    of_sampler = (state.sampler, state.progress, state.history, rows, state.lengths, state.prompts)
    allowed: dict[str, Any] = {"mask": state.mask, "masked": state.masked, "samplers": names}
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


def finish_score(
    state: None,
    results: Mapping[str, Array],
    carried: None,
    batch: FlatBatch,
    following: Int[Array, " tokens"],
) -> tuple[tuple[Array, Array, Array]]:
    """Log-probability of the token after each one, and the likeliest tokens with theirs.

    Args:
        following: the token after each one.
    """
    return (log_probabilities(results["logits"].astype(jnp.float32), following),)


def finish_beam(
    model: AbstractModel,
    state: None,
    results: Mapping[str, Array],
    carried: None,
    batch: FlatBatch,
    scores: Float[Array, " beams"],
) -> tuple[Int[Array, " top"], Int[Array, " top"], Float[Array, " top"]]:
    """A step of beam search: the likeliest continuations over all beams.

    Args:
        batch: the last token of each beam.
        scores: sum of the log-probabilities of each beam; -inf: no beam.

    Returns:
        Beam, token and score of twice as many candidates as beams, best first.
    """
    return best_beams(model, results["logits"].astype(jnp.float32), scores)


def finish_contrastive(
    model: AbstractModel,
    state: None,
    results: Mapping[str, Array],
    carried: None,
    batch: FlatBatch,
    past: Float[Array, "context hidden"],
    probabilities: Float[Array, " k"],
    alpha: Float[Array, ""],
) -> tuple[Array, Array, Array, Array]:
    """A step of contrastive search: chooses a candidate, and finds the next ones.

    Args:
        batch: candidates for one position.
        past: last hidden states of the tokens before.
        probabilities: of the candidates; 0: no candidate.
        alpha: weight of the degeneration penalty.

    Returns:
        `past` with the chosen candidate's hidden state; its index; the candidates for the next
        position and their probabilities.
    """
    position = FlatBatch(*batch).positions[0]
    return best_candidate(model, results, position, past, probabilities, alpha)


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
