"""Matrix-state recurrence: what SSD, linear attention, the gated delta rule and RWKV-7 share.

Each head has a state S [key_dim, value_dim]. With a = exp(log_decay), one factor a head or one a
row of S:

    none       S = a S + k v                        (Mamba-2, lightning attention)
    Delta      S = a S;  S += k beta (v - k S)      (gated delta net, KDA)
    LowRank    S = a S + write (read S) + k v       (RWKV-7; `read` sees S before the token)

and the output is q S, with S after the token. On CPUs a custom call computes one token after the
other, so that bits do not depend on how prompts are divided. Elsewhere prompts are computed in
chunks: S before a chunk is read by all its tokens at once, what tokens read of each other is a
masked product of queries and keys, and what they erase of each other is the solution of a
triangular system (the UT transform; arXiv 2406.06484, 2412.06464).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jinfer.cpu import recurrence_call as custom
from jinfer.ops.recurrence.drafted_scan import keeps_drafted_states
from jinfer.ops.recurrence.ragged_scan import ragged_scan
from jinfer.ops.recurrence.sequence_runs import SequenceRuns, custom_runs

if TYPE_CHECKING:
    from jaxtyping import Float

# Tokens of a chunk. A decay a row needs a factor for each pair of tokens and row: shorter ones.
HEAD_CHUNK, ROW_CHUNK = 64, 16


class Delta(NamedTuple):
    """The delta rule: what S holds under k is replaced by v to the degree `beta`."""

    beta: Float[Array, "*tokens heads"]


class LowRank(NamedTuple):
    """What S holds under `read` is added under `write`, which is commonly negative."""

    read: Float[Array, "*tokens heads key_dim"]
    write: Float[Array, "*tokens heads key_dim"]


class MatrixInputs(NamedTuple):
    """Inputs of tokens; without the axis of tokens, of one.

    Attributes:
        q, k: of key heads; value head h reads key head h * key_heads // heads.
        log_decay: [tokens, heads], or [tokens, heads, key_dim] for a decay a row; at most 0.
    """

    q: Float[Array, "*tokens key_heads key_dim"]
    k: Float[Array, "*tokens key_heads key_dim"]
    v: Float[Array, "*tokens heads value_dim"]
    log_decay: Float[Array, "*tokens heads *key_dim"]
    erase: Delta | LowRank | None = None


@keeps_drafted_states
def matrix_scan(
    x: MatrixInputs, table: Float[Array, "slots heads key_dim value_dim"], runs: SequenceRuns
) -> tuple[Float[Array, "tokens heads value_dim"], Float[Array, "slots heads key_dim value_dim"]]:
    """Outputs of a flat batch, zero for padding, and the state table, which may be donated."""
    at = custom_runs(runs)
    if at is None:
        size = HEAD_CHUNK if x.log_decay.ndim == 2 else ROW_CHUNK
        return ragged_scan(step, chunk_step, size, x, table, runs)
    match x.erase:
        case Delta(beta):
            return custom.matrix_scan(*x[:4], table, at, erase="delta", beta=beta)
        case LowRank(read, write):
            return custom.matrix_scan(*x[:4], table, at, erase="low_rank", read=read, write=write)
    return custom.matrix_scan(*x[:4], table, at)


def step(
    state: Float[Array, "heads key_dim value_dim"], x: MatrixInputs
) -> tuple[Float[Array, "heads key_dim value_dim"], Float[Array, "heads value_dim"]]:
    """One token of one sequence."""
    heads = x.v.shape[0]
    q, k = _per_head(x.q, heads, 0), _per_head(x.k, heads, 0)
    decay = jnp.exp(x.log_decay if x.log_decay.ndim == 2 else x.log_decay[:, None])
    after, v = decay[..., None] * state, x.v
    match x.erase:
        case Delta(beta):
            v = beta[:, None] * (v - _read(k, after))
        case LowRank(read, write):
            after = after + write[..., None] * _read(read, state)[:, None]
    after = after + k[..., None] * v[:, None]
    return after, _read(q, after)


def chunk_step(
    state: Float[Array, "heads key_dim value_dim"], x: MatrixInputs, real: Array
) -> tuple[Float[Array, "heads key_dim value_dim"], Float[Array, "size heads value_dim"]]:
    """The tokens of a chunk at once; those that are not real have zeros for inputs."""
    size, heads = x.v.shape[:2]
    # All below is [heads, size, ...].
    q, k = (_per_head(each, heads, 1).swapaxes(0, 1) for each in (x.q, x.k))
    v, decay = x.v.swapaxes(0, 1), x.log_decay.swapaxes(0, 1)
    decay = decay if decay.ndim == 3 else decay[..., None]
    total = jnp.cumsum(decay, axis=1)  # from the chunk's start, the token's own included
    here = jnp.arange(size)
    own_too, earlier = here[:, None] >= here[None], here[:, None] > here[None]
    added = _pairs(q, k, total, total, own_too)
    out = _product(q * jnp.exp(total), state)
    left = jnp.exp(total[:, -1:] - total)  # of what a token adds, at the chunk's end
    after = jnp.exp(total[:, -1])[..., None] * state
    match x.erase:
        case Delta(beta):
            b = beta.swapaxes(0, 1)[..., None]
            overlap = b * _pairs(k, k, total, total, earlier)
            v = _solve(overlap, b * (v - _product(k * jnp.exp(total), state)))
        case LowRank(read, write):
            read, write = read.swapaxes(0, 1), write.swapaxes(0, 1)
            before = total - decay  # `read` sees the state before the token
            seen = _product(read * jnp.exp(before), state)
            seen = seen + _product(_pairs(read, k, before, total, earlier), v)
            seen = _solve(-_pairs(read, write, before, total, earlier), seen)
            out = out + _product(_pairs(q, write, total, total, own_too), seen)
            after = after + _product((write * left).swapaxes(1, 2), seen)
    out = out + _product(added, v)
    after = after + _product((k * left).swapaxes(1, 2), v)
    return after, out.swapaxes(0, 1)


def _per_head(x: Array, heads: int, axis: int) -> Array:
    return jnp.repeat(x, heads // x.shape[axis], axis=axis)


def _read(key: Array, state: Array) -> Array:
    return jnp.sum(key[..., None] * state, axis=-2)


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _pairs(a: Array, b: Array, of_a: Array, of_b: Array, seen: Array) -> Array:
    """The sum over rows of a[i] b[j] exp(of_a[i] - of_b[j]) where `seen`; [heads, size, size].

    The difference of log decays is at most 0 there; each alone could be out of range.
    """
    if of_a.shape[-1] == 1:
        apart = jnp.where(seen[None], of_a - of_b.swapaxes(1, 2), -jnp.inf)
        return _product(a, b.swapaxes(1, 2)) * jnp.exp(apart)
    apart = jnp.where(seen[None, ..., None], of_a[:, :, None] - of_b[:, None], -jnp.inf)
    return jnp.sum(a[:, :, None] * b[:, None] * jnp.exp(apart), axis=-1)


def _solve(lower: Array, right: Array) -> Array:
    """x of (1 + lower) x = right, with a strictly lower triangular matrix for each head."""
    return lax.linalg.triangular_solve(lower, right, left_side=True, lower=True, unit_diagonal=True)
