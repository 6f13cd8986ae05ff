"""RWKV-4 time mixing: the WKV recurrence (arXiv 2305.13048)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array, lax

from jinfer.cpu import recurrence_call as custom
from jinfer.ops.recurrence.drafted_scan import keeps_drafted_states
from jinfer.ops.recurrence.ragged_scan import ChunkStep, TokenStep, ragged_scan
from jinfer.ops.recurrence.sequence_runs import SequenceRuns, custom_runs

if TYPE_CHECKING:
    from jaxtyping import Float

_CHUNK = 64
_EMPTY = -1e30  # the exponent of an empty sum


def wkv(
    k: Float[Array, "tokens channels"],
    v: Float[Array, "tokens channels"],
    time_decay: Float[Array, " channels"],
    bonus: Float[Array, " channels"],
    table: Float[Array, "slots 3 channels"],
    runs: SequenceRuns,
) -> tuple[Float[Array, "tokens channels"], Float[Array, "slots 3 channels"]]:
    """Averages all values so far, weighted by exp(k) and decaying with distance. All float32.

    out = (a + exp(bonus + k) v) / (b + exp(bonus + k)); a = w a + exp(k) v; b = w b + exp(k), with
    w = exp(-exp(time_decay)). The state holds a and b divided by exp(p), and p, the largest
    exponent in them.

    Args:
        bonus: `time_first`, of a token's own key.
        table: may be donated.
    """
    return _scan(k, v, -jnp.exp(time_decay), bonus, table, runs)


@keeps_drafted_states
def _scan(
    k: Array, v: Array, log_decay: Array, bonus: Array, table: Array, runs: SequenceRuns
) -> tuple[Array, Array]:
    if (at := custom_runs(runs)) is not None:
        return custom.wkv_scan(k, v, log_decay, bonus, table, at)
    return ragged_scan(*_forms(log_decay, bonus), _CHUNK, (k, v), table, runs)


def _forms(log_decay: Array, bonus: Array) -> tuple[TokenStep, ChunkStep]:
    def read(state: Array, k: Array, v: Array) -> Array:
        a, b, p = state
        p = jnp.where(b > 0, p, _EMPTY)  # a new sequence's state is zero
        top = jnp.maximum(p, bonus + k)
        old, now = jnp.exp(p - top), jnp.exp(bonus + k - top)
        return (old * a + now * v) / (old * b + now)

    def step(state: Array, token: tuple[Array, Array]) -> tuple[Array, Array]:
        k, v = token
        out = read(state, k, v)
        decayed = jnp.stack([state[0], state[1], state[2] + log_decay])
        return _merge(decayed, jnp.stack([v, jnp.ones_like(v), k])), out

    def chunk(state: Array, tokens: tuple[Array, Array], real: Array) -> tuple[Array, Array]:
        k, v = tokens

        def advance(state: Array, token: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            after, out = step(state, token[:2])
            return jnp.where(token[2], after, state), out

        return lax.scan(advance, state, (k, v, real), unroll=8)

    return step, chunk


def _merge(first: Array, second: Array) -> Array:
    """Merges two weighted sums; the second is not empty."""
    a1, b1, p1 = first
    a2, b2, p2 = second
    p1 = jnp.where(b1 > 0, p1, _EMPTY)
    top = jnp.maximum(p1, p2)
    x, y = jnp.exp(p1 - top), jnp.exp(p2 - top)
    return jnp.stack([x * a1 + y * a2, x * b1 + y * b2, top])
