"""Attention over a cache in two pools: its parts, joined, are attention over one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.ops.attention import gpu, paged_attention
from jinfer.ops.attention.kv_cache import BLOCK, LayerCache
from jinfer.ops.attention.mask_rules import ScoreRules
from jinfer.ops.attention.paged_attention import extend, extend_partial
from jinfer.ops.attention.partial_merge import PartialAttention, merge_partials
from tests.arrays import on_device
from tests.ops.paged import SCALE, Run, blocks_of, filled, placed, random, tables_of

LENGTHS = [5 * BLOCK, 70, 3 * BLOCK + 9]
RUNS = [Run(0, 5 * BLOCK - 3, 3), Run(-1, 0, 2), Run(1, 69), Run(2, 2 * BLOCK - 1, 40), Run(2, 3)]
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 70},
    "softcap": {"softcap": 2.0},
    "alibi": {"slopes": np.array([0.5, 0.25, 0.1, 0.02], np.float32)},
    "distances": {"by_distance": random(4, 4, 40).astype(np.float32), "lowest": 0},
    "sinks": {"sinks": np.array([0.3, -1.0, 2.0, 0.0], np.float32), "window": 100},
}


def divided(tables: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Tables of a pool of the first blocks, and of one of the others."""
    here, there = np.where(tables < first, tables, -1), np.where(tables < first, -1, tables - first)
    return here.astype(np.int32), there.astype(np.int32)


@pytest.mark.parametrize(
    ("form", "name", "kind", "few"),
    [
        *(("custom call", name, "f32", False) for name in RULES),
        ("custom call", "plain", "q3.5", True),
        ("XLA", "sinks", "f32", True),
        pytest.param("XLA", "distances", "f32", True, marks=pytest.mark.soak),
        ("XLA", "alibi", "q8", False),
        ("kernel", "sinks", "f32", True),
        pytest.param("kernel", "alibi", "q8", True, marks=pytest.mark.soak),
    ],
)
def test_merge_over_two_pools_equals_one_pool(
    form: str, name: str, kind: str, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen(form, monkeypatch)
    rules: dict[str, Any] = {
        key: on_device(value) if isinstance(value, np.ndarray) else value
        for key, value in RULES[name].items()
    }
    runs = RUNS if few else [*RUNS, Run(0, 0, 40)]
    compare(form, ScoreRules(SCALE, **rules), kind, runs, heads=4, kv_heads=2, dim=32)


@pytest.mark.parametrize("form", ["custom call", "XLA"])
def test_keys_that_are_values(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen(form, monkeypatch)
    compare(form, ScoreRules(SCALE), "q8", RUNS, heads=4, kv_heads=1, dim=48, latent=True)


def chosen(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets XLA or the kernel of GPUs compute it, if that is the form."""
    if form != "custom call":
        monkeypatch.setattr(
            paged_attention, "_route", lambda *_: "gpu" if form == "kernel" else "xla"
        )
        monkeypatch.setattr(gpu, "interpreted", lambda: True)


def compare(
    form: str,
    rules: ScoreRules,
    kind: str,
    runs: list[Run],
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    latent: bool = False,
) -> None:
    tables, total = tables_of(LENGTHS, 3), blocks_of(LENGTHS)
    keys, values = (
        [random(seed + i, length, kv_heads, dim) for i, length in enumerate(LENGTHS)]
        for seed in (10, 20)
    )
    pool = filled(kind, keys, None if latent else values, tables)
    count = sum(run.length for run in runs)
    q, k, v = (
        on_device(random(seed, count, n, dim), jnp.float32)
        for seed, n in ((1, heads), (2, kv_heads), (3, kv_heads))
    )
    new = (k, None if latent else v)

    @jax.jit
    def whole(cache: LayerCache) -> Any:
        return extend(q, *new, cache, placed(runs, tables), rules)

    @jax.jit
    def part(cache: LayerCache, own: Any) -> tuple[PartialAttention, LayerCache]:
        return extend_partial(q, *new, cache, placed(runs, own), rules._replace(sinks=None))

    first = total // 2
    cut = [jax.tree.map(lambda x, c=c: x[c], pool) for c in (slice(first), slice(first, None))]
    assert len({*np.sign(divided(tables, first)[0][0] + 0.5)}) == 2  # a sequence in both
    parts, after = zip(*map(part, cut, divided(tables, first)), strict=True)
    expected, kept = whole(pool)
    found = merge_partials(parts, rules.sinks, jnp.float32)
    # Weights of a quantized cache's values are of 16 bits there, each part's by its own highest.
    rounded = form == "kernel" and kind != "f32"
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-4 if rounded else 2e-6)
    for one, here, there in zip(*map(jax.tree.leaves, (kept, *after)), strict=True):
        np.testing.assert_array_equal(one, np.concatenate([here, there]))


def test_query_without_keys_gives_zeros() -> None:
    nothing = PartialAttention(
        jnp.zeros((1, 2, 3)), jnp.stack([jnp.full((1, 2), -jnp.inf), jnp.zeros((1, 2))], -1)
    )
    np.testing.assert_array_equal(
        merge_partials([nothing, nothing], None, jnp.float32), np.zeros((1, 2, 3))
    )
