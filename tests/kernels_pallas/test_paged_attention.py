"""Attention over paged caches: the kernels in interpret mode, and plain XLA, by NumPy's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.attention import grid as pieces
from kernels_pallas.attention.kv_layout import TOKENS, PackedKV
from tests.arrays import on_device
from tests.kernels_pallas.attention_cases import MIXED, PADDING, Case, decoded
from tests.kernels_pallas.helpers import KINDS, kept
from tests.reference import numpy_cache

BACKENDS = pytest.mark.parametrize("backend", ["triton", "xla"])


EVERYTHING: dict[str, Any] = {
    "window": 70,
    "softcap": 5.0,
    "slopes": True,
    "sinks": True,
    "by_distance": -3,
}


@BACKENDS
@pytest.mark.parametrize(
    "kind",
    [
        # The others are those of tests below, which hold both backends to the same definition.
        pytest.param(kind, marks=() if kind in ("bf16", "q2") else pytest.mark.soak)
        for kind in KINDS
    ],
)
def test_every_kind(kind: str, backend: str) -> None:
    Case((kind, kind)).check(backend)


@BACKENDS
@pytest.mark.parametrize(
    "kind",
    [
        # Scores are changed after codes have become numbers: the kinds differ in nothing here.
        pytest.param(kind, marks=() if kind in ("f32", "q3.5") else pytest.mark.soak)
        for kind in KINDS
    ],
)
def test_all_modifiers_of_a_cache_kind(kind: str, backend: str) -> None:
    case = Case((kind, kind), ((0, 298, 3),), heads=(20, 1), dims=(96, 32), **EVERYTHING)
    case.check(backend)


@BACKENDS
@pytest.mark.parametrize(
    "kinds",
    [
        *[("q3.5", "bf16"), ("q8", "q4")],
        *(pytest.param(each, marks=pytest.mark.soak) for each in (("f16", "q8"), ("f32", "q2"))),
    ],
)
def test_keys_and_values_of_other_kinds_and_widths(kinds: tuple[str, str], backend: str) -> None:
    Case(kinds, ((2, 100, 5),), dims=(48, 192)).check(backend)


@BACKENDS
@pytest.mark.parametrize(
    "kind",
    ["q3.5", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("f32", "bf16", "q8"))],
)
def test_keys_that_are_the_values_too(kind: str, backend: str) -> None:
    """As in latent attention; 288 wide, so in several tiles, and heads of a token in two."""
    case = Case((kind, None), ((0, 150, 2),), heads=(20, 1), dims=(288, 288), dtype=jnp.float32)
    case.check(backend)


@BACKENDS
@pytest.mark.parametrize(
    "dim", [80, *(pytest.param(dim, marks=pytest.mark.soak) for dim in (16, 40, 100, 160))]
)
def test_odd_widths_of_codes(dim: int, backend: str) -> None:
    """A last column that is not full, and columns that are no power of two."""
    Case(("q4", "q6"), dims=(dim, dim + 3)).check(backend)


@BACKENDS
@pytest.mark.parametrize(
    ("kind", "window"),
    [
        *(("f32", 40), ("q5", None)),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in (("f32", None), ("q5", 40))),
    ],
)
def test_prompts_and_decoding_together(kind: str, window: int | None, backend: str) -> None:
    """Two launches: small pieces of short runs, large ones of long runs."""
    Case((kind, kind), MIXED, heads=(3, 1), window=window, dtype=jnp.float32).check(backend)


@BACKENDS
def test_common_beginnings(backend: str) -> None:
    """Sequences that share blocks, each with its own afterwards."""
    runs = ((0, 200, 1), (1, 130, 4), (2, 127, 1))
    Case(("f16", "f16"), runs, shared=2, dtype=jnp.float32).check(backend)


@BACKENDS
def test_over_an_encoders_tokens(backend: str) -> None:
    """Cross-attention: all queries see the same keys at any positions."""
    Case(("f16", "q8"), ((1, 0, 3), (0, 900, 1)), last=99, dtype=jnp.float32).check(backend)


@BACKENDS
def test_whole_texts(backend: str) -> None:
    """Every token sees as far ahead as back, up to the end of its text."""
    case = Case(("f32", "f32"), ((2, 0, 90),), last=89, window=30, ahead=30, dtype=jnp.float32)
    case.check(backend)


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("position", [0, 62, 63, 64, 127, 128, 255, 319])
def test_edges_of_blocks_and_splits(position: int, windowed: bool) -> None:
    run = ((2, position, 1),)
    if windowed:
        Case(("f32", "f32"), run, window=64, dtype=jnp.float32).check()
    else:
        Case(("f16", "q3"), run).check()


@pytest.mark.parametrize("position", [3967, 3968, 3969])
def test_edges_of_the_splits_sizes(position: int) -> None:
    """More than 31 splits of 128 keys become larger ones, in the middle of a run too."""
    runs = ((0, position - 2, 5),)
    shape: dict[str, Any] = {"heads": (2, 1), "dims": (16, 16), "length": 4096, "rows": 1}
    case = Case(("f16", "f16"), runs, blocks=64, **shape)
    case.check()
    case.check_alone()


@pytest.mark.parametrize("low", [0, 1, 63, 100, 127])
def test_all_splits(low: int) -> None:
    """Keys that begin and end within a split; the first and the last do not share a place."""
    runs = ((0, low + 3968 - 1, 1),)
    shape: dict[str, Any] = {"length": 4160, "rows": 1, "blocks": 65}
    Case(("f32", "f32"), runs, heads=(1, 1), dims=(16, 16), window=3968, **shape).check()


@pytest.mark.parametrize(
    "kind", ["q8", *(pytest.param(k, marks=pytest.mark.soak) for k in ("f32", "bf16"))]
)
@pytest.mark.parametrize("whole", [False, True])
def test_results_are_batch_invariant(
    kind: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone each split is a program's; together one may compute all of them."""
    case = Case((kind, kind), MIXED, heads=(6, 2), dims=(48, 48), dtype=jnp.float32)
    if not whole:
        case.check_alone(every=3 if kind == "q8" else 1)  # each token is a program
        return
    alone = [case.run(only=token) for token in (0, 1, 40, 70, 74)]
    monkeypatch.setattr(pieces, "_PROGRAMS", 1)
    jax.clear_caches()
    together = case.run()
    jax.clear_caches()
    for token, (one,) in zip((0, 1, 40, 70, 74), alone, strict=True):
        assert one.tobytes() == together[token].tobytes()


