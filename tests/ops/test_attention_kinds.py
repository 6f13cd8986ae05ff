"""Caches of every kind under attention: XLA's operations and the custom call do the same."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array
from numpy.testing import assert_allclose

from jinfer.cpu import attention as custom
from jinfer.cpu import build
from jinfer.ops.attention import attend, attend_reference, attend_xla, extend, extend_xla
from jinfer.ops.cache import CacheShape, LayerCache, empty, nbytes, write
from jinfer.ops.score_rules import ScoreRules
from jinfer.quant.format import FORMATS
from jinfer.quant.kind import parse_kind
from jinfer.quant.pack import unpack
from jinfer.quant.vectors import QuantizedVectors
from tests.reference.numpy_blocks import Floats
from tests.reference.numpy_blocks import attention as numpy_attention
from tests.reference.numpy_cache import kept

KINDS = ["f32", "bf16", "f16", *FORMATS]
CALLS = pytest.mark.skipif(not build.available(), reason="no C++ compiler")
FORMS = pytest.mark.parametrize("form", [pytest.param(extend, marks=CALLS), extend_xla])
SCALE = 0.3


def random(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).normal(size=shape)


def f32(x: Floats) -> Array:
    return jnp.asarray(x, jnp.float32)


def run(
    form: Any,
    q: Floats,
    k: Floats,
    v: Floats | None,
    cache: LayerCache,
    starts: list[int],
    slot: int = 0,
    **rules: Any,
) -> tuple[np.ndarray, LayerCache]:
    """New tokens [batch, tokens, heads, dim], row b at starts[b] and after."""
    at = np.array(starts, np.int32)[:, None] + np.arange(q.shape[1], dtype=np.int32)

    @jax.jit
    def step(q: Array, k: Array, v: Array | None, cache: LayerCache, at: Array, slot: Array) -> Any:
        return form(q, k, v, cache, at, slot, ScoreRules(SCALE, **rules))

    new = (f32(q), f32(k), None if v is None else f32(v))
    out, cache = step(*new, cache, jnp.asarray(at), jnp.int32(slot))
    return np.asarray(out), cache


def filled(kind: str, keys: Floats, values: Floats) -> LayerCache:
    """A cache of [slots, tokens, heads, dim]."""
    slots, length, heads, dim = keys.shape
    shape = CacheShape(heads, dim, values.shape[3])
    cache = empty({"a": shape}, slots, length, 0, parse_kind(kind))["a"]
    return write(cache, f32(keys), f32(values), jnp.zeros(slots, jnp.int32), jnp.int32(0))


@FORMS
@pytest.mark.parametrize("kind", ["f32", "f16", "q8", "q4", "q3.5"])
def test_against_numpy(form: Any, kind: str) -> None:
    """What the cache keeps of keys and values, by its definition, attended by NumPy's."""
    keys, values = random(1, 3, 70, 2, 40), random(2, 3, 70, 2, 24)
    q, k, v = random(3, 2, 3, 6, 40), random(4, 2, 3, 2, 40), random(5, 2, 3, 2, 24)
    starts, slot = [60, 7], 1
    got, _ = run(form, q, k, v, filled(kind, keys, values), starts, slot)
    # Where float32 and float64 round a number to neighbouring codes, it is a step of few bits.
    tolerance = 1e-5 if kind[0] == "f" else 0.02
    for b, start in enumerate(starts):
        whole_keys, whole_values = (
            kept(np.concatenate([old[slot + b, :start], new[b]]), kind)
            for old, new in ((keys, k), (values, v))
        )
        wanted = numpy_attention(q[b], whole_keys, whole_values, SCALE)
        assert_allclose(got[b], wanted, atol=tolerance)
        assert np.sqrt(np.mean((got[b] - wanted) ** 2)) < tolerance / 5


@pytest.mark.parametrize("kind", ["q3.5"])
def test_the_definition_on_a_quantized_cache(kind: str) -> None:
    cache = filled(kind, random(1, 2, 300, 2, 32), random(2, 2, 300, 2, 32))
    at = jnp.array([[280]], jnp.int32)
    arguments = f32(random(3, 1, 1, 4, 32)), *cache, at, at, jnp.int32(1), ScoreRules(SCALE)
    wanted = attend_reference(*arguments)
    for form in (attend, attend_xla):
        assert_allclose(form(*arguments), wanted, atol=2e-6)


