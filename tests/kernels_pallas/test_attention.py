"""Decode attention: the kernel in interpret mode, and plain XLA, against NumPy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.attention import Kept, attend, decode, with_sinks

run = functools.partial(jax.jit, static_argnames=("scale", "softcap", "backend", "interpret"))(
    attend
)


def kept(kind: str, shape: tuple[int, ...], seed: int) -> Kept:
    """Random keys or values."""
    rng = np.random.default_rng(seed)
    if kind not in ("q8", "q4"):
        return Kept(jnp.asarray(rng.standard_normal(shape), kind))
    scales = rng.uniform(0.005, 0.02, (*shape[:-1], shape[-1] // 32)).astype(np.float16)
    if kind == "q8":
        return Kept(jnp.asarray(rng.integers(-127, 128, shape), jnp.int8), jnp.asarray(scales))
    codes = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2))
    return Kept(jnp.asarray(codes, jnp.uint8), jnp.asarray(scales) * jnp.float16(16))


def expected(
    q: np.ndarray,
    keys: Kept,
    values: Kept,
    slots: np.ndarray,
    sees: np.ndarray,
    scale: float,
    softcap: float | None,
    sinks: np.ndarray,
) -> np.ndarray:
    """Attention by definition; sees [batch, tokens, keys]."""
    k, v = (np.asarray(decode(part), np.float64)[slots] for part in (keys, values))
    group = q.shape[2] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("bthd,bhld->bthl", q, k) * scale
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    weights = np.where(sees[:, :, None], np.exp(scores), 0)
    total = weights.sum(-1) + np.exp(sinks)
    return np.einsum("bthl,bhld->bthd", weights, v) / total[..., None]


@pytest.mark.parametrize("backend", ["triton", "xla"])
@pytest.mark.parametrize(
    ("kinds", "heads", "kv_heads", "key_dim", "value_dim", "tokens", "softcap", "window", "tree"),
    [
        (("bfloat16", "bfloat16"), 4, 2, 32, 32, 1, None, None, False),
        (("float16", "q8"), 6, 1, 48, 64, 3, 5.0, 70, False),
        (("q4", "float16"), 2, 2, 64, 32, 1, None, 50, False),
        (("q8", "q4"), 20, 1, 64, 192, 5, None, None, True),
        (("float32", "float32"), 2, 2, 16, 16, 1, None, None, False),
    ],
)
def test_against_the_definition(
    backend: str,
    kinds: tuple[str, str],
    heads: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
    tokens: int,
    softcap: float | None,
    window: int | None,
    tree: bool,
) -> None:
    rng = np.random.default_rng(0)
    slots, length, batch = 3, 700, 2
    keys = kept(kinds[0], (slots, kv_heads, length, key_dim), 1)
    values = kept(kinds[1], (slots, kv_heads, length, value_dim), 2)
    q = np.asarray(jnp.asarray(rng.standard_normal((batch, tokens, heads, key_dim)), jnp.bfloat16))
    sinks = rng.standard_normal(heads).astype(np.float32)
    which = np.asarray([2, 0], np.int32)
    ends = np.asarray([650, 9], np.int32)

    # What lies beyond a sequence's end must not matter, whatever it is.
    for row, end in zip(which, ends, strict=True):
        keys = jax.tree.map(lambda a, row=row, end=end: _spoilt(a, row, end), keys)
        values = jax.tree.map(lambda a, row=row, end=end: _spoilt(a, row, end), values)

    positions = ends[:, None] - tokens + np.arange(tokens, dtype=np.int32)[None]
    last = np.broadcast_to(ends[:, None] - 1, positions.shape) if tree else positions
    low = np.zeros_like(positions) if window is None else positions - window + 1
    place = np.arange(length)
    sees = (place >= low[..., None]) & (place <= last[..., None])
    nodes = np.tril(rng.integers(0, 2, (batch, tokens, tokens)) > 0) | np.eye(tokens, dtype=bool)
    if tree:
        for b, end in enumerate(ends):
            sees[b, :, end - tokens : end] &= nodes[b]

    part = run(
        jnp.asarray(q),
        keys,
        values,
        jnp.asarray(which),
        jnp.asarray(low),
        jnp.asarray(last),
        scale=0.3,
        softcap=softcap,
        tree=jnp.asarray(nodes) if tree else None,
        backend=backend,
        interpret=True,
    )
    out = np.asarray(with_sinks(part, jnp.asarray(sinks)))
    q64 = q.astype(np.float64)
    wanted = expected(q64, _clean(keys), _clean(values), which, sees, 0.3, softcap, sinks)
    np.testing.assert_allclose(out, wanted, atol=1.5e-2 if kinds[0] == "bfloat16" else 3e-3)


def _spoilt(part: jax.Array, row: int, end: int) -> jax.Array:
    bad = jnp.nan if jnp.issubdtype(part.dtype, jnp.floating) else 77
    return part.at[row, :, end:].set(jnp.asarray(bad).astype(part.dtype))


def _clean(part: Kept) -> Kept:
    return jax.tree.map(jnp.nan_to_num, part)


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    keys = values = kept("float16", (1, 1, 64, 16), 3)
    q = jnp.ones((1, 1, 2, 16), jnp.float16)
    low, last = jnp.full((1, 1), 5, jnp.int32), jnp.full((1, 1), 4, jnp.int32)
    slots = jnp.zeros((1,), jnp.int32)
    for backend in ("triton", "xla"):
        part = run(q, keys, values, slots, low, last, scale=1.0, backend=backend, interpret=True)
        np.testing.assert_array_equal(np.asarray(with_sinks(part)), 0)
