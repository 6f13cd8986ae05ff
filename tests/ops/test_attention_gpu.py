"""The way to the GPU's kernel, interpreted: it computes what the definition says."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from numpy.testing import assert_allclose

from jinfer.ops import attention, attention_gpu
from jinfer.ops.attention import attend, attend_reference, extend, extend_xla
from jinfer.ops.cache import CacheShape, LayerCache, empty, write
from jinfer.ops.score_rules import ScoreRules
from jinfer.quant.format import FORMATS
from jinfer.quant.kind import parse_kind
from jinfer.quant.vectors import zeros
from tests.kernels_pallas.helpers import H200

KINDS = ["f32", "bf16", "f16", *FORMATS]
SCALE = 0.3


@pytest.fixture
def _on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attention, "_route", lambda *arguments: "gpu")
    yield
    jax.clear_caches()  # programs were traced with the route


@pytest.fixture
def _interpreted(_on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted = partial(attention_gpu.attend_gpu, interpret=True)
    monkeypatch.setattr(attention, "attend_gpu", interpreted)


def random(seed: int, *shape: int) -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def positions(starts: list[int], tokens: int) -> Array:
    return jnp.asarray(np.array(starts)[:, None] + np.arange(tokens), jnp.int32)


def filled(kind: str, dims: tuple[int, int], kv_heads: int = 2, length: int = 300) -> LayerCache:
    """A cache of three slots full of random numbers, and NaN where slot 0's numbers are."""
    cache = empty({"a": CacheShape(kv_heads, *dims)}, 3, length, 0, parse_kind(kind))["a"]
    k, v = (random(seed, 3, length, kv_heads, dim) for seed, dim in enumerate(dims))
    cache = jax.jit(write)(cache, k, v, jnp.zeros(3, jnp.int32), jnp.int32(0))
    spoil = lambda a: a if a.dtype == jnp.uint32 else a.at[0].set(jnp.nan)  # noqa: E731
    return jax.tree.map(spoil, cache)


SIGHTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 37},
    "around": {"window": 20, "ahead": 20},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": random(7, 4)},
    "alibi": {"slopes": jnp.abs(random(8, 4)) / 10},
    "all": {
        "window": 50,
        "softcap": 5.0,
        "sinks": random(7, 4),
        "slopes": jnp.abs(random(8, 4)) / 10,
    },
}


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_cache(kind: str) -> None:
    check(kind, "all")


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("name", SIGHTS)
def test_every_sight(name: str) -> None:
    check("f16", name, 1)
    check("q8", name, 40)


def jitted(form: Callable[..., Any], rules: ScoreRules) -> Callable[..., Any]:
    return jax.jit(lambda *arguments: form(*arguments, rules))


def check(kind: str, name: str, tokens: int = 3) -> None:
    """New tokens by the kernel, and by the definition over what is then in the cache."""
    q, k, v = (random(seed, 2, tokens, heads, 48) for seed, heads in ((3, 4), (4, 2), (5, 2)))
    at, slot, rules = positions([250, 7], tokens), jnp.int32(1), ScoreRules(SCALE, **SIGHTS[name])
    got, cache = jitted(extend, rules)(q, k, v, filled(kind, (48, 48)), at, slot)
    _, same = jitted(extend_xla, rules)(q, k, v, filled(kind, (48, 48)), at, slot)
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(same), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    wanted = jitted(attend_reference, rules)(q, *cache, at, at, slot)
    assert got.dtype == q.dtype
    assert_allclose(got, wanted, atol={"f32": 1e-5, "bf16": 1e-2}.get(kind, 4e-3))


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("kind", ["bf16", "q4"])
def test_keys_that_are_the_values_too(kind: str) -> None:
    """As latent attention has it: a cache without values."""
    q, k = random(3, 1, 2, 8, 80), random(4, 1, 2, 1, 80)
    at, slot = positions([200], 2), jnp.int32(2)
    rules = ScoreRules(SCALE)
    got, cache = jitted(extend, rules)(q, k, None, filled(kind, (80, 0), 1), at, slot)
    wanted = jitted(attend_reference, rules)(q, cache.keys, cache.keys, at, at, slot)
    assert_allclose(got, wanted, atol=1e-2 if kind == "bf16" else 4e-3)


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("window", [None, 4])
def test_whole_texts(window: int | None) -> None:
    """Without a cache, each token seeing as far ahead as back, up to the end of its text."""
    q, keys, values = random(1, 2, 20, 4, 32), random(2, 2, 2, 20, 32), random(3, 2, 2, 20, 16)
    keys, values = keys.at[1, :, 12:].set(jnp.nan), values.at[1, :, 12:].set(jnp.nan)
    last = jnp.broadcast_to(jnp.array([[19], [11]], jnp.int32), (2, 20))
    at, slot, rules = (
        positions([0, 0], 20),
        jnp.int32(0),
        ScoreRules(SCALE, window=window, ahead=window),
    )
    got = jitted(attend, rules)(q, keys, values, at, last, slot)
    clean = jnp.nan_to_num(keys), jnp.nan_to_num(values)
    wanted = jitted(attend_reference, rules)(q, *clean, at, last, slot)
    assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.usefixtures("_on_gpu")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_lowers_for_a_gpu(kind: str) -> None:
    """A decoding step; the decoded cache, of float32 or the queries' type, is nowhere in it."""
    cache = empty({"a": CacheShape(8, 128, 128)}, 4, 4096, 0, parse_kind(kind))["a"]
    cache = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), cache)
    x = jax.ShapeDtypeStruct((4, 1, 32, 128), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((4, 1, 8, 128), jnp.bfloat16)
    at = jax.ShapeDtypeStruct((4, 1), jnp.int32)

    def step(q: Array, k: Array, cache: LayerCache, at: Array) -> Any:
        return extend(q, k, k, cache, at, jnp.int32(0), ScoreRules(SCALE))

    with jax.sharding.use_abstract_mesh(H200):
        lowered = jax.jit(step).trace(x, new, cache, at).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert "xla.gpu.triton" in text
    if kind.startswith("q"):
        assert "4x8x4096x128x" not in text


def test_which_way(monkeypatch: pytest.MonkeyPatch) -> None:
    q = jnp.zeros((1, 1, 2, 24))
    even, odd = (jnp.zeros((1, 1, 8, dim), jnp.bfloat16) for dim in (48, 24))
    codes = zeros((1, 1, 8, 24), FORMATS["q4"])
    rules, bias = ScoreRules(1.0), ScoreRules(1.0, bias=lambda d: d[:, None].astype(jnp.float32))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    route = attention._route
    assert route(q, even, even, rules) == "gpu"
    assert route(q, codes, None, rules) == "gpu"
    assert route(q, even, odd, rules) == "xla"
    assert route(q, odd, None, rules) == "xla"
    assert route(q, even.astype(jnp.int8), even, rules) == "xla"
    assert route(q, even, even, bias) == "xla"
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert route(q, even, even, rules) == "xla"
