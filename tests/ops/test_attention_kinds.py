"""Caches of every kind under attention: all forms keep and read the same."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from numpy.testing import assert_allclose

from jinfer.cpu import build_library
from jinfer.cpu.isa import ISAS
from jinfer.ops.attention.kv_cache import (
    AttentionMetadata,
    CacheShape,
    LayerCache,
    nbytes,
    zero_cache,
)
from jinfer.ops.attention.mask_rules import ScoreRules
from jinfer.ops.attention.paged_attention import attend, extend
from jinfer.ops.attention.xla import attend_xla, extend_xla
from jinfer.quant_format import FORMATS, parse_cache_dtype
from tests.arrays import on_device
from tests.cpu.helpers import isas
from tests.ops.attention_reference import attend_reference
from tests.ops.paged import (
    SCALE,
    Run,
    decoded,
    expected,
    f32,
    filled,
    placed,
    random,
    sequences,
    tables_of,
    unwritten,
)
from tests.reference.numpy_blocks import Floats
from tests.reference.numpy_cache import kept

KINDS = ["f32", "bf16", "f16", *FORMATS]
# Every kind with one of the forms in turn, with and without values in turn; two with all four.
WHOLE = ("f32", "q3.5")
EACH = [
    pytest.param(
        form,
        kind,
        shared,
        marks=()
        if kind in WHOLE or (form is extend, shared) == (n % 2 == 0, n // 2 % 2 == 0)
        else pytest.mark.soak,
        id=f"{'latent' if shared else 'values'}-{kind}-{form.__name__}",
    )
    for n, kind in enumerate(KINDS)
    for form in (extend, extend_xla)
    for shared in (False, True)
]
FORMS = pytest.mark.parametrize("form", [extend, extend_xla])


@partial(jax.jit, static_argnames=("form", "softcap"))
def step(
    form: Any, q: Array, k: Array, v: Array | None, cache: Any, at: Any, softcap: float | None
) -> Any:
    return form(q, k, v, cache, at, ScoreRules(SCALE, softcap=softcap))


def run(
    form: Any,
    q: Floats,
    k: Floats,
    v: Floats | None,
    cache: LayerCache,
    at: AttentionMetadata,
    softcap: float | None = None,
) -> tuple[np.ndarray, LayerCache]:
    """New tokens [tokens, heads, dim] of a flat batch."""
    new = f32(q), f32(k), None if v is None else f32(v)
    out, cache = step(form, *new, cache, at, softcap)
    return np.asarray(out), cache


@FORMS
@pytest.mark.parametrize("kind", ["f32", "f16", "q8", "q4", "q3.5"])
def test_against_numpy(form: Any, kind: str) -> None:
    """What the cache keeps of keys and values, by its definition, attended by NumPy's."""
    starts, runs = [7, 60], [Run(1, 60, 3), Run(0, 7, 3)]
    keys = [random(i, n + 3, 2, 40) for i, n in enumerate(starts)]
    values = [random(10 + i, n + 3, 2, 24) for i, n in enumerate(starts)]
    tables = tables_of([n + 3 for n in starts])
    old_keys, old_values = ([x[:-3] for x in part] for part in (keys, values))
    cache = filled(kind, old_keys, old_values, tables)
    q, k, v = random(3, 6, 6, 40), *(np.concatenate([x[1][-3:], x[0][-3:]]) for x in (keys, values))
    got, _ = run(form, q, k, v, cache, placed(runs, tables))
    # Where float32 and float64 round a number to neighbouring codes, it is a step of few bits.
    tolerance = 1e-5 if kind[0] == "f" else 0.02
    keys, values = ([kept(x, kind) for x in part] for part in (keys, values))
    target = expected(q, keys, values, runs)
    assert_allclose(got, target, atol=tolerance)
    assert np.sqrt(np.mean((got - target) ** 2)) < tolerance / 5


@pytest.mark.parametrize(("form", "kind", "shared"), EACH)
def test_written_vectors_are_read_back(form: Any, kind: str, shared: bool) -> None:
    """Attention over what the arrays of the cache say, in float64; widths that fill no block."""
    lengths = [130, 5, 70]
    runs = [Run(1, 0, 5), Run(-1, 0, 2), Run(2, 69), Run(0, 100, 30)]
    tables, q = tables_of(lengths), random(1, 38, 6, 45)
    keys = [random(20 + i, n, 2, 45) for i, n in enumerate(lengths)]
    values = [random(30 + i, n, 2, 33) for i, n in enumerate(lengths)]
    old = filled(kind, keys, None if shared else values, tables)
    k, v = random(2, 38, 2, 45), None if shared else random(3, 38, 2, 33)
    got, after = run(form, q, k, v, old, placed(runs, tables), softcap=3.0)
    keys = sequences(after.keys, tables, lengths)
    values = keys if shared else sequences(after.values, tables, lengths)
    assert_allclose(got, expected(q, keys, values, runs, softcap=3.0), atol=1e-5, rtol=1e-5)
    # Exactly the new tokens' places have changed, to what they are rounded to.
    for row, start, count, t in ((1, 0, 5, 0), (2, 69, 1, 7), (0, 100, 30, 8)):
        rest = keys[row][start : start + count] - k[t : t + count]
        coarse = {"bf16": 0.01, "q2": 1.0, "q3": 0.4, "q3.5": 0.3, "q4": 0.2}.get(kind, 0.1)
        assert np.sqrt(np.mean(rest**2)) < (0.001 if kind in ("f32", "f16") else coarse)
    before = sequences(old.keys, tables, lengths)
    assert np.array_equal(keys[0][:100], before[0][:100])
    assert np.array_equal(keys[2][:69], before[2][:69])


