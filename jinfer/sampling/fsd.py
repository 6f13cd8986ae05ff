"""FSD, frustratingly simple decoding (arXiv 2305.12675): likely tokens that repeat nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jinfer.sampling.param_types import MAX_CANDIDATES, MAX_NGRAM
from jinfer.sampling.rng import uniform
from jinfer.sampling.sampling_metadata import SamplerContext, SamplingMetadata
from jinfer.sampling.token_history import History

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class _Counts(NamedTuple):
    """N-gram counts by context: the last 0, 1, ... tokens of a row.

    Attributes:
        followed: how often any token followed the context.
        by: how often each candidate followed it.
    """

    followed: Int[Array, "rows contexts"]
    by: Int[Array, "rows contexts candidates"]


def fsd(x: Float[Array, "rows vocab"], context: SamplerContext) -> Float[Array, "rows vocab"]:
    """Returns logits of 0 for the chosen token, -inf for all others.

    Chooses, of the `fsd_k` likeliest tokens, the token with the greatest (1 - alpha) p - alpha s: s
    is its probability in an n-gram model of the sequence, p among the `fsd_pool` likeliest. Random
    FSD (Inferflow) instead draws some of its first tokens.
    """
    _, metadata, state, history = context
    count = min(MAX_CANDIDATES, x.shape[-1])
    # Without the barrier XLA:CPU turns a top_k that is used in part into a sort.
    best, ids = lax.optimization_barrier(lax.top_k(x, count))
    rank = jnp.arange(count, dtype=jnp.int32)[None]
    pool = metadata.column("fsd_pool")
    inside = (rank < pool[:, None]) | (pool[:, None] == 0)
    total = jnp.where(pool > 0, _logsum(jnp.where(inside, best, -jnp.inf)), _logsum(x))
    p = jnp.where(inside, jnp.exp(best - total[:, None]), 0.0)
    alpha = metadata.column("fsd_alpha")[:, None]
    scores = (1 - alpha) * p - alpha * _predicted(_count(history, ids), metadata, history)
    candidate = (rank < metadata.column("fsd_k")[:, None]) & (best > -jnp.inf)
    best_candidate = jnp.argmax(jnp.where(candidate, scores, -jnp.inf), axis=-1)
    chosen = jnp.take_along_axis(ids, best_candidate[:, None], axis=-1)
    only = jnp.arange(x.shape[-1], dtype=jnp.int32)[None] == chosen
    u = uniform(metadata.key, state.drawn, "random_fsd")
    late = state.drawn >= metadata.column("random_fsd_tokens")
    # Only random FSD draws at all.
    now = late | (u < metadata.column("random_fsd_probability")) | (metadata.column("draws") == 0)
    return jnp.where(now[:, None], jnp.where(only, 0.0, -jnp.inf), x)


def _logsum(x: Float[Array, "rows n"]) -> Float[Array, " rows"]:
    return jax.nn.logsumexp(x, axis=-1)


def _count(history: History, ids: Int[Array, "rows candidates"]) -> _Counts:
    """Counts every context before every position."""
    rows = ids.shape[0]
    back = np.arange(1, MAX_NGRAM, dtype=np.int32)
    last = history.back(back)

    def count(counts: _Counts, positions: Int[Array, "rows block"]) -> _Counts:
        tokens = history.at(positions)
        before = history.at(positions[:, :, None] - jnp.asarray(back)[None, None])
        same = (before == last[:, None]) & (last[:, None] >= 0)
        # The matching context ends before the first token that differs.
        lengths = jnp.arange(MAX_NGRAM, dtype=jnp.int32)[None, None]
        length = jnp.min(jnp.where(same, MAX_NGRAM, lengths[..., :-1]), axis=-1, keepdims=True)
        contexts = ((lengths <= length) & (tokens >= 0)[:, :, None]).astype(jnp.float32)
        by = (tokens[:, :, None] == ids[:, None]).astype(jnp.float32)
        # Sums of zeros and ones, exact in any order.
        new = jnp.einsum("rbc,rbi->rci", contexts, by, precision=lax.Precision.HIGHEST)
        followed = jnp.sum(contexts, axis=1)
        return _Counts(
            counts.followed + followed.astype(jnp.int32), counts.by + new.astype(jnp.int32)
        )

    none = _Counts(
        jnp.zeros((rows, MAX_NGRAM), jnp.int32),
        jnp.zeros((rows, MAX_NGRAM, ids.shape[1]), jnp.int32),
    )
    return history.fold(count, none)


def _predicted(
    counts: _Counts, metadata: SamplingMetadata, history: History
) -> Float[Array, "rows candidates"]:
    """Computes the smoothed n-gram model: from the longest context on, each takes a share.

    A context that the candidate never followed takes none. The last occurrence of a context, at
    the end, is followed by nothing yet, and counts nonetheless.
    """
    by = counts.by.astype(jnp.float32)
    followed = counts.followed.astype(jnp.float32)[:, :, None]
    size = jnp.arange(MAX_NGRAM, dtype=jnp.int32)[None, :, None]
    n, beta = (
        part[:, None, None] for part in (metadata.column("fsd_n"), metadata.column("fsd_beta"))
    )
    enough = history.lengths[:, None, None] >= n - 1
    use = (by > 0) & (size < n) & enough
    longer = (size < jnp.swapaxes(size, 1, 2)).astype(jnp.float32)
    before = jnp.einsum("sl,rlc->rsc", longer[0], use.astype(jnp.float32), precision="highest")
    share = jnp.where(size > 0, beta * by / (followed + 1), by / jnp.maximum(followed, 1))
    return jnp.sum(jnp.where(use, (1 - beta) ** before * share, 0.0), axis=1)
