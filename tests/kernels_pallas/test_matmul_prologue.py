"""Rows computed, rounded and arranged by one kernel: interpreted, against XLA's operations."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jinfer.quant_format import QuantFormat
from kernels_pallas.matmul.prologue import (
    Compute,
    PrologueOperand,
    Reductions,
    identity,
    prepare_rows,
)
from kernels_pallas.matmul.round_fp16 import round_rows
from kernels_pallas.matmul.weight_layout import PackedMatrix, arrange_inputs
from tests.arrays import on_device
from tests.kernels_pallas.helpers import random_rows
from tests.kernels_pallas.targets import shapes


def residual(values: Sequence[Array], rows: Reductions) -> list[Array]:
    """The prologue of a feed-forward block: a sum with a product's parts, and its norm."""
    x, parts, weight, bias, scale, width = values
    x = (x.astype(jnp.float32) * scale + parts).astype(x.dtype)
    y = x.astype(jnp.float32)
    y = y - rows.sum(y) / width
    y = y * jax.lax.rsqrt(rows.sum(y * y) / width + 1e-5)
    return [y * weight + bias, x]


def prepare_rows_reference(
    operands: Sequence[PrologueOperand],
    compute: Compute,
    rows: int,
    like: PackedMatrix,
    *,
    apart: bool = False,
) -> tuple[Array, Array, Sequence[Array]]:
    """`prepare_rows` in XLA operations."""
    shapes = {"full": (rows, -1), "row": (rows, 1), "vector": (1, -1), "one": (1, 1)}

    def value(operand: PrologueOperand) -> Array:
        if operand.kind == "parts":
            return jnp.sum(operand.array[:, :rows], axis=0)
        return jnp.reshape(operand.array, shapes[operand.kind])

    full = (rows, like.inputs)

    def reduced(function: Any, x: Array) -> Array:
        return function(jnp.broadcast_to(x, full), axis=1, keepdims=True)

    reductions = Reductions(*(functools.partial(reduced, one) for one in (jnp.sum, jnp.max)))
    x, *others = compute([value(operand) for operand in operands], reductions)
    x, others = jnp.broadcast_to(x, full), [jnp.broadcast_to(other, full) for other in others]
    if not apart:
        x16, factors = round_rows(x)
        return arrange_inputs(x16, like), factors, others
    padded = jnp.pad(x, ((0, 0), (0, like.padded_inputs - like.inputs)))
    x16, factors = round_rows(padded.reshape(-1, 1024))
    x16 = x16.reshape(rows, -1)[:, : like.inputs]
    return arrange_inputs(x16, like), factors.reshape(rows, -1), others


def gate(values: Sequence[Array], _: Reductions) -> list[Array]:
    return [jax.nn.silu(values[0]) * values[1]]


def operands(kind: str, rows: int, width: int) -> list[PrologueOperand]:
    rng = np.random.default_rng(rows + width)

    def array(*shape: int, dtype: Any = jnp.float32) -> Array:
        return on_device(rng.standard_normal(shape), dtype)

    parts = [PrologueOperand(array(3, rows + 2, width), "parts") for _ in range(2)]
    if kind == "gate":
        return parts
    if kind == "alone":
        return [PrologueOperand(on_device(random_rows(rows, width)), "full")]
    return [
        PrologueOperand(array(1, rows, width, dtype=jnp.bfloat16), "full"),
        parts[0],
        PrologueOperand(array(width), "vector"),
        PrologueOperand(array(width), "vector"),
        PrologueOperand(array(rows), "row"),
        PrologueOperand(jnp.float32(width), "one"),
    ]


@pytest.mark.parametrize(
    ("kind", "format", "rows", "width"),
    [
        ("alone", "4", 3, 1500),
        ("alone", "3.5", 1, 14336),
        ("gate", "4", 1, 576),
        ("gate", "3.5", 3, 1024),
        ("residual", "4", 3, 1500),
        ("residual", "8", 1, 4096),
        ("residual", "3.5", 2, 576),
    ],
)
@pytest.mark.parametrize("apart", [False, True])
def test_rows(kind: str, format: Any, rows: int, width: int, *, apart: bool) -> None:
    if apart and kind == "residual":
        pytest.skip("it reduces rows")
    like = shapes(QuantFormat(format), (), 64, width)
    given = operands(kind, rows, width)
    compute: Any = {"alone": identity, "gate": gate, "residual": residual}[kind]
    extra = [jnp.bfloat16] if kind == "residual" else []

    @jax.jit
    def both(arrays: Sequence[Array]) -> Any:
        own = [PrologueOperand(array, one.kind) for array, one in zip(arrays, given, strict=True)]
        found, others = prepare_rows(own, compute, rows, like, extra, apart=apart, interpret=True)
        reference = prepare_rows_reference(own, compute, rows, like, apart=apart)
        return (found.x, found.factors, others), reference

    (x, factors, others), reference = both([one.array for one in given])
    assert x.shape == (rows, like.superblocks, 16 * like.per_code, 2 * like.columns)
    assert factors.shape == ((rows, like.superblocks) if apart else (rows,))
    found, expected = (
        rounded.astype(jnp.float32) * of_each.reshape(rows, -1, 1, 1)
        for rounded, of_each in ((x, factors), reference[:2])
    )
    size = float(jnp.max(jnp.abs(expected), initial=0, where=jnp.isfinite(expected)))
    if kind == "alone":  # to the bit
        np.testing.assert_array_equal(x, reference[0])
        np.testing.assert_array_equal(factors, reference[1])
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=size * 1e-4)
    for other, one in zip(others, reference[2], strict=True):
        assert other.dtype == jnp.bfloat16
        np.testing.assert_allclose(other.astype(jnp.float32), one.astype(jnp.float32), rtol=1e-2)