@pytest.mark.parametrize("kind", ["q3.5"])
def test_the_definition_on_a_quantized_cache(kind: str) -> None:
    keys, values = [random(1, 290, 2, 32)], [random(2, 290, 2, 32)]
    tables = tables_of([290])
    cache, at = filled(kind, keys, values, tables), placed([Run(0, 280)], tables)
    arguments = f32(random(3, 1, 4, 32)), *cache[:2], at, at.positions, ScoreRules(SCALE)
    *arrays, rules = arguments
    target = jax.jit(partial(attend_reference, rules=rules))(*arrays)
    for form in (attend, attend_xla):
        assert_allclose(jax.jit(partial(form, rules=rules))(*arrays), target, atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("kind", ["f32", "bf16", "q8"])
def test_queries_of_other_types(dtype: Any, kind: str) -> None:
    tables = tables_of([80])
    cache = filled(kind, [random(1, 80, 2, 64)], [random(2, 80, 2, 64)], tables)
    q, at = on_device(random(3, 9, 4, 64), dtype), placed([Run(0, 60, 9)], tables)
    got = attend(q, *cache[:2], at, at.positions, ScoreRules(SCALE))
    target = attend(q.astype(jnp.float32), *cache[:2], at, at.positions, ScoreRules(SCALE))
    assert got.dtype == dtype
    # XLA's operations decode to the queries' type, too.
    tolerance = 2e-3 if build_library.available() else 0.02
    assert_allclose(np.asarray(got, np.float32), target, atol=tolerance, rtol=2**-8)


@FORMS
@pytest.mark.parametrize("kind", ["f16", "q3.5"])
def test_prompt_chunks_do_not_change_results(form: Any, kind: str) -> None:
    q, k, v = random(1, 200, 4, 32), random(2, 200, 2, 32), random(3, 200, 2, 32)
    tables, shape = tables_of([200]), CacheShape(2, 32, 32)
    cache = unwritten(kind, shape, 4)
    whole, after = run(form, q, k, v, cache, placed([Run(0, 0, 200)], tables))
    parts = []
    for start, end in ((0, 120), (120, 199), (199, 200)):
        at, chunk = placed([Run(0, start, end - start)], tables), slice(start, end)
        part, cache = run(form, q[chunk], k[chunk], v[chunk], cache, at)
        parts.append(part)
    assert_allclose(np.concatenate(parts), whole, atol=2e-6)
    for a, b in zip(cache, after, strict=True):
        assert np.array_equal(decoded(a), decoded(b), equal_nan=True)


@FORMS
@pytest.mark.parametrize("kind", ["f32", "q8", "q4"])
@pytest.mark.parametrize(
    "dim", [24, 40, *(pytest.param(dim, marks=pytest.mark.soak) for dim in (8, 32, 72, 104, 120))]
)
def test_unused_blocks_are_not_read(form: Any, kind: str, dim: int) -> None:
    """All that no token has written is NaN: in one's own blocks too."""
    tables = tables_of([120, 64])
    cache = unwritten(kind, CacheShape(1, dim, dim), 3)
    new = random(1, 100, 2, dim), random(2, 100, 1, dim), random(3, 100, 1, dim)
    got, _ = run(form, *new, cache, placed([Run(0, 0, 100)], tables))
    assert np.isfinite(got).all()


@FORMS
@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_a_key_is_seen(form: Any, kind: str) -> None:
    """A cache keeps a NaN as NaN, be it of codes: who sees the token gets NaN, nobody else.

    Of so many tokens that XLA reduces their blocks in vectors.
    """
    tables, at = tables_of([40]), placed([Run(0, 0, 40)], tables_of([40]))
    q, k, v = random(1, 40, 2, 40), random(2, 40, 2, 40), random(3, 40, 2, 40)
    for broken in (k, v):
        before, broken[6, 1, 35] = broken[6, 1, 35], np.nan
        for isa in isas() or ISAS[:1]:
            cache = unwritten(kind, CacheShape(2, 40, 40), len(tables[0]))
            with build_library.lowered_isa(isa) if build_library.available() else nullcontext():
                got = np.isnan(run(form, q, k, v, cache, at)[0]).any(axis=-1)
            assert got.tolist() == [[False, False]] * 6 + [[False, True]] * 34
        broken[6, 1, 35] = before


@FORMS
@pytest.mark.parametrize("kind", ["f16", "q8", "q3.5"])
def test_cache_is_updated_in_place(form: Any, kind: str) -> None:
    """A decoding step of two layers: no second cache, and no decoded one."""
    caches = zero_cache(dict.fromkeys("ab", CacheShape(2, 64, 64)), 128, parse_cache_dtype(kind))

    def step(caches: Any, x: Array, at: AttentionMetadata) -> tuple[Any, Array]:
        after = {}
        for name, cache in caches.items():
            x, after[name] = form(x, x, x, cache, at, ScoreRules(SCALE))
        return after, x

    tables = np.arange(128, dtype=np.int32).reshape(2, 64)
    x, at = jnp.ones((2, 2, 64)), placed([Run(0, 3), Run(1, 4000)], tables)
    program = jax.jit(step, donate_argnums=0).lower(caches, x, at).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == nbytes(caches)
    assert memory.temp_size_in_bytes < 1 << 20
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(caches)]
    after, _ = program(caches, x, at)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after)] == places
