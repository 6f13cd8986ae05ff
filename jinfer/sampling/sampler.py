"""Sampler: logits to next tokens, by one function for a mixed batch.

Each row runs its own samplers, in its own order. Results are batch-invariant: they depend only on a
row's logits, parameters, state and history, to the bit. On CPUs a custom call samples if it
supports the program's samplers; XLA's operations are its reference. They skip samplers that no row
needs, except for cheap samplers on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array, lax

from jinfer.ops import sampler_calls
from jinfer.ops.backend import backend
from jinfer.ops.reductions import argmax
from jinfer.sampling import penalties
from jinfer.sampling.rng import noise
from jinfer.sampling.samplers import NOT_FINITE, SAMPLER_NAMES, SAMPLERS
from jinfer.sampling.sampling_metadata import (
    COUNTS,
    END_OF_CHAIN,
    NUMBERS,
    SamplerContext,
    SamplerState,
    SamplingMetadata,
)
from jinfer.sampling.token_history import History
from jinfer.sampling.truncation import adapted_mu

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, UInt

_LANES = 64  # logits reduced in parallel (SIMD)

type SamplerFunction = Callable[[Array, SamplerContext], Array]


def _function(path: str) -> SamplerFunction:
    module, _, name = path.partition(".")
    function: SamplerFunction = getattr(import_module(f"jinfer.sampling.{module}"), name)
    return function


FUNCTIONS = {sampler.name: _function(sampler.function) for sampler in SAMPLERS}


def sample(
    logits: Float[Array, "rows vocab"],
    metadata: SamplingMetadata,
    state: SamplerState,
    history: Int[Array, "slots length"],
    slots: Int[Array, " rows"],
    lengths: Int[Array, " slots"],
    prompt_lengths: Int[Array, " slots"],
    *,
    mask: UInt[Array, "slots words"] | None = None,
    masked: Bool[Array, " slots"] | None = None,
    samplers: Sequence[str] = SAMPLER_NAMES,
) -> tuple[Int[Array, " rows"], SamplerState]:
    """Samples the next token of each row, and counts it.

    Args:
        logits: of any floating type; computations are in float32.
        metadata, state: of each slot.
        history: tokens of each slot's sequence, the prompt first.
        slots: the slot of each row's sequence.
        lengths: tokens of each sequence; later entries of `history` are not read.
        prompt_lengths: tokens of each prompt.
        mask: a bit for each token, lowest bit first; 0 forbids it.
        masked: slots whose mask applies.
        samplers: the program's samplers; no row may need another (`sampler_chain.sampler_sets`).

    Returns:
        Each row's token and state; the token is `NOT_FINITE` if a logit is NaN or +inf.
    """
    logits = logits.astype(jnp.float32)
    masks = () if mask is None or masked is None else (mask, masked)
    if sampler_calls.knows(samplers):
        sequences = (history, lengths, prompt_lengths, slots, slots)
        tokens, mu, _ = sampler_calls.sample(logits, _operands(metadata, state), *sequences, masks)
    else:

        def drawn() -> tuple[Array, Array]:
            of_rows = SamplingMetadata(*(part[slots] for part in metadata))
            past = History(history, slots, lengths[slots], prompt_lengths[slots])
            states = SamplerState(*(part[slots] for part in state))
            return _drawn(_allowed(logits, mask, masked, slots), of_rows, states, past, samplers)

        # If all rows are greedy, nothing else is computed, and no parameters are gathered.
        bound = jnp.bool_(False) if mask is None or masked is None else masked
        greedy = jnp.all((_greedy(metadata) & ~bound)[slots])
        tokens, mu = lax.cond(greedy, lambda: (argmax(logits), state.mu[slots]), drawn)
        odd = _has_nan_or_inf(logits)
        tokens, mu = jnp.where(odd, NOT_FINITE, tokens), jnp.where(odd, state.mu[slots], mu)
    return tokens, SamplerState(state.drawn[slots] + 1, mu)


def filtered_logits(
    logits: Float[Array, "rows vocab"],
    metadata: SamplingMetadata,
    state: SamplerState,
    history: Int[Array, "slots length"],
    slots: Int[Array, " rows"],
    lengths: Int[Array, " slots"],
    prompt_lengths: Int[Array, " slots"],
    *,
    mask: UInt[Array, "slots words"],
    masked: Bool[Array, " slots"],
    samplers: Sequence[str] = SAMPLER_NAMES,
) -> Float[Array, "rows vocab"]:
    """Computes the logits that `sample` draws from, with equal arguments; -inf: never drawn.

    A greedy row keeps only its chosen token.
    """
    of_rows = SamplingMetadata(*(part[slots] for part in metadata))
    states = SamplerState(*(part[slots] for part in state))
    past = History(history, slots, lengths[slots], prompt_lengths[slots])
    allowed = _allowed(logits.astype(jnp.float32), mask, masked, slots)
    left = apply_samplers(allowed, of_rows, states, past, samplers)
    selected = jnp.arange(left.shape[-1])[None] == argmax(left)[:, None]
    drawn = of_rows.column("draws")[:, None] > 0
    return jnp.where(drawn, left, jnp.where(selected, 0.0, -jnp.inf))


def _operands(metadata: SamplingMetadata, state: SamplerState) -> tuple[Array, ...]:
    """Converts metadata and state for the custom call: columns and samplers in its order.

    No row may have a sampler that the call does not support.
    """
    layout = sampler_calls.layout()
    chain = metadata.chain
    if layout.samplers != SAMPLER_NAMES:
        last = len(layout.samplers)
        known = {name: number for number, name in enumerate(layout.samplers)}
        numbers = [known.get(name, last) for name in (*SAMPLER_NAMES, "")]
        chain = jnp.array(numbers, jnp.int32)[chain[:, :last]]
    arranged = metadata._replace(
        numbers=_arranged(metadata.numbers, NUMBERS, layout.numbers),
        counts=_arranged(metadata.counts, COUNTS, layout.counts),
        chain=chain,
    )
    return (*arranged, *state)


def _arranged(x: Array, names: tuple[str, ...], order: tuple[str, ...]) -> Array:
    """Selects columns by name, in this order."""
    return x if names == order else x[:, jnp.array([names.index(name) for name in order])]


def _greedy(metadata: SamplingMetadata) -> Bool[Array, " slots"]:
    """Finds the slots that take the greatest unmodified logit."""
    draws, surprise = metadata.column("draws"), metadata.column("mirostat")
    return (metadata.chain[:, 0] == END_OF_CHAIN) & (draws == 0) & (surprise == 0)


def _allowed(
    logits: Float[Array, "rows vocab"],
    mask: UInt[Array, "slots words"] | None,
    masked: Bool[Array, " slots"] | None,
    slots: Int[Array, " rows"],
) -> Float[Array, "rows vocab"]:
    if mask is None or masked is None:
        return logits
    obey = masked[slots]
    return _if_some(obey, lambda: penalties.masked(logits, mask, slots, obey), lambda: logits)


def _has_nan_or_inf(logits: Float[Array, "rows vocab"]) -> Bool[Array, " rows"]:
    """Whether a row has NaN or +inf; -inf marks forbidden tokens."""
    filled = jnp.pad(logits, ((0, 0), (0, -logits.shape[1] % _LANES)))
    lanes = filled.reshape(logits.shape[0], -1, _LANES)  # vectorized by XLA:CPU
    return ~jnp.all(jnp.all(lanes < jnp.inf, axis=1), axis=-1)


def _drawn(
    logits: Float[Array, "rows vocab"],
    metadata: SamplingMetadata,
    state: SamplerState,
    past: History,
    samplers: Sequence[str],
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """Samples tokens of any rows; also returns mirostat's mu after them."""
    left = apply_samplers(logits, metadata, state, past, samplers)
    tokens = _if_some(
        metadata.column("draws") > 0,
        lambda: argmax(add_gumbel_noise(left, metadata, state)),
        lambda: argmax(left),
    )
    mu = _if_some(
        metadata.column("mirostat") > 0,
        lambda: adapted_mu(metadata, state.mu, _at(left, tokens)),
        lambda: state.mu,
    )
    return tokens, mu


