"""Attentions are part of chains, and compute the bits that calls of their own compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.cpu import build_library
from jinfer.cpu.isa import Isa
from jinfer.ops.attention.kv_cache import AttentionMetadata, LayerCache
from jinfer.ops.attention.mask_rules import ScoreRules
from jinfer.ops.attention.paged_attention import attend, extend
from jinfer.ops.fusion.fuse_cpu import FusedFunction, fuse_operations
from jinfer.ops.fusion.weight_pointers import WeightPointers, table
from jinfer.ops.matmul.matmul import linear, linears
from jinfer.ops.norm import normalize
from tests.arrays import on_device
from tests.cpu.helpers import every_isa
from tests.cpu.test_quantized_matmul import matrix
from tests.ops.paged import Run, filled, placed, random, tables_of
from tests.ops.test_fuse_cpu import FORMAT, SCALE, SIZE, calls, feed_forward, norm

pytestmark = pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")

HEADS, KV_HEADS, DIM = 4, 2, 16
W: dict[str, Any] = {
    name: matrix(FORMAT, outputs, inputs, seed=seed)
    for seed, (name, outputs, inputs) in enumerate(
        [
            ("q", HEADS * DIM, SIZE),
            ("k", KV_HEADS * DIM, SIZE),
            ("v", KV_HEADS * DIM, SIZE),
            ("o", SIZE, HEADS * DIM),
            ("gate", 192, SIZE),
            ("up", 192, SIZE),
            ("down", SIZE, 192),
        ]
    )
}
PLAIN = ScoreRules(0.3)


class Batch(NamedTuple):
    """Tokens of a flat batch, and the lengths of the sequences that they are of."""

    runs: list[Run]
    lengths: list[int]


BATCHES = {
    # Whoever computes a tile writes its tokens.
    "one token": Batch([Run(0, 9)], [10]),
    "one token each": Batch([Run(0, 9), Run(-1, 0, 2), Run(1, 70), Run(2, 0)], [10, 71, 1]),
    "only padding": Batch([Run(-1, 0, 4)], [3]),
    # Written first, in a stage of their own.
    "prompts": Batch([Run(0, 3, 20), Run(1, 60, 40), Run(-1, 0, 4)], [23, 100]),
    # Cut into parts that threads share, of which some are merged.
    "a long sequence": Batch([Run(0, 2990), Run(1, 5)], [2991, 6]),
    "a long prompt": Batch([Run(0, 2300, 70), Run(-1, 0, 2)], [2370]),
}
RULES: dict[str, tuple[ScoreRules, ScoreRules]] = {
    "plain": (PLAIN, PLAIN),
    "windows that differ": (PLAIN._replace(window=40), PLAIN),
    "sinks and a cap": (
        PLAIN._replace(sinks=jnp.linspace(-1, 1, HEADS), softcap=5.0),
        PLAIN._replace(softcap=9.0),
    ),
    "slopes": (PLAIN._replace(slopes=jnp.linspace(0.1, 0.5, HEADS)), PLAIN),
}

type Caches = tuple[LayerCache, LayerCache]


def cache(kind: str, batch: Batch, tables: np.ndarray, seed: int) -> LayerCache:
    """With sequences in it; in the places of the batch's tokens stand others."""
    shape = [(length, KV_HEADS, DIM) for length in batch.lengths]
    keys = [random(seed + i, *each) for i, each in enumerate(shape)]
    values = [random(seed + 50 + i, *each) for i, each in enumerate(shape)]
    return filled(kind, keys, values, tables)


def layer(
    x: jax.Array, cache: LayerCache, at: AttentionMetadata, rules: ScoreRules
) -> tuple[jax.Array, LayerCache]:
    """As a decoder's, with norms of heads."""
    q, k, v = linears(norm(x), [W["q"], W["k"], W["v"]], [None] * 3)
    q, k, v = (part.reshape(*x.shape[:2], -1, DIM) for part in (q, k, v))
    q = normalize(q, on_device(SCALE[:DIM]), eps=1e-5)
    out, cache = extend(q[0], k[0], v[0], cache, at, rules)
    x = x + linear(out[None].reshape(*x.shape[:2], -1), W["o"])
    return x + feed_forward(norm(x), W), cache


def layers(of: tuple[ScoreRules, ScoreRules]) -> Callable[..., tuple[jax.Array, Caches]]:
    def run(x: jax.Array, caches: Caches, at: AttentionMetadata) -> tuple[jax.Array, Caches]:
        x, first = layer(x, caches[0], at, of[0])
        x, second = layer(x, caches[1], at, of[1])
        return x, (first, second)

    return run


def given(batch: Batch, kind: str) -> tuple[jax.Array, Caches, AttentionMetadata]:
    tables = tables_of(batch.lengths)
    at = placed(batch.runs, tables)
    x = on_device(random(7, 1, len(at.rows), SIZE), jnp.float32)
    return x, (cache(kind, batch, tables, 1), cache(kind, batch, tables, 9)), at


def assert_same(function: Callable[..., Any], arguments: Any) -> None:
    assert_equal(jax.jit(fuse_operations(function))(*arguments), jax.jit(function)(*arguments))


