"""Matrix-state recurrences: SSD (Mamba-2), linear attention, gated delta rule, KDA, RWKV-7.

Each head has a state S [key_dim, value_dim]. With a = exp(log_decay), one factor a head or one a
row of S:

    none       S = a S + k v                        (Mamba-2, lightning attention)
    DeltaErase      S = a S;  S += k beta (v - k S)      (gated delta net, KDA)
    LowRankErase    S = a S + write (read S) + k v       (RWKV-7; `read` sees S before the token)

and the output is q S, with S after the token. On CPUs a custom call computes one token after the
other, so that bits do not depend on how prompts are divided. Elsewhere prompts are computed in
chunks: all tokens of a chunk read S from before it at once, a masked product of queries and keys
gives their reads of each other, and a triangular system their erasures of each other (the UT
transform; arXiv 2406.06484, 2412.06464).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jinfer.cpu import recurrence_call as custom
from jinfer.ops.activation import activate
from jinfer.ops.recurrence.drafted_scan import keeps_drafted_states
from jinfer.ops.recurrence.ragged_scan import ragged_scan
from jinfer.ops.recurrence.sequence_runs import SequenceRuns, custom_runs

if TYPE_CHECKING:
    from jaxtyping import Float

# Tokens of a chunk. A decay a row needs a factor for each pair of tokens and row: shorter ones.
HEAD_CHUNK, ROW_CHUNK = 64, 16


class DeltaErase(NamedTuple):
    """The delta rule: v replaces the share `beta` of the value that S holds under k."""

    beta: Float[Array, "*tokens heads"]


class LowRankErase(NamedTuple):
    """Adds the value of S under `read` under `write`, which is commonly negative."""

    read: Float[Array, "*tokens heads key_dim"]
    write: Float[Array, "*tokens heads key_dim"]


class MatrixInputs(NamedTuple):
    """Inputs of tokens, or of one token without the axis of tokens.

    Attributes:
        q, k: of key heads; value head h reads key head h * key_heads // heads.
        log_decay: [tokens, heads], or [tokens, heads, key_dim] for a decay a row; at most 0.
    """

    q: Float[Array, "*tokens key_heads key_dim"]
    k: Float[Array, "*tokens key_heads key_dim"]
    v: Float[Array, "*tokens heads value_dim"]
    log_decay: Float[Array, "*tokens heads *key_dim"]
    erase: DeltaErase | LowRankErase | None = None


@keeps_drafted_states
def matrix_scan(
    x: MatrixInputs, table: Float[Array, "slots heads key_dim value_dim"], runs: SequenceRuns
) -> tuple[Float[Array, "tokens heads value_dim"], Float[Array, "slots heads key_dim value_dim"]]:
    """Computes outputs of a flat batch, zero for padding, and the state table (may be donated)."""
    at = custom_runs(runs)
    if at is None:
        size = HEAD_CHUNK if x.log_decay.ndim == 2 else ROW_CHUNK
        return ragged_scan(step, chunk_step, size, x, table, runs)
    match x.erase:
        case DeltaErase(beta):
            return custom.matrix_scan(*x[:4], table, at, erase="delta", beta=beta)
        case LowRankErase(read, write):
            return custom.matrix_scan(*x[:4], table, at, erase="low_rank", read=read, write=write)
    return custom.matrix_scan(*x[:4], table, at)


def step(
    state: Float[Array, "heads key_dim value_dim"], x: MatrixInputs
) -> tuple[Float[Array, "heads key_dim value_dim"], Float[Array, "heads value_dim"]]:
    """Advances one sequence by one token."""
    heads = x.v.shape[0]
    q, k = _per_head(x.q, heads, 0), _per_head(x.k, heads, 0)
    decay = jnp.exp(x.log_decay if x.log_decay.ndim == 2 else x.log_decay[:, None])
    after, v = decay[..., None] * state, x.v
    match x.erase:
        case DeltaErase(beta):
            v = beta[:, None] * (v - _read(k, after))
        case LowRankErase(read, write):
            after = after + write[..., None] * _read(read, state)[:, None]
    after = after + k[..., None] * v[:, None]
    return after, _read(q, after)


def chunk_step(
    state: Float[Array, "heads key_dim value_dim"], x: MatrixInputs, real: Array
) -> tuple[Float[Array, "heads key_dim value_dim"], Float[Array, "size heads value_dim"]]:
    """Advances one sequence by a chunk; tokens that are not real have zeros for inputs."""
    size, heads = x.v.shape[:2]
    # All below is [heads, size, ...].
    q, k = (_per_head(vectors, heads, 1).swapaxes(0, 1) for vectors in (x.q, x.k))
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
        case DeltaErase(beta):
            b = beta.swapaxes(0, 1)[..., None]
            overlap = b * _pairs(k, k, total, total, earlier)
            v = _solve(overlap, b * (v - _product(k * jnp.exp(total), state)))
        case LowRankErase(read, write):
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
    """Computes the sum over rows of a[i] b[j] exp(of_a[i] - of_b[j]) where `seen`.

    The difference of log decays is at most 0 there; each alone could be out of range.
    """
    if of_a.shape[-1] == 1:
        apart = jnp.where(seen[None], of_a - of_b.swapaxes(1, 2), -jnp.inf)
        return _product(a, b.swapaxes(1, 2)) * jnp.exp(apart)
    apart = jnp.where(seen[None, ..., None], of_a[:, :, None] - of_b[:, None], -jnp.inf)
    return jnp.sum(a[:, :, None] * b[:, None] * jnp.exp(apart), axis=-1)


def _solve(lower: Array, right: Array) -> Array:
    """Solves (1 + lower) x = right, with a strictly lower triangular matrix for each head."""
    return lax.linalg.triangular_solve(lower, right, left_side=True, lower=True, unit_diagonal=True)


def gated_delta(
    q: Float[Array, "tokens key_heads key_dim"],
    k: Float[Array, "tokens key_heads key_dim"],
    v: Float[Array, "tokens heads value_dim"],
    log_decay: Float[Array, "tokens heads *key_dim"],
    beta: Float[Array, "tokens heads"],
    table: Float[Array, "slots heads key_dim value_dim"],
    runs: SequenceRuns,
) -> tuple[Float[Array, "tokens heads value_dim"], Float[Array, "slots heads key_dim value_dim"]]:
    """Gated delta rule (arXiv 2412.06464): S = exp(log_decay) S; S += k beta (v - k S); output q S.

    Args:
        q, k: normalized and scaled; key heads serve heads / key_heads consecutive heads.
        log_decay: at most 0; one a head (gated delta net) or one a row of S (KDA).
        beta: the share of the value under k that is replaced.
        table: may be donated.
    """
    return matrix_scan(MatrixInputs(q, k, v, log_decay, DeltaErase(beta)), table, runs)


def linear_attention(
    q: Float[Array, "tokens key_heads key_dim"],
    k: Float[Array, "tokens key_heads key_dim"],
    v: Float[Array, "tokens heads value_dim"],
    slopes: Float[Array, " heads"],
    table: Float[Array, "slots heads key_dim value_dim"],
    runs: SequenceRuns,
) -> tuple[Float[Array, "tokens heads value_dim"], Float[Array, "slots heads key_dim value_dim"]]:
    """Linear attention: S = exp(-slope) S + k v; the output is q S. All float32.

    Args:
        slopes: at least 0, one for each head.
        table: may be donated.
    """
    log_decay = jnp.broadcast_to(-slopes[None], v.shape[:2])
    return matrix_scan(MatrixInputs(q, k, v, log_decay), table, runs)


def ssd(
    x: Float[Array, "tokens heads width"],
    dt: Float[Array, "tokens heads"],
    a: Float[Array, " heads"],
    b: Float[Array, "tokens groups states"],
    c: Float[Array, "tokens groups states"],
    d: Float[Array, " heads"] | None,
    table: Float[Array, "slots heads states width"],
    runs: SequenceRuns,
) -> tuple[Float[Array, "tokens heads width"], Float[Array, "slots heads states width"]]:
    """SSD (arXiv 2405.21060): S = exp(dt a) S + b (dt x); the output is c S + d x. All float32.

    Args:
        dt: step sizes, after softplus and limits.
        a: -exp(A_log).
        b, c: shared by heads / groups consecutive heads.
        table: may be donated.
    """
    inputs = MatrixInputs(c, b, dt[..., None] * x, dt * a[None])
    y, table = matrix_scan(inputs, table, runs)
    return (y if d is None else y + d[None, :, None] * x), table


def step_size(
    dt: Float[Array, "tokens heads"],
    bias: Float[Array, " heads"],
    limits: tuple[float, float] = (0.0, float("inf")),
) -> Float[Array, "tokens heads"]:
    """Computes softplus(dt + bias) within limits, in float32."""
    wide = dt.astype(jnp.float32) + bias.astype(jnp.float32)[None]
    return jnp.clip(activate("softplus", wide), *limits)


def rwkv7(
    r: Float[Array, "tokens heads key_dim"],
    log_decay: Float[Array, "tokens heads key_dim"],
    k: Float[Array, "tokens heads key_dim"],
    v: Float[Array, "tokens heads value_dim"],
    removal: Float[Array, "tokens heads key_dim"],
    rate: Float[Array, "tokens heads key_dim"],
    table: Float[Array, "slots heads key_dim value_dim"],
    runs: SequenceRuns,
) -> tuple[Float[Array, "tokens heads value_dim"], Float[Array, "slots heads key_dim value_dim"]]:
    """RWKV-7: S = exp(log_decay) S - (removal rate) (removal S) + k v; the output is r S.

    The state is the paper's transposed, [key_dim, value_dim].

    Args:
        log_decay: log w, at most 0.
        removal: the normalized removal key kappa, which sees S before the token.
        rate: in-context learning rates, the paper's a.
        table: may be donated.
    """
    erase = LowRankErase(removal, -removal * rate)
    return matrix_scan(MatrixInputs(r, k, v, log_decay, erase), table, runs)