def test_block_placement_does_not_change_bits() -> None:
    case = Case(("f16", "f16"), MIXED)
    before = case.run()
    order = np.random.default_rng(1).permutation(20)
    case.keys, case.values = (
        jax.tree.map(lambda part: on_device(np.asarray(part)[order]), each)
        for each in (case.keys, case.values)
    )
    tables = case.batch.tables
    moved = np.argsort(order)
    case.batch.tables = np.where(tables < 20, moved[np.minimum(tables, 19)], tables)
    assert before.tobytes() == case.run().tobytes()


@pytest.mark.soak  # each example is a program, or two
@settings(max_examples=20)
@given(data=st.data())
def test_random_combinations(data: st.DataObject) -> None:
    draw = data.draw
    kinds = draw(st.sampled_from(KINDS), "keys"), draw(st.sampled_from([*KINDS, None]), "values")
    dims = tuple(
        draw(st.integers(1, 8)) * 16
        if kind in ("f32", "bf16", "f16")
        else draw(st.integers(1, 140))
        for kind in (kinds[0], kinds[1] or kinds[0])
    )
    kv_heads = draw(st.integers(1, 2), "heads")
    counts = draw(st.lists(st.sampled_from([1, 1, 2, 7, 80]), min_size=1, max_size=3), "tokens")
    runs = []
    for row, count in enumerate(counts):
        runs.append((row, draw(st.integers(0, 320 - count), "first"), count))
        if draw(st.booleans(), "padding"):
            runs.append((PADDING, 0, draw(st.integers(1, 3))))
    case = Case(
        kinds,
        tuple(draw(st.permutations(runs), "order")),
        heads=(kv_heads * draw(st.integers(1, 9), "group"), kv_heads),
        dims=(dims[0], dims[0] if kinds[1] is None else dims[1]),
        window=draw(st.one_of(st.none(), st.integers(1, 100)), "window"),
        softcap=draw(st.sampled_from([None, 1.5]), "softcap"),
        by_distance=draw(st.sampled_from([None, 0, -20]), "by distance"),
        slopes=draw(st.booleans(), "slopes"),
        sinks=draw(st.booleans(), "sinks"),
        dtype=draw(st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]), "dtype"),
    )
    case.check()


