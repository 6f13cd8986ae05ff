"""Attention by the Mosaic kernel, interpreted: the definition, and the same bits in any company."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.attention import grid as pieces
from kernels_pallas.attention.batch import ScoreModifiers
from kernels_pallas.attention.kv_layout import TOKENS
from kernels_pallas.attention.mosaic import mosaic_supports, power_of_two
from kernels_pallas.attention.paged_attention import attend_partial
from tests.arrays import on_device
from tests.kernels_pallas.attention_cases import MIXED, PADDING, Case
from tests.kernels_pallas.helpers import H200, kept

SHORT: dict[str, Any] = {"length": 128, "rows": 2, "blocks": 8}


@pytest.fixture(autouse=True)
def _described() -> Iterator[None]:
    with jax.sharding.use_abstract_mesh(H200):
        yield


def test_padding_and_unwritten_keys() -> None:
    runs = ((0, 70, 2), (PADDING, 3, 1), (1, 8, 1))
    Case(("bf16", "bf16"), runs, dims=(64, 32), **SHORT).check("mosaic")


def test_all_modifiers_but_distance_tables() -> None:
    changes: dict[str, Any] = {"window": 70, "softcap": 5.0, "slopes": True, "sinks": True}
    shape: dict[str, Any] = {"heads": (4, 1), "dims": (96, 32), "rows": 1, "blocks": 6}
    Case(("f16", "f16"), ((0, 298, 3),), **shape, **changes).check("mosaic")


@pytest.mark.soak
def test_keys_that_are_the_values_too() -> None:
    shape: dict[str, Any] = {"heads": (20, 1), "dims": (48, 48), "dtype": jnp.float32}
    Case(("f16", None), ((0, 150, 2),), rows=1, blocks=6, **shape).check("mosaic")


@pytest.mark.soak
def test_values_of_several_products() -> None:
    """144 columns are more than are summed at once; prompts beside a token that decodes."""
    Case(("f16", "f16"), MIXED, heads=(3, 1), dims=(16, 144)).check("mosaic")


@pytest.mark.soak
@pytest.mark.parametrize("low", [0, 63, 127])
def test_all_splits(low: int) -> None:
    """Rows of a tile whose windows begin in different splits."""
    shape: dict[str, Any] = {"length": 4160, "rows": 1, "blocks": 65}
    runs = ((0, low + 3968 - 3, 4),)
    case = Case(("f16", "f16"), runs, heads=(1, 1), dims=(16, 16), window=3968, **shape)
    case.check("mosaic")


@pytest.mark.soak
@pytest.mark.parametrize("window", [None, 40])
def test_results_are_batch_invariant(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone each split is a program's; together one may compute all of them."""
    case = Case(("bf16", "bf16"), MIXED, heads=(6, 2), dims=(48, 48), window=window)
    case.check_alone("mosaic", every=9)
    tokens = (0, 1, 40, 70, 74)
    alone = [case.run("mosaic", token) for token in tokens]
    monkeypatch.setattr(pieces, "_PROGRAMS", 1)
    jax.clear_caches()
    together = case.run("mosaic")
    jax.clear_caches()
    for token, (one,) in zip(tokens, alone, strict=True):
        assert one.tobytes() == together[token].tobytes()


def test_parts_of_the_keys() -> None:
    """Blocks that are elsewhere have no part in the sums; joined with them nothing is missing."""
    case = Case(("f16", "f16"), ((0, 100, 1), (1, 40, 1)), heads=(2, 1), dims=(16, 16), **SHORT)
    queries = case.batch.queries()
    wanted = case.run("xla").astype(np.float64)
    parts = []
    for here in (np.array([True, False]), np.array([False, True])):
        tables = jnp.where(here, queries.tables, -1)
        given = case.q, case.keys, case.values, queries._replace(tables=tables)
        found = attended(*given, scale=case.numbers["scale"])
        parts.append([np.asarray(each, np.float64) for each in found])
    assert np.isneginf(parts[1][1][1]).all()  # all that the second sequence sees is in its block 0
    most = np.maximum(parts[0][1], parts[1][1])
    out, total = np.zeros(case.q.shape), np.zeros(case.q.shape[:2])
    for each, highest, weights in parts:
        scale = np.exp(highest - most)
        out, total = out + scale[..., None] * each, total + scale * weights
    np.testing.assert_allclose(out / total[..., None], wanted, atol=1e-2)


@partial(jax.jit, static_argnames="scale")
def attended(q: Any, keys: Any, values: Any, queries: Any, scale: float) -> tuple[Any, ...]:
    scores = ScoreModifiers(scale)
    return attend_partial(q, keys, values, queries, scores, backend="mosaic", interpret=True)


def test_powers_of_two_are_exact() -> None:
    difference = np.arange(-126, 1).astype(np.float32)
    got = np.asarray(power_of_two(on_device(difference)))
    np.testing.assert_array_equal(got, np.ldexp(np.float32(1), difference.astype(np.int32)))
    assert power_of_two(jnp.float32(-(2.0**20))) == np.ldexp(np.float32(1), -126)


def test_supported_caches() -> None:
    def of(kind: str, dim: int) -> Any:
        return kept(kind, np.zeros((1, 1, TOKENS, dim)))

    assert mosaic_supports(of("f16", 64), of("f16", 256))
    assert mosaic_supports(of("bf16", 80), None)
    for keys, values in (("f32", "f32"), ("q8", "q8"), ("f16", "bf16")):
        assert not mosaic_supports(of(keys, 64), of(values, 64))
    assert not mosaic_supports(of("f16", 40), None)
    assert not mosaic_supports(of("f16", 288), None)