def assert_equal(got: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8", "q4", "q3.5"])
@pytest.mark.parametrize("batch", BATCHES)
def test_calls_and_bits(batch: str, kind: str) -> None:
    """Two layers are one call, for any cache and any cut of attention."""
    function, arguments = layers(RULES["plain"]), given(BATCHES[batch], kind)
    assert calls(lambda x: fuse_operations(function)(x, *arguments[1:]), arguments[0]) == {
        "jinfer_fused_layers": 1
    }
    assert_same(function, arguments)


@pytest.mark.parametrize("isa", every_isa())
@pytest.mark.parametrize("rules", RULES)
def test_rules_of_each_layer(rules: str, isa: Isa) -> None:
    """Those that see other keys are cut in another way, in the same call."""
    with build_library.lowered_isa(isa):
        for batch in ("one token each", "prompts", "a long sequence"):
            assert_same(layers(RULES[rules]), given(BATCHES[batch], "f16"))


def test_keys_that_are_values() -> None:
    batch = BATCHES["one token each"]
    tables = tables_of(batch.lengths)
    keys = [random(3 + i, length, KV_HEADS, DIM) for i, length in enumerate(batch.lengths)]
    pool, at = filled("f16", keys, None, tables), placed(batch.runs, tables)

    def function(x: jax.Array, pool: LayerCache) -> tuple[jax.Array, LayerCache]:
        q, k = linears(norm(x), [W["q"], W["k"]], [None] * 2)
        q, k = (part.reshape(len(at.rows), -1, DIM) for part in (q, k))
        out, pool = extend(q, k, None, pool, at, PLAIN)
        return x + linear(out.reshape(x.shape), W["o"]), pool

    x = on_device(random(7, 1, len(at.rows), SIZE), jnp.float32)
    assert calls(lambda x: fuse_operations(function)(x, pool), x) == {"jinfer_fused_layers": 1}
    assert_same(function, (x, pool))


def test_attention_to_another_layers_keys() -> None:
    """A later layer that only looks at what an earlier one has written comes after its call."""
    x, (pool, _), at = given(BATCHES["one token each"], "f16")

    def function(x: jax.Array, pool: LayerCache) -> tuple[jax.Array, LayerCache]:
        x, pool = layer(x, pool, at, PLAIN)
        q = linear(norm(x), W["q"]).reshape(len(at.rows), HEADS, DIM)
        out = attend(q, pool.keys, pool.values, at, at.positions, PLAIN)
        return x + linear(out.reshape(x.shape), W["o"]), pool

    assert calls(lambda x: fuse_operations(function)(x, pool), x) == {"jinfer_fused_layers": 2}
    assert_same(function, (x, pool))


def test_earlier_reader_sees_the_old_pool() -> None:
    """Who reads a pool that another attention of the call writes to sees what was there before."""
    x, (pool, _), at = given(BATCHES["one token each"], "f16")
    weights = jax.device_put([W["q"], W["o"]])
    shown = WeightPointers(table(jax.tree.leaves(weights)), range(len(jax.tree.leaves(weights))))

    def function(w: Any, x: jax.Array, pool: LayerCache) -> tuple[jax.Array, LayerCache]:
        after, written = layer(x, pool, at, PLAIN)
        q = linear(norm(x), w[0]).reshape(len(at.rows), HEADS, DIM)
        out = attend(q, pool.keys, pool.values, at, at.positions, PLAIN)
        return after + linear(out.reshape(x.shape), w[1]), written

    def rewritten(*given: Any) -> Any:
        return fuse_operations(function, shown)(*given)

    assert calls(lambda x: rewritten(weights, x, pool), x) == {"jinfer_fused_layers": 1}
    for changed in (rewritten, fuse_operations(function)):
        assert_equal(jax.jit(changed)(weights, x, pool), jax.jit(function)(weights, x, pool))


def test_no_tokens() -> None:
    """Nothing is put together where there are no rows."""
    x = jnp.zeros((1, 0, SIZE), jnp.float32)
    assert fuse_operations(lambda x: x + linear(norm(x), W["o"]))(x).shape == x.shape


def test_transposed_axes_are_not_fused() -> None:
    def function(x: jax.Array) -> jax.Array:
        y = linear(norm(x), W["o"])
        return x + linear(jax.lax.reshape(y, x.shape, dimensions=(2, 1, 0)), W["o"])

    x = on_device(random(7, 1, 3, SIZE), jnp.float32)
    assert calls(fuse_operations(function), x) == {"jinfer_fused_layers": 2}
    assert_same(function, (x,))


def test_partial_attention_is_not_fused() -> None:
    far = PLAIN._replace(by_distance=jnp.ones((HEADS, 30)))
    x, caches, at = given(BATCHES["prompts"], "f16")
    function = layers((far, PLAIN))
    found = calls(lambda x: fuse_operations(function)(x, caches, at), x)
    assert found == {"jinfer_fused_layers": 2, "jinfer_attention": 1}
    assert_same(function, (x, caches, at))


def test_unused_operations_are_eliminated() -> None:
    x, caches, at = given(BATCHES["one token"], "f16")

    def first(x: jax.Array) -> jax.Array:
        out, _ = layers(RULES["plain"])(x, caches, at)
        linear(norm(out), W["q"])
        return out

    whole = FusedFunction(layers(RULES["plain"]), (x, caches, at))
    assert len(FusedFunction(first, (x,))._plan.rows) == len(whole._plan.rows)


def test_slot_outside_the_pool_is_an_error() -> None:
    x, caches, at = given(BATCHES["one token each"], "f16")
    wrong = at._replace(tables=at.tables + 99)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"jinfer_fused_layers: token 0 .* pool"):
        jax.block_until_ready(jax.jit(fuse_operations(layers(RULES["plain"])))(x, caches, wrong))
