"""How the next token is chosen: one function for a mixed batch.

Every row goes through stages of its own, in its own order. A row's result depends on its logits,
parameters, progress and history alone, to the bit. On CPUs a custom call chooses; XLA's operations,
its reference, compute what only some rows need only if there are such rows; on a GPU some of it
always.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array, lax

from jinfer.ops import sampler_calls
from jinfer.ops.argmax import argmax
from jinfer.ops.backend import backend
from jinfer.sampling import penalties, truncation
from jinfer.sampling.dry import dry
from jinfer.sampling.fsd import fsd
from jinfer.sampling.mirostat import adapted, mirostat
from jinfer.sampling.param_names import STAGES
from jinfer.sampling.rng import noise
from jinfer.sampling.sampling_metadata import LAST_STAGE, Progress, Sampler, Turn
from jinfer.sampling.temperature import dynatemp, temperature
from jinfer.sampling.token_history import History

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, UInt

type _Stage = Callable[[Array, Turn], Array]

_FUNCTIONS: dict[str, _Stage] = {
    "rules": penalties.rules,
    "penalties": penalties.penalties,
    "dry": dry,
    "temperature": temperature,
    "dynatemp": dynatemp,
    "top_n_sigma": truncation.top_n_sigma,
    "top_k": truncation.by_mass,
    "tfs_z": truncation.tfs_z,
    "typical_p": truncation.by_mass,
    "top_p": truncation.by_mass,
    "min_p": truncation.by_share,
    "top_a": truncation.by_share,
    "xtc": truncation.xtc,
    "mirostat": mirostat,
    "fsd": fsd,
}


def sample(
    logits: Float[Array, "rows vocab"],
    sampler: Sampler,
    progress: Progress,
    history: Int[Array, "slots length"],
    slots: Int[Array, " rows"],
    lengths: Int[Array, " slots"],
    prompt_lengths: Int[Array, " slots"],
    *,
    mask: UInt[Array, "slots words"] | None = None,
    masked: Bool[Array, " slots"] | None = None,
    stages: Sequence[str] = STAGES,
) -> tuple[Int[Array, " rows"], Progress]:
    """Chooses the next token of each row, and counts it.

    Args:
        logits: of any floating type; chosen from in float32.
        sampler, progress: of each slot.
        history: tokens of each slot's sequence, the prompt first.
        slots: whose sequence each row continues.
        lengths: tokens of each sequence: what follows them in `history` is not looked at.
        prompt_lengths: how many of them are the prompt.
        mask: a bit per token, the lowest of a word first; what is not set is forbidden.
        masked: which slots obey their mask.
        stages: those that the program has; no row may need another (`order.stage_sets`).

    Returns:
        A token and the progress of each row.
    """
    logits = logits.astype(jnp.float32)
    masks = () if mask is None or masked is None else (mask, masked)
    if sampler_calls.available():
        sequences = (history, lengths, prompt_lengths, slots, slots)
        tokens, mu, _ = sampler_calls.sample(logits, (*sampler, *progress), *sequences, masks)
    else:

        def drawn() -> tuple[Array, Array]:
            own = Sampler(*(part[slots] for part in sampler))
            past = History(history, slots, lengths[slots], prompt_lengths[slots])
            rows = Progress(*(part[slots] for part in progress))
            return _drawn(_allowed(logits, mask, masked, slots), own, rows, past, stages)

        # Where every row wants its greatest logit nothing else is computed, and no parameters are
        # gathered: for 8 rows of 49k logits that is a fifth of the time.
        bound = jnp.bool_(False) if mask is None or masked is None else masked
        greedy = jnp.all((_greedy(sampler) & ~bound)[slots])
        tokens, mu = lax.cond(greedy, lambda: (argmax(logits), progress.mu[slots]), drawn)
    return tokens, Progress(progress.drawn[slots] + 1, mu)


def _greedy(sampler: Sampler) -> Bool[Array, " slots"]:
    """Who wants the greatest logit, as it is."""
    draws, surprise = sampler.whole("draws"), sampler.whole("mirostat")
    return (sampler.stages[:, 0] == LAST_STAGE) & (draws == 0) & (surprise == 0)


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


def _drawn(
    logits: Float[Array, "rows vocab"],
    sampler: Sampler,
    progress: Progress,
    past: History,
    stages: Sequence[str],
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """Tokens of any rows, and mirostat's mu after them."""
    left = filtered(logits, sampler, progress, past, stages)
    tokens = _if_some(
        sampler.whole("draws") > 0,
        lambda: argmax(noisy(left, sampler, progress)),
        lambda: argmax(left),
    )
    mu = _if_some(
        sampler.whole("mirostat") > 0,
        lambda: adapted(sampler, progress.mu, _at(left, tokens)),
        lambda: progress.mu,
    )
    return tokens, mu


