"""Penalties and rules: what is added to logits, by the request or by the tokens so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax import Array

from jinfer.sampling.param_types import MAX_BAD_LENGTH
from jinfer.sampling.sampling_metadata import SamplerContext
from jinfer.sampling.token_history import scatter_ids

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, UInt

type Logits = Float[Array, "rows vocab"]
type _Counts = tuple[Array, Array]  # whether a token was seen, and how often it was written


def rules(x: Logits, context: SamplerContext) -> Logits:
    """Adds `logit_bias`, and forbids bad words, banned tokens and an end before `min_tokens`.

    Of a bad word the last token is forbidden where its others are the last of the sequence.
    """
    metadata = context.metadata
    recent = context.history.back(np.arange(MAX_BAD_LENGTH - 1, 0, -1, dtype=np.int32))
    words, last = metadata.bad_words[..., :-1], metadata.bad_words[..., -1]
    begun = jnp.all((words < 0) | (words == recent[:, None]), axis=-1)
    early = context.state.drawn < metadata.column("min_tokens")
    forbidden = jnp.concatenate(
        [jnp.where(begun, last, -1), jnp.where(early[:, None], metadata.end_ids, -1)], axis=-1
    )
    ids = jnp.concatenate([metadata.bias_ids, forbidden], axis=-1)
    never = jnp.full(forbidden.shape, -jnp.inf)
    added = jnp.concatenate([metadata.biases, never], axis=-1)
    return x.at[scatter_ids(ids, x.shape[-1])].add(added, mode="drop")


def penalties(x: Logits, context: SamplerContext) -> Logits:
    """Lowers the logits of tokens that the sequence has.

    The repetition penalty (arXiv 1909.05858) looks at prompt and answer, the presence and
    frequency penalties at the answer alone, as vLLM has it; all at the last `penalty_last_n`.
    """
    metadata, history = context.metadata, context.history
    window = metadata.column("penalty_last_n")
    start = jnp.where(window < 0, 0, history.lengths - window)
    answer = jnp.maximum(start, history.prompts)

    def count(counts: _Counts, positions: Int[Array, "rows block"]) -> _Counts:
        seen, written = counts
        tokens = history.at(positions)
        where = scatter_ids(jnp.where(positions >= start[:, None], tokens, -1), x.shape[-1])
        new = (positions >= answer[:, None]).astype(jnp.int32)
        return seen.at[where].set(True, mode="drop"), written.at[where].add(new, mode="drop")

    none = jnp.zeros(x.shape, jnp.bool_), jnp.zeros(x.shape, jnp.int32)
    seen, written = history.fold(count, none)
    factor = metadata.column("repetition_penalty")[:, None]
    x = jnp.where(seen, jnp.where(x > 0, x / factor, x * factor), x)
    x = x - metadata.column("frequency_penalty")[:, None] * written.astype(jnp.float32)
    x = x - jnp.where(written > 0, metadata.column("presence_penalty")[:, None], 0.0)
    # A tiny repetition penalty overflows a logit; it stays the greatest.
    return jnp.minimum(x, jnp.finfo(jnp.float32).max)


def masked(
    x: Logits,
    mask: UInt[Array, "slots words"],
    slots: Int[Array, " rows"],
    rows: Bool[Array, " rows"],
) -> Logits:
    """Forbids tokens whose bit in a slot's mask is 0, in some rows; bit 0 is the first token."""
    bits = mask[slots][:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None] & 1
    allowed = bits.reshape(x.shape[0], -1)[:, : x.shape[-1]] != 0
    return jnp.where(allowed | ~rows[:, None], x, -jnp.inf)
