"""Mosaic kernels under the interpreter's race detector: what copies and products wait for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import pytest

from jinfer.modelspec.quant_format import QuantFormat
from kernels_pallas.attention import grid as pieces
from kernels_pallas.matmul.quantized import matmul
from kernels_pallas.mosaic_common import plgpu
from tests.arrays import on_device
from tests.kernels_pallas.attention_cases import Case
from tests.kernels_pallas.helpers import H200, assert_near, random_matrix, random_rows

pytestmark = pytest.mark.soak


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    params = plgpu.InterpretGPUParams
    monkeypatch.setattr(plgpu, "InterpretGPUParams", lambda: params(detect_races=True))
    jax.clear_caches()
    with jax.sharding.use_abstract_mesh(H200):
        yield
    jax.clear_caches()


def multiply(outputs: int) -> None:
    """Three superblocks, so that shared memory is used again."""
    matrix, values = random_matrix(QuantFormat("4"), (outputs, 2300))
    x = random_rows(3, 2300)

    def product(x: Any, matrix: Any) -> Any:
        return matmul(x, [matrix], backend="mosaic", interpret=True)

    (y,) = jax.jit(product)(on_device(x), matrix)
    assert_near(y, x, values)


def test_products() -> None:
    multiply(128)


def test_a_race_is_found() -> None:
    """The last of two tiles begins earlier and writes some outputs again, the same ones."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        multiply(72)


@pytest.mark.parametrize("whole", [False, True])
def test_attention(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of programs of their own, and one after the other; more blocks than stages."""
    if whole:
        monkeypatch.setattr(pieces, "_PROGRAMS", 1)
    case = Case(("f16", "f16"), ((0, 300, 2),), heads=(2, 1), dims=(64, 64), rows=1, blocks=6)
    case.check("mosaic")