def _if_some(
    rows: Bool[Array, " rows"], all_rows: Callable[[], Array], otherwise: Callable[[], Array]
) -> Array:
    """Runs an operation that only some rows need; without such rows, a cheaper equivalent."""
    if backend() == "gpu":
        # On a GPU a branch waits for the host, which takes longer than the operation.
        return all_rows()
    return lax.cond(jnp.any(rows), all_rows, otherwise)


def apply_samplers(
    logits: Float[Array, "rows vocab"],
    metadata: SamplingMetadata,
    state: SamplerState,
    history: History,
    samplers: Sequence[str] = SAMPLER_NAMES,
) -> Float[Array, "rows vocab"]:
    """Applies the samplers to logits: -inf for tokens that are never drawn.

    In each round the sampler that comes first in the default order, of those that rows need next,
    runs on all these rows. So a sampler runs once if all orders agree, and one program with each
    sampler once supports every order.

    Args:
        metadata, state, history: one row each.
        samplers: the program's samplers; no row may need another (`sampler_chain.sampler_sets`).
    """
    if sampler_calls.knows(samplers):
        tokens, slots, lengths, prompts = history
        rows = jnp.arange(logits.shape[0], dtype=jnp.int32)
        sequences = (tokens, lengths, prompts, rows, slots)
        operands = _operands(metadata, state)
        return sampler_calls.sample(logits, operands, *sequences, filtered=True)[2]
    functions = list(dict.fromkeys(FUNCTIONS[name] for name in SAMPLER_NAMES if name in samplers))
    which = [functions.index(f) if (f := FUNCTIONS[n]) in functions else 0 for n in SAMPLER_NAMES]
    function_of = jnp.array(which, jnp.int32)

    def next_samplers(done: Int[Array, " rows"]) -> Int[Array, " rows"]:
        return jnp.take_along_axis(metadata.chain, done[:, None], axis=-1)[:, 0]

    def more(carry: tuple[Array, Array]) -> Bool[Array, ""]:
        return jnp.min(next_samplers(carry[1])) < END_OF_CHAIN

    def run_sampler(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        x, done = carry
        following = next_samplers(done)
        sampler = jnp.min(following)
        rows = following == sampler
        context = SamplerContext(sampler, metadata, state, history.only(rows))
        new = lax.switch(function_of[sampler], functions, x, context)
        return jnp.where(rows[:, None], new, x), done + rows.astype(jnp.int32)

    return lax.while_loop(more, run_sampler, (logits, jnp.zeros_like(state.drawn)))[0]


def ends_sequence(
    tokens: Int[Array, " rows"], metadata: SamplingMetadata, slots: Int[Array, " rows"]
) -> Bool[Array, " rows"]:
    """Whether a row's token ends its sequence, as far as the device knows.

    The host finds the other ends: stop texts, and the `stop_token_ids` of a request that ignores
    the model's own end.
    """
    known = jnp.any(tokens[:, None] == metadata.end_ids[slots], axis=-1)
    return known & (metadata.column("ignore_eos")[slots] == 0)


def add_gumbel_noise(
    left: Float[Array, "rows vocab"], metadata: SamplingMetadata, state: SamplerState
) -> Float[Array, "rows vocab"]:
    """Samples by Gumbel-max: the greatest of the filtered logits plus noise, in rows that draw."""
    draws = metadata.column("draws") > 0
    gumbel = noise(metadata.key, state.drawn, left.shape[-1])
    return jnp.where(draws[:, None], left + gumbel, left)


def _at(x: Float[Array, "rows vocab"], tokens: Int[Array, " rows"]) -> Float[Array, " rows"]:
    return jnp.take_along_axis(x, tokens[:, None], axis=-1)[:, 0]