@BACKENDS
def test_query_without_keys_gives_zeros(backend: str) -> None:
    case = Case(("f16", "f16"), ((0, 5, 1), (1, 5, 2)), last=-1)
    assert not case.run(backend).any()


@BACKENDS
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_queries_beyond_the_range_of_fp16(scale: float, backend: str) -> None:
    """Rows of queries are scaled to it."""
    case = Case(("q8", "q8"), ((0, 63, 1),), heads=(2, 1), dtype=jnp.float32)
    case.q *= jnp.float32(1 / scale)
    case.numbers["scale"] *= scale
    case.check(backend)


@pytest.mark.parametrize("group", [1, 3, 20])
@pytest.mark.parametrize("count", [40, 160])
def test_every_token_is_in_one_piece(group: int, count: int) -> None:
    """Of many batches, however the splits' sizes change in their runs."""
    rng, tables = np.random.default_rng(0), 12
    keys = PackedKV(jax.ShapeDtypeStruct((8, 2, TOKENS, 64), jnp.bfloat16))
    launches = pieces.plan_launches(
        pieces.AttentionShape(count, tables, 9088, 2, group), keys, keys, 128
    )

    @jax.jit
    def cut(rows: jax.Array, last: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        power = pieces.split_powers(jnp.zeros_like(last), last, 128)
        runs = pieces.runs(rows, power)
        short = runs.length <= launches[0].max_tokens
        chosen = [runs.real] if len(launches) == 1 else [short, ~short]
        return power, [
            pieces.first_tokens(runs, *each) for each in zip(chosen, launches, strict=True)
        ]

    for _ in range(20):
        rows, last = np.full(count, PADDING, np.int32), np.zeros(count, np.int32)
        place = 0
        for row in range(tables):
            length = min(int(rng.choice([1, 1, 3, 17, 40])), count - place)
            rows[place : place + length] = row
            last[place : place + length] = rng.integers(0, 9000) + np.arange(length)
            place += length + int(rng.integers(0, 2))
            if place >= count:
                break
        power, firsts = (jax.device_get(part) for part in cut(rows, last))
        covered = np.zeros(count, int)
        for launch, begins in zip(launches, firsts, strict=True):
            for first in begins[begins < count]:
                piece = np.arange(first, min(first + launch.max_tokens, count))
                same = (rows[piece] == rows[first]) & (power[piece] == power[first])
                covered[piece[same]] += 1
        np.testing.assert_array_equal(covered, rows != PADDING)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("q")])
def test_codes_follow_the_caches_layout(kind: str) -> None:
    """Against the definition; where float32 rounds otherwise, a number is a step off."""
    x = np.random.default_rng(0).standard_normal((2, 1, 50, 100)).astype(np.float32)
    got, expected = np.asarray(decoded(kept(kind, x))), numpy_cache.kept(x.astype(np.float64), kind)
    assert np.mean(np.abs(got - expected) > 1e-5) < 2e-3
    np.testing.assert_allclose(got, expected, atol=2)