def _if_some(
    rows: Bool[Array, " rows"], all_rows: Callable[[], Array], otherwise: Callable[[], Array]
) -> Array:
    """What some rows need, which the others do not notice; without such rows, the same for less."""
    if backend() == "gpu":
        # Its host decides which it is to be, for which it waits longer than this takes.
        return all_rows()
    return lax.cond(jnp.any(rows), all_rows, otherwise)


def filtered(
    logits: Float[Array, "rows vocab"],
    sampler: Sampler,
    progress: Progress,
    history: History,
    stages: Sequence[str] = STAGES,
) -> Float[Array, "rows vocab"]:
    """What the stages leave: logits to draw from, -inf for what is never drawn.

    In XLA's operations in each round the stage runs that is first in the default order among those
    that rows need next, on all these rows. So a stage runs once where all orders agree, and every
    order is possible in one program that has each stage once.

    Args:
        sampler, progress, history: of each row.
        stages: those that the program has; no row may need another (`order.stage_sets`).
    """
    if sampler_calls.available():
        tokens, slots, lengths, prompts = history
        own = jnp.arange(logits.shape[0], dtype=jnp.int32)
        sequences = (tokens, lengths, prompts, own, slots)
        return sampler_calls.sample(logits, (*sampler, *progress), *sequences, filtered=True)[2]
    functions = list(dict.fromkeys(_FUNCTIONS[name] for name in STAGES if name in stages))
    which = [functions.index(f) if (f := _FUNCTIONS[n]) in functions else 0 for n in STAGES]
    function_of = jnp.array(which, jnp.int32)

    def next_stages(done: Int[Array, " rows"]) -> Int[Array, " rows"]:
        return jnp.take_along_axis(sampler.stages, done[:, None], axis=-1)[:, 0]

    def more(state: tuple[Array, Array]) -> Bool[Array, ""]:
        return jnp.min(next_stages(state[1])) < LAST_STAGE

    def one(state: tuple[Array, Array]) -> tuple[Array, Array]:
        x, done = state
        each = next_stages(done)
        stage = jnp.min(each)
        rows = each == stage
        turn = Turn(stage, sampler, progress, history.only(rows))
        new = lax.switch(function_of[stage], functions, x, turn)
        return jnp.where(rows[:, None], new, x), done + rows.astype(jnp.int32)

    return lax.while_loop(more, one, (logits, jnp.zeros_like(progress.drawn)))[0]


def ends(
    tokens: Int[Array, " rows"], sampler: Sampler, slots: Int[Array, " rows"]
) -> Bool[Array, " rows"]:
    """Whether a row's token ends its sequence, as far as the device can know.

    A request that goes on after the model's ends may still have its own (`stop_token_ids`), and
    stop texts; the host finds these.
    """
    known = jnp.any(tokens[:, None] == sampler.end_ids[slots], axis=-1)
    return known & (sampler.whole("ignore_eos")[slots] == 0)


def noisy(
    left: Float[Array, "rows vocab"], sampler: Sampler, progress: Progress
) -> Float[Array, "rows vocab"]:
    """What is left, with noise in the rows that draw: the greatest is the token (Gumbel-max)."""
    draws = sampler.whole("draws") > 0
    gumbel = noise(sampler.key, progress.drawn, left.shape[-1])
    return jnp.where(draws[:, None], left + gumbel, left)


def _at(x: Float[Array, "rows vocab"], tokens: Int[Array, " rows"]) -> Float[Array, " rows"]:
    return jnp.take_along_axis(x, tokens[:, None], axis=-1)[:, 0]
