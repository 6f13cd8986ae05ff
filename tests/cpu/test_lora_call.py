"""LoRA terms as a custom call: the definition, and batch invariance."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jinfer.cpu import build_library
from jinfer.cpu.matmul_call import add_lora
from tests.arrays import on_device
from tests.cpu.helpers import isas

pytestmark = pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")

SLOTS, INPUTS, OUTPUTS = 4, 70, (200, 3)


def random(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def called(
    x: Any, ys: Any, slots: Any, scales: Any, a: Any, b: Any, factors: Any = (None, None)
) -> list[np.ndarray]:
    order: Any = np.argsort(np.where(slots > 0, slots, SLOTS + 1), kind="stable").astype(np.int32)
    slots, scales, order = map(on_device, (slots, scales, order))
    out = add_lora(
        on_device(x), [on_device(y) for y in ys], slots, scales, order, a, b, factors[: len(b)]
    )
    return [np.asarray(one) for one in out]


def stored(*shape: int, seed: int, type: str) -> Any:
    """Random numbers, or those that have a factor of 1, about, in int8."""
    values = random(*shape, seed=seed)
    return on_device(np.rint(50 * values).clip(-127, 127) if type == "int8" else values, type)


@pytest.mark.parametrize("type", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize(("rows", "rank"), [(1, 16), (9, 5), (150, 64)])
def test_result_equals_the_definition(rows: int, rank: int, type: str) -> None:
    a = [stored(SLOTS, rank, INPUTS, seed=n, type=type) for n in (1, 2)]
    b = [stored(SLOTS, rank, n, seed=n, type=type) for n in OUTPUTS]
    sides = [random(SLOTS, 2, rank, seed=n) / 50 for n in (4, 5)]
    factors = [*map(on_device, sides)] if type == "int8" else (None, None)
    x, ys = random(rows, INPUTS, seed=0), [random(rows, n, seed=n) for n in OUTPUTS]
    slots = np.random.default_rng(rows).integers(0, 3, rows).astype(np.int32)
    slots[0], scales = 2, random(rows, seed=3)
    for isa in isas():
        with build_library.lowered_isa(isa):
            found = called(x, ys, slots, scales, a, b, factors)
            picked = range(0, rows, 11)
            parts = [(x[i:][:1], [y[i:][:1] for y in ys], slots[i:][:1], scales[i:][:1])
                     for i in picked]  # fmt: skip
            alone = [called(*part, a, b, factors) for part in parts]
        for t, y in enumerate(ys):
            first, second = (np.asarray(m[t], np.float64) for m in (a, b))
            if type == "int8":
                first, second = first * sides[t][:, 0, :, None], second * sides[t][:, 1, :, None]
            own = slots - 1
            inner = np.einsum("ri,rki->rk", x.astype(np.float64), first[own]) * scales[:, None]
            expected = y + np.einsum("rk,rko->ro", inner, second[own]) * (slots > 0)[:, None]
            np.testing.assert_allclose(found[t], expected, rtol=1e-4, atol=2e-4, err_msg=isa)
            np.testing.assert_array_equal(found[t][slots == 0], y[slots == 0])
            for one, i in zip(alone, picked, strict=True):
                np.testing.assert_array_equal(one[t][0], found[t][i], isa)


def test_empty_products() -> None:
    a, b = on_device(random(2, 4, 8, seed=1)), on_device(random(2, 4, 6, seed=2))
    nobody = np.zeros(3, np.int32)
    y = random(3, 6, seed=3)
    (found,) = called(random(3, 8, seed=0), [y], nobody, np.ones(3, np.float32), [a], [b])
    np.testing.assert_array_equal(found, y)
    none = np.zeros(0, np.int32)
    (found,) = called(np.zeros((0, 8), np.float32), [y[:0]], none, none.view(np.float32), [a], [b])
    assert found.shape == (0, 6)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({0: np.ones((3, 9), np.float32)}, "a weight's shape does not fit"),
        ({1: np.ones((2, 6), np.float32)}, "a product does not fit the rows"),
        ({2: np.array([1, 0, 3], np.int32)}, "no such slot"),
        ({2: np.ones(2, np.int32)}, "adapters do not fit the rows"),
        ({3: np.ones(3, np.int32)}, "adapters do not fit the rows"),
        ({4: np.array([0, 1, 1], np.int32)}, "no order of the rows"),
        ({4: np.array([0, 1, 3], np.int32)}, "no order of the rows"),
        ({5: np.ones((2, 5, 8), np.float32)}, "a stack of adapters does not fit"),
        ({5: np.ones((4, 8), np.float32)}, "a weight's shape does not fit"),
        ({6: np.ones((1, 4, 6), np.float32)}, "a stack of adapters does not fit"),
        ({6: np.ones((2, 6, 4), np.float32)}, "a stack of adapters does not fit"),
        ({6: np.ones((2, 4, 6), np.int8)}, "only one of an adapter's stacks is int8"),
        ({5: np.ones((2, 4, 8), np.int8)}, "only one of an adapter's stacks is int8"),
        ({6: np.ones((2, 4, 6), np.int8), 7: np.ones((2, 4), np.float32)}, "scales do not fit"),
        ({6: np.ones((2, 4, 6), np.int32)}, "type is not known"),
    ],
    ids=str,
)
def test_mismatched_operands_are_errors(changes: dict[int, np.ndarray], what: str) -> None:
    slots, order = np.array([1, 0, 2], np.int32), np.array([0, 2, 1], np.int32)
    given = [np.ones((3, 8), np.float32), np.ones((3, 6), np.float32), slots]
    given += [np.ones(3, np.float32), order]
    given += [np.ones((2, 4, 8), np.float32), np.ones((2, 4, 6), np.float32)]

    def run(
        x: Any, y: Any, slots: Any, scales: Any, order: Any, a: Any, b: Any, factors: Any = None
    ) -> None:
        jax.block_until_ready(add_lora(x, [y], slots, scales, order, [a], [b], [factors]))

    run(*map(on_device, given))
    given = [changes.get(i, one) for i, one in enumerate(given)]
    if given[6].dtype == np.int8:
        given.append(changes.get(7, np.ones((2, 2, 4), np.float32)))
    with pytest.raises(Exception, match=what):
        run(*map(on_device, given))