def decoded(rows: Any) -> Floats:
    """What the arrays of a cache say, by NumPy."""
    if not isinstance(rows, QuantizedVectors):
        return np.asarray(rows, np.float64)
    format, lead = rows.format, rows.words.shape[:-1]
    codes = unpack(np.asarray(rows.words).reshape(*lead, -1, format.code_bits), format.code_bits)
    if format.per_code == 2:
        codes = np.stack([codes // format.levels, codes % format.levels], axis=-2)
    q = codes.reshape(*lead, -1, 32).astype(np.float64)
    scale, *base = np.moveaxis(
        np.asarray(rows.scales, np.float64).reshape(*lead, -1, format.numbers), -1, 0
    )
    whole = (q + (0 if base else -format.zero)) * scale[..., None]
    whole = whole + base[0][..., None] if base else whole
    return whole.reshape(*lead, -1)[..., : rows.width]


def attention(q: Floats, k: Floats, v: Floats, at: int, head: int, rules: Any) -> Floats:
    """One query of one head over all keys [keys, dim] that it sees, by the definition."""
    first = max(0, at - rules.get("window", at + 1) + 1)
    seen = slice(first, at + 1)
    scores = SCALE * k[seen] @ q
    if cap := rules.get("softcap"):
        scores = cap * np.tanh(scores / cap)
    if "slopes" in rules:
        scores -= float(rules["slopes"][head]) * (at - np.arange(first, at + 1))
    sink = np.exp(float(rules["sinks"][head])) if "sinks" in rules else 0.0
    return np.exp(scores) @ v[seen] / (np.exp(scores).sum() + sink)


@CALLS
@settings(max_examples=30)
@given(data=st.data())
def test_the_call_against_numpy(data: st.DataObject) -> None:
    """Any kind, heads, widths, lengths, windows, caps, sinks and slopes, on any instructions."""
    draw = data.draw
    kind = draw(st.sampled_from(KINDS), "kind")
    kv_heads, group = draw(st.integers(1, 3), "kv_heads"), draw(st.integers(1, 8), "group")
    dim, value_dim = draw(st.integers(1, 70), "dim"), draw(st.integers(1, 70), "value_dim")
    tokens = draw(st.sampled_from([1, 2, 4, 40]), "tokens")
    length = tokens + draw(st.sampled_from([0, 5, 300, 900]), "more")
    starts = draw(st.lists(st.integers(0, length - tokens), min_size=1, max_size=2), "starts")
    batch, heads, slot = len(starts), kv_heads * group, 1
    rules: dict[str, Any] = {}
    if draw(st.booleans(), "window"):
        rules["window"] = draw(st.integers(1, 100), "size")
    if draw(st.booleans(), "softcap"):
        rules["softcap"] = 1.5
    if draw(st.booleans(), "sinks"):
        rules["sinks"] = f32(random(6, heads))
    if draw(st.booleans(), "slopes"):
        rules["slopes"] = f32(np.abs(random(7, heads)) / 10)
    shared = draw(st.booleans(), "shared")
    shape = CacheShape(kv_heads, dim, 0 if shared else value_dim)
    cache = empty({"a": shape}, batch + 1, length, 0, parse_kind(kind))["a"]
    with build.lowered_isa(draw(st.sampled_from(build.ISAS), "isa")):
        old = random(1, batch, length, heads, dim), random(2, batch, length, kv_heads, dim)
        v = None if shared else random(3, batch, length, kv_heads, value_dim)
        _, cache = run(extend, *old, v, cache, [0] * batch, slot)
        q, k = random(4, batch, tokens, heads, dim), random(5, batch, tokens, kv_heads, dim)
        v = None if shared else random(6, batch, tokens, kv_heads, value_dim)
        got, cache = run(extend, q, k, v, cache, starts, slot, **rules)
    keys = decoded(cache.keys)
    values = keys if shared else decoded(cache.values)
    name = "f16" if kind == "bf16" else kind
    for b, start in enumerate(starts):
        here = slice(start, start + tokens)
        wanted = kept(k[b], name).swapaxes(0, 1)
        rest = keys[slot + b, :, here] - wanted
        assert np.sqrt(np.mean(rest**2)) <= (0.01 if kind == "bf16" else 0.002)
        for head in range(heads):
            for t in {0, tokens - 1}:
                kv = keys[slot + b, head // group], values[slot + b, head // group]
                wanted = attention(q[b, t, head], *kv, start + t, head, rules)
                assert_allclose(got[b, t, head], wanted, atol=1e-5, rtol=1e-5)


@CALLS
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("kind", ["f32", "bf16", "q8"])
def test_queries_of_other_types(dtype: Any, kind: str) -> None:
    cache = filled(kind, random(1, 1, 80, 2, 64), random(2, 1, 80, 2, 64))
    q = jnp.asarray(random(3, 1, 9, 4, 64), dtype)
    at = jnp.arange(60, 69, dtype=jnp.int32)[None]
    got = attend(q, *cache, at, at, jnp.int32(0), ScoreRules(SCALE))
    wanted = attend(q.astype(jnp.float32), *cache, at, at, jnp.int32(0), ScoreRules(SCALE))
    assert got.dtype == dtype
    assert_allclose(np.asarray(got, np.float32), wanted, atol=2e-3, rtol=2**-8)


@FORMS
@pytest.mark.parametrize("kind", ["f16", "q3.5"])
def test_a_prompt_in_chunks_is_the_prompt(form: Any, kind: str) -> None:
    q, k, v = random(1, 1, 200, 4, 32), random(2, 1, 200, 2, 32), random(3, 1, 200, 2, 32)
    cache = filled(kind, np.zeros((1, 256, 2, 32)), np.zeros((1, 256, 2, 32)))
    whole, after = run(form, q, k, v, cache, [0])
    parts = []
    for start, end in ((0, 120), (120, 199), (199, 200)):
        chunk = slice(start, end)
        part, cache = run(form, q[:, chunk], k[:, chunk], v[:, chunk], cache, [start])
        parts.append(part)
    assert_allclose(np.concatenate(parts, axis=1), whole, atol=2e-6)
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(after), strict=True):
        assert np.array_equal(a, b)


@FORMS
@pytest.mark.parametrize("kind", ["f32", "q8", "q4"])
def test_what_is_not_there_is_not_read(form: Any, kind: str) -> None:
    """All that no token has written is NaN: other slots too."""
    cache = filled(kind, np.zeros((3, 600, 1, 32)), np.zeros((3, 600, 1, 32)))
    nan = jax.tree.map(lambda x: x if x.dtype == jnp.uint32 else jnp.full_like(x, jnp.nan), cache)
    new = random(1, 1, 512, 2, 32), random(2, 1, 512, 1, 32), random(3, 1, 512, 1, 32)
    got, _ = run(form, *new, cache, [0], 1)
    assert np.isfinite(got).all()
    if form is extend:  # the other reads whole blocks of keys
        poisoned, _ = run(form, *new, nan, [0], 1)
        assert np.array_equal(poisoned, got)


@CALLS
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_a_row_does_not_depend_on_its_neighbours(tokens: int) -> None:
    """To the bit, also where the walk over its keys is cut into parts."""
    cache = filled("f16", random(1, 3, 1500, 1, 32), random(2, 3, 1500, 1, 32))
    new = random(3, 3, tokens, 4, 32), random(4, 3, tokens, 1, 32), random(5, 3, tokens, 1, 32)
    together, _ = run(extend, *new, cache, [1300, 40, 700])
    q, k, v = (x[2:] for x in new)
    alone, _ = run(extend, q, k, v, cache, [700], 2)
    assert np.array_equal(together[2], alone[0])


@FORMS
@pytest.mark.parametrize("kind", ["f16", "q8", "q3.5"])
def test_the_cache_stays_where_it_is(form: Any, kind: str) -> None:
    """A decoding step of two layers: no second cache, and no decoded one."""
    shape = CacheShape(2, 64, 64)
    caches = empty({"a": shape, "b": shape}, 2, 4096, 0, parse_kind(kind))

    def step(caches: dict[str, LayerCache], x: Array, at: Array) -> tuple[Any, Array]:
        after = {}
        for name, cache in caches.items():
            x, after[name] = form(x, x, x, cache, at, jnp.int32(0), ScoreRules(SCALE))
        return after, x

    x, at = jnp.ones((2, 1, 2, 64)), jnp.array([[3], [4000]], jnp.int32)
    program = jax.jit(step, donate_argnums=0).lower(caches, x, at).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == nbytes(caches)
    assert memory.temp_size_in_bytes < (2 << 20 if form is extend_xla else 1 << 16)
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(caches)]
    after, _ = program(caches, x, at)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after)] == places


def test_without_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom, "register", lambda symbol: False)
    cache = filled("q8", random(1, 1, 20, 1, 8), random(2, 1, 20, 1, 8))
    new = random(3, 1, 2, 2, 8), random(4, 1, 2, 1, 8), random(5, 1, 2, 1, 8)
    assert np.array_equal(run(extend, *new, cache, [9])[0], run(extend_xla, *new, cache, [9])[0])
    at = jnp.array([[5]], jnp.int32)
    arguments = f32(new[0][:, :1]), *cache, at, at, jnp.int32(0), ScoreRules(SCALE)
    assert np.array_equal(attend(*arguments), attend_xla(*arguments))
