"""Attention over caches of every kind: the kernel in interpret mode, and plain XLA, by NumPy's."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.attention import Alibi, attend, with_sinks
from kernels_pallas.kept import Kept
from tests.kernels_pallas.helpers import KINDS, kept
from tests.reference import numpy_cache

run = functools.partial(jax.jit, static_argnames=("scale", "softcap", "backend", "interpret"))(
    attend
)
BACKENDS = pytest.mark.parametrize("backend", ["triton", "xla"])


def expected(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    sees: np.ndarray,
    positions: np.ndarray,
    *,
    scale: float,
    softcap: float | None = None,
    slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Attention by definition, of k and v [batch, kv_heads, length, dim]."""
    group = q.shape[2] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("bthd,bhld->bthl", q, k) * scale
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    if slopes is not None:
        distance = positions[:, :, None] - np.arange(k.shape[2])
        scores -= slopes[:, None] * distance[:, :, None]
    weights = np.where(sees[:, :, None], np.exp(np.where(sees[:, :, None], scores, 0)), 0)
    total = weights.sum(-1) + (0 if sinks is None else np.exp(sinks))
    return np.einsum("bthl,bhld->bthd", weights, v) / total[..., None]


def spoilt(part: Kept, needed: np.ndarray) -> Kept:
    """All that is not needed [slots, length] made NaN, and codes random."""
    rng = np.random.default_rng(3)

    def spoil(array: Any) -> jax.Array:
        array = np.asarray(array)
        if array.dtype == np.uint32:
            bad = rng.integers(0, 1 << 32, array.shape).astype(np.uint32)
        else:
            bad = np.full(array.shape, np.nan, array.dtype)
        return jnp.asarray(np.where(needed[:, None, :, None], array, bad))

    return jax.tree.map(spoil, part)


def _f32(x: np.ndarray) -> jax.Array:
    return jnp.asarray(x, jnp.float32)


def check(
    kinds: tuple[str, str | None],
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (64, 64),
    tokens: int = 1,
    length: int = 300,
    ends: tuple[int, ...] = (290, 9),
    window: int | None = None,
    softcap: float | None = None,
    alibi: bool = False,
    sinks: bool = False,
    tree: bool = False,
    dtype: Any = jnp.bfloat16,
    backend: str = "triton",
    interpret: bool = True,
) -> None:
    """Holds one shape to NumPy's; a sequence's newest tokens are the queries.

    Args:
        kinds: of keys and of values; None: the keys are the values too.
        heads: query heads, and those of keys.
        dims: of keys and of values.
        ends: tokens of each sequence, the new ones included.
        tree: a query sees a random part of the newest tokens.
    """
    rng = np.random.default_rng(0)
    scale = 2 * dims[0] ** -0.5
    batch, slots = len(ends), len(ends) + 1
    which = np.arange(batch, 0, -1, dtype=np.int32)
    normal = rng.standard_normal
    keys = kept(kinds[0], normal((slots, heads[1], length, dims[0])) + 0.5)
    values = (
        keys if kinds[1] is None else kept(kinds[1], normal((slots, heads[1], length, dims[1])))
    )
    q = jnp.asarray(normal((batch, tokens, heads[0], dims[0])), dtype)
    slopes = np.abs(normal(heads[0])) / 10 if alibi else None
    sink = normal(heads[0]) if sinks else None

    end = np.asarray(ends, np.int32)[:, None]
    positions = end - tokens + np.arange(tokens, dtype=np.int32)
    last = np.broadcast_to(end - 1, positions.shape) if tree else positions
    low = np.zeros_like(positions) if window is None else positions - window + 1
    place = np.arange(length)
    sees = (place >= low[..., None]) & (place <= last[..., None])
    needed = np.zeros((slots, length), bool)
    needed[which] = sees.any(axis=1)
    nodes = np.tril(rng.integers(0, 2, (batch, tokens, tokens)) > 0) | np.eye(tokens, dtype=bool)
    if tree:
        for b, e in enumerate(ends):
            sees[b, :, e - tokens : e] &= nodes[b]

    part = run(
        q,
        spoilt(keys, needed),
        None if kinds[1] is None else spoilt(values, needed),
        jnp.asarray(which),
        jnp.asarray(low),
        jnp.asarray(last),
        scale=scale,
        softcap=softcap,
        alibi=None if slopes is None else Alibi(_f32(slopes), jnp.asarray(positions)),
        tree=jnp.asarray(nodes) if tree else None,
        backend=backend,
        interpret=interpret,
    )
    out = np.asarray(with_sinks(part, None if sink is None else _f32(sink)))
    k, v = (np.asarray(each.decoded(), np.float64)[which] for each in (keys, values))
    exact = np.asarray(q, np.float64)
    changes: dict[str, Any] = {"scale": scale, "softcap": softcap, "slopes": slopes, "sinks": sink}
    wanted = expected(exact, k, v, sees, positions, **changes)
    assert out.shape == wanted.shape
    # Of the type in which products are; f16's is that of codes too.
    coarse = any(kind == "bf16" for kind in kinds)
    fine = backend == "xla" or set(kinds) <= {"f32", None}
    tolerance = 1e-5 if fine else 1e-2 if coarse else 4e-3
    np.testing.assert_allclose(out, wanted, atol=tolerance, rtol=tolerance)


