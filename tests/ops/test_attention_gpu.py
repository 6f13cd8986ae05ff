"""The way to the GPU's kernel, interpreted: it computes what the definition says."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from numpy.testing import assert_allclose

from jinfer.ops.attention import paged_attention
from jinfer.ops.attention.kv_cache import (
    BLOCK,
    AttentionMetadata,
    CacheShape,
    LayerCache,
    zero_cache,
)
from jinfer.ops.attention.mask_rules import ScoreRules
from jinfer.ops.attention.paged_attention import attend, attend_text, extend
from jinfer.ops.attention.xla import extend_xla
from jinfer.ops.backend import target_platform
from jinfer.quant.kv_vectors import zero_vectors
from jinfer.quant_format import FORMATS, parse_cache_dtype
from tests.arrays import on_device
from tests.kernels_pallas.helpers import H200
from tests.ops.paged import SCALE, Run, attended, expected, placed, random, sequences, tables_of
from tests.ops.paged import filled as filled_pool

KINDS = ["f32", "bf16", "f16", *FORMATS]
LENGTHS = [300, 40, 130]


@pytest.fixture
def _on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(paged_attention, "_route", lambda *arguments: "gpu")
    yield
    jax.clear_caches()  # programs were traced with the route


@pytest.fixture
def _interpreted(_on_gpu: None) -> Iterator[None]:
    with target_platform("gpu", interpret=True):
        yield


TABLE = on_device(random(9, 4, 30), jnp.float32)
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 37},
    "around": {"window": 20, "ahead": 20},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": random(7, 4).astype(np.float32)},
    "alibi": {"slopes": np.abs(random(8, 4)).astype(np.float32) / 10},
    "by distance": {"by_distance": TABLE, "lowest": -2},
    "all": {
        "window": 50,
        "softcap": 5.0,
        "sinks": random(7, 4).astype(np.float32),
        "slopes": np.abs(random(8, 4)).astype(np.float32) / 10,
        "by_distance": TABLE,
    },
}


def jitted(form: Callable[..., Any], rules: dict[str, Any]) -> Callable[..., Any]:
    rules = {k: on_device(v) if isinstance(v, np.ndarray) else v for k, v in rules.items()}
    return jax.jit(lambda *arguments: form(*arguments, ScoreRules(SCALE, **rules)))


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize(
    "kind",
    [
        # Of the kernel itself tests/kernels_pallas has every kind.
        pytest.param(kind, marks=() if kind in ("f32", "q3.5") else pytest.mark.soak)
        for kind in KINDS
    ],
)
def test_every_kind_of_cache(kind: str) -> None:
    check(kind, "all")


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize(
    "name",
    [
        # The others are parts of "all", of which are the tests above and below.
        pytest.param(n, marks=() if n in ("plain", "around", "by distance") else pytest.mark.soak)
        for n in RULES
    ],
)
def test_all_rules(name: str) -> None:
    check("f16", name)


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize(
    "name", [n if n == "all" else pytest.param(n, marks=pytest.mark.soak) for n in RULES]
)
def test_all_rules_of_a_long_run_of_codes(name: str) -> None:
    check("q8", name, 70)


def check(kind: str, name: str, tokens: int = 3) -> None:
    """New tokens by the kernel, and by the definition over what is then in the cache."""
    runs = [Run(0, 297), Run(-1, 5, 2), Run(2, 128 - tokens, tokens), Run(1, 37, 3)]
    count = sum(run.length for run in runs)
    tables = tables_of(LENGTHS)
    keys, values = ([random(s + i, n, 2, 48) for i, n in enumerate(LENGTHS)] for s in (10, 20))
    cache = filled_pool(kind, keys, values, tables)
    q, k, v = (
        on_device(random(seed, count, heads, 48), jnp.float32)
        for seed, heads in ((3, 4), (4, 2), (5, 2))
    )
    at, rules = placed(runs, tables), RULES[name]
    _, same = jitted(extend_xla, rules)(q, k, v, jax.tree.map(jnp.copy, cache), at)
    got, cache = jitted(extend, rules)(q, k, v, cache, at)
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(same), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    ends = [298, 40, 128]
    k64, v64 = (sequences(part, tables, ends) for part in cache[:2])
    reference = expected(np.asarray(q, np.float64), k64, v64, runs, **rules)
    assert got.dtype == q.dtype
    assert_allclose(got, reference, atol={"f32": 1e-5, "bf16": 1e-2}.get(kind, 4e-3))


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("kind", ["bf16", "q4"])
def test_keys_that_are_the_values_too(kind: str) -> None:
    """As latent attention has it: a cache without values."""
    tables, runs = tables_of([100]), [Run(0, 98, 2)]
    cache = filled_pool(kind, [random(1, 100, 1, 80)], None, tables)
    q, k = (on_device(random(2, 2, heads, 80), jnp.float32) for heads in (8, 1))
    got, cache = jitted(extend, {})(q, k, None, cache, placed(runs, tables))
    kept = sequences(cache.keys, tables, [100])
    reference = expected(np.asarray(q, np.float64), kept, kept, runs)
    assert_allclose(got, reference, atol=1e-2 if kind == "bf16" else 4e-3)


@pytest.mark.usefixtures("_interpreted")
def test_over_an_encoders_tokens() -> None:
    """Cross-attention: pools as they are, of which each query sees all."""
    tables, runs, last = tables_of([70, 9]), [Run(1, 500), Run(0, 3, 2)], [8, 69, 69]
    keys, values = ([random(s + n, n, 2, 32) for n in (70, 9)] for s in (1, 2))
    cache = filled_pool("f32", keys, values, tables)
    q = random(3, 3, 4, 32)
    ends = on_device(last, jnp.int32)
    got = jitted(attend, {})(on_device(q, jnp.float32), *cache[:2], placed(runs, tables), ends)
    assert_allclose(got, expected(q, keys, values, runs, last), atol=1e-5)


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("window", [None, 4])
def test_whole_texts(window: int | None) -> None:
    """Without a cache, each token seeing as far ahead as back, up to the end of its text."""
    lengths = [70, 12]
    q, k, v = random(1, 2, 70, 4, 32), random(2, 2, 70, 2, 32), random(3, 2, 70, 2, 16)
    given = [on_device(x, jnp.float32) for x in (q, k, v)]
    given[1:] = (x.at[1, 12:].set(jnp.nan) for x in given[1:])
    rules: dict[str, Any] = {} if window is None else {"window": window, "ahead": window}
    got = np.asarray(jitted(attend_text, rules)(*given, on_device(lengths, jnp.int32)))
    assert not got[1, 12:].any()
    for text, length in enumerate(lengths):
        for token in range(0, length, 5):
            for head in range(4):
                of = k[text, :length, head // 2], v[text, :length, head // 2]
                reference = attended(q[text, token, head], *of, token, length - 1, head, **rules)
                assert_allclose(got[text, token, head], reference, atol=1e-5)


@pytest.mark.usefixtures("_on_gpu")
@pytest.mark.parametrize(
    "kind",
    [
        # The kernel itself is lowered for every kind in tests/kernels_pallas.
        pytest.param(kind, marks=() if kind in ("bf16", "q3.5") else pytest.mark.soak)
        for kind in KINDS
    ],
)
def test_lowers_for_a_gpu(kind: str) -> None:
    """A decoding step; the decoded cache, of float32 or the queries' type, is nowhere in it."""
    cache = zero_cache({"a": CacheShape(8, 128, 128)}, 256, parse_cache_dtype(kind))["a"]
    cache = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), cache)
    x = jax.ShapeDtypeStruct((4, 32, 128), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((4, 8, 128), jnp.bfloat16)
    each = jax.ShapeDtypeStruct((4,), jnp.int32)
    at: Any = AttentionMetadata(*(each, each, jax.ShapeDtypeStruct((4, 64), jnp.int32)))  # type: ignore[arg-type]

    def step(q: Array, k: Array, cache: LayerCache, at: AttentionMetadata) -> Any:
        return extend(q, k, k, cache, at, ScoreRules(SCALE))

    with jax.sharding.use_abstract_mesh(H200):
        lowered = jax.jit(step).trace(x, new, cache, at).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert "xla.gpu.triton" in text
    if kind.startswith("q"):
        assert "256x8x64x128x" not in text


def test_choice_of_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    q = jnp.zeros((1, 2, 24))
    even, odd = (jnp.zeros((1, 1, BLOCK, dim), jnp.bfloat16) for dim in (48, 24))
    codes = zero_vectors((1, 1, BLOCK, 24), FORMATS["q4"])
    rules, bias = ScoreRules(1.0), ScoreRules(1.0, bias=lambda d: d[:, None].astype(jnp.float32))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("JINFER_NO_KERNELS", raising=False)
    route = paged_attention._route
    assert route(q, even, even, rules) == "gpu"
    assert route(q, codes, None, rules) == "gpu"
    assert route(q, even, odd, rules) == "xla"
    assert route(q, odd, None, rules) == "xla"
    assert route(q, even.astype(jnp.int8), even, rules) == "xla"
    assert route(q, even, even, bias) == "xla"
    monkeypatch.setenv("JINFER_NO_KERNELS", "1")
    assert route(q, even, even, rules) == "xla"
    monkeypatch.delenv("JINFER_NO_KERNELS")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert route(q, even, even, rules) == "xla"