@BACKENDS
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str, backend: str) -> None:
    check((kind, kind), backend=backend)
    everything: dict[str, Any] = {"window": 70, "softcap": 5.0, "alibi": True, "sinks": True}
    check((kind, kind), heads=(20, 1), dims=(96, 32), tokens=3, backend=backend, **everything)


@BACKENDS
@pytest.mark.parametrize("kinds", [("f16", "q8"), ("q3.5", "bf16"), ("q8", "q4"), ("f32", "q2")])
def test_keys_and_values_of_other_kinds_and_widths(kinds: tuple[str, str], backend: str) -> None:
    check(kinds, dims=(48, 192), tokens=5, tree=True, backend=backend)


@BACKENDS
@pytest.mark.parametrize("kind", ["f32", "bf16", "q8", "q3.5"])
def test_keys_that_are_the_values_too(kind: str, backend: str) -> None:
    """As in latent attention; 288 wide, so in several tiles."""
    check((kind, None), heads=(16, 1), dims=(288, 288), tokens=2, backend=backend)


@BACKENDS
@pytest.mark.parametrize("dim", [16, 40, 80, 100, 160])
def test_odd_widths_of_codes(dim: int, backend: str) -> None:
    """A last column that is not full, and columns that are no power of two."""
    check(("q4", "q6"), dims=(dim, dim + 3), backend=backend)


@pytest.mark.parametrize("kind", ["f16", "q5"])
@pytest.mark.parametrize("window", [None, 40])
def test_many_tokens(kind: str, window: int | None) -> None:
    """Several tiles of queries; the early ones see less."""
    check((kind, kind), heads=(3, 1), tokens=90, window=window, ends=(250, 90))


@pytest.mark.parametrize("ends", [(64,), (65,), (300,), (1,)])
def test_edges_of_steps_and_parts(ends: tuple[int, ...]) -> None:
    check(("f16", "q3"), ends=ends)
    check(("f32", "f32"), ends=ends, window=64)
    check(("bf16", "bf16"), length=1100, ends=(ends[0] + 700,), window=650)


@settings(max_examples=8)
@given(data=st.data())
def test_anything_together(data: st.DataObject) -> None:
    draw = data.draw
    kinds = draw(st.sampled_from(KINDS), "keys"), draw(st.sampled_from([*KINDS, None]), "values")
    dims = tuple(
        draw(st.integers(1, 8)) * 16
        if kind in ("f32", "bf16", "f16")
        else draw(st.integers(1, 140))
        for kind in (kinds[0], kinds[1] or kinds[0])
    )
    tokens, kv_heads = draw(st.sampled_from([1, 2, 7]), "tokens"), draw(st.integers(1, 2), "heads")
    check(
        kinds,
        heads=(kv_heads * draw(st.integers(1, 9), "group"), kv_heads),
        dims=(dims[0], dims[0] if kinds[1] is None else dims[1]),
        tokens=tokens,
        ends=tuple(draw(st.lists(st.integers(tokens, 300), min_size=1, max_size=2), "ends")),
        window=draw(st.one_of(st.none(), st.integers(1, 100)), "window"),
        softcap=draw(st.sampled_from([None, 1.5]), "softcap"),
        alibi=draw(st.booleans(), "alibi"),
        sinks=draw(st.booleans(), "sinks"),
        tree=draw(st.booleans(), "tree"),
        dtype=draw(st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]), "dtype"),
    )


@BACKENDS
def test_a_query_that_sees_nothing_gets_zeros(backend: str) -> None:
    keys = kept("f16", np.ones((1, 1, 64, 16)))
    q = jnp.ones((1, 1, 2, 16), jnp.float16)
    low, last = jnp.full((1, 1), 5, jnp.int32), jnp.full((1, 1), 4, jnp.int32)
    slots = jnp.zeros((1,), jnp.int32)
    part = run(q, keys, None, slots, low, last, scale=1.0, backend=backend, interpret=True)
    np.testing.assert_array_equal(np.asarray(with_sinks(part)), 0)


@BACKENDS
def test_queries_that_fp16_does_not_hold(backend: str) -> None:
    """Rows of queries are scaled to it."""
    keys = kept("q8", np.random.default_rng(0).standard_normal((1, 1, 64, 32)))
    q = np.random.default_rng(1).standard_normal((1, 1, 2, 32)) * np.array([1e6, 1e-6])[:, None]
    zero = jnp.zeros((1,), jnp.int32)
    place = zero[None]
    for scale in (1e-6, 1e6):
        part = run(
            *(jnp.asarray(q, jnp.float32), keys, None, zero, place, place + 63),
            scale=scale,
            backend=backend,
            interpret=True,
        )
        k = np.asarray(keys.decoded(), np.float64)[0, 0]
        scores = q[0, 0] @ k.T * scale
        np.testing.assert_allclose(part.highest[0, 0], scores.max(axis=1), rtol=2e-3)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("q")])
def test_codes_are_what_the_cache_says(kind: str) -> None:
    """Against the definition; where float32 rounds otherwise, a number is a step off."""
    x = np.random.default_rng(0).standard_normal((2, 1, 50, 100)).astype(np.float32)
    got, wanted = np.asarray(kept(kind, x).decoded()), numpy_cache.kept(x.astype(np.float64), kind)
    assert np.mean(np.abs(got - wanted) > 1e-5) < 2e-3
    np.testing.assert_allclose(got, wanted, atol=2)
