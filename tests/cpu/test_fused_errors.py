"""Fused layers: programs that do not fit are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.cpu import build_library
from jinfer.cpu.fused_layers import Operation
from jinfer.cpu.matmul_call import ACTIVATIONS, fields_of
from jinfer.ops.fusion.weight_pointers import table
from tests.cpu.test_fused_layers import FOUR, random
from tests.cpu.test_quantized_matmul import coded, matrix

SYMBOL = "jinfer_fused_layers"
pytestmark = pytest.mark.skipif(not build_library.register(SYMBOL), reason="no C++ compiler")


def call(
    numbers: list[int],
    results: list[int],
    *operands: Any,
    inputs: int = 1,
    layout: list[int] | None = None,
    more: int = 0,
) -> None:
    out = [jax.ShapeDtypeStruct((2, 64), np.float32) for _ in range(len(results) + more)]
    jax.block_until_ready(
        jax.ffi.ffi_call(SYMBOL, out)(
            *operands,
            program=np.array(numbers, np.int64),
            results=np.array(results, np.int64),
            inputs=np.int64(inputs),
            operands=np.array(layout or [], np.int64),
        )
    )


def turn(cos: int, sin: int, size: int = 16) -> None:
    """Rotates by values of the call, of which number 1 is for 8 pairs."""
    call([int(Operation.ROTATE), 0, cos, sin, size, 0], [2], X, random(2, 8), inputs=2)


def add_weight(layout: list[int]) -> None:
    """Adds a vector whose operand is described so."""
    vector = random(64)
    call([int(Operation.ADD_VECTOR), 0], [1], X, table([vector]), layout=layout)


DENSE = [int(Operation.DENSE), 0, 1, 0, 0, 0, 0, 0]
X = random(2, 64)
NORM = [int(Operation.NORM), 0, 0, 0, 0, 0, 0]
# Without new keys and values; what is left is the sizes of keys and values.
ATTENTION = [int(Operation.ATTENTION), 0, -1, -1, 0, 0, -1, -1, 0, 0, 0, 0, 0, 1, 1]
LINEAR = [int(Operation.LINEAR), 0, 1, 1, 0, 0]
MATRIX = coded(matrix(FOUR, 64, 64))
FIELDS = fields_of(MATRIX)
STACK = coded(matrix(FOUR, 64, 64, stack=(3,)))
REFUSED: dict[str, tuple[str, Callable[[], None]]] = {
    "no operation": ("no such operation", lambda: call([len(Operation), 0], [1], X)),
    "no value": ("no such value", lambda: call([int(Operation.SCALE), 3, 0], [1], X)),
    "a value to come": ("no such value", lambda: call([int(Operation.ADD), 0, 1], [1], X)),
    "cut off": ("ends too early", lambda: call([int(Operation.NORM), 0, 0], [1], X)),
    "cut off in a matrix": ("ends too early", lambda: call([*LINEAR, *FIELDS[:5]], [1], X)),
    "no matrices": ("ends too early", lambda: call([int(Operation.LINEAR), 0, 0, 1, 0, 0], [1], X)),
    "endless codebook": (
        "ends too early",
        lambda: call([int(Operation.LINEAR), 0, 1, 1, 0, 1 << 60], [1], X),
    ),
    "no digits": (
        "no such number of digits",
        lambda: call(
            [int(Operation.LINEAR), 0, 1, 0, 0, 0, *FIELDS], [1], X, MATRIX.words, MATRIX.scales
        ),
    ),
    "no activation": (
        "no such activation",
        lambda: call(
            [int(Operation.LINEAR), 0, 1, 1, 9, 0, *FIELDS], [1], X, MATRIX.words, MATRIX.scales
        ),
    ),
    "a stack": (
        "stacks of matrices",
        lambda: call([*LINEAR, *FIELDS], [1], X, STACK.words, STACK.scales),
    ),
    "cut off in plain matrices": (
        "ends too early",
        lambda: call([int(Operation.DENSE), 0, 1, 0], [1], X),
    ),
    "no plain matrices": ("ends too early", lambda: call([*DENSE[:2], 0, *DENSE[3:]], [1], X)),
    "a matrix too few": ("out of range", lambda: call(DENSE, [1], X)),
    "a stack of plain matrices": (
        "a weight's shape does not fit",
        lambda: call(DENSE, [1], X, random(3, 64, 64)),
    ),
    "rows of another size": (
        "a weight's shape does not fit",
        lambda: call(DENSE, [1], X, random(64, 65)),
    ),
    "rows beyond a matrix": (
        "not so many rows",
        lambda: call([*DENSE[:5], 8, 60, 0], [1], X, random(64, 64)),
    ),
    "whole numbers": (
        "type is not known",
        lambda: call(DENSE, [1], X, jnp.zeros((64, 64), jnp.int32)),
    ),
    "no such activation of plain matrices": (
        "no such activation",
        lambda: call([*DENSE[:3], 9, *DENSE[4:]], [1], X, random(64, 64), random(64, 64)),
    ),
    "gate and up unlike each other": (
        "not two weights of one shape",
        lambda: call([*DENSE[:2], 2, 1, *DENSE[4:]], [1], X, random(64, 64), random(32, 64)),
    ),
    "rows of nothing": (
        "rows of nothing",
        lambda: call(DENSE, [1], random(2, 0), random(64, 0)),
    ),
    "angles that are not there": ("no such angles", lambda: turn(1, 5)),
    "angles of two sizes": ("no such angles", lambda: turn(1, 0)),
    "heads that do not fit": ("such a size", lambda: turn(1, 1, 48)),
    "heads smaller than what is rotated": ("such a size", lambda: turn(1, 1, 4)),
    "heads of nothing": ("such a size", lambda: turn(1, 1, 0)),
    "transforms of heads that do not fit": (
        "such a size",
        lambda: call([int(Operation.HADAMARD), 0, 48, 1], [1], X),
    ),
    "transforms of no heads": (
        "such a size",
        lambda: call([int(Operation.HADAMARD), 0, 0, 0], [1], X),
    ),
    "norms that do not fit": ("such a size", lambda: call([*NORM, 48], [1], X)),
    "norms of nothing": ("such a size", lambda: call([*NORM, 0], [1], X)),
    "attention that is cut off": ("do not fit", lambda: call([*ATTENTION[:9]], [1], X)),
    "attention without a place": ("out of range", lambda: call([*ATTENTION, 16, 16, 0], [1], X)),
    "heads of another size": ("heads that do not", lambda: call([*ATTENTION, 48, 16, 0], [1], X)),
    "heads of no size": ("heads that do not", lambda: call([*ATTENTION, 0, 16, 0], [1], X)),
    "keys that are not there": (
        "heads that do not",
        lambda: call(
            [*ATTENTION[:2], 0, 5, *ATTENTION[4:9], 1, *ATTENTION[10:], 16, 16, 0], [1], X
        ),
    ),
    "pools that are no results": (
        "out of range",
        lambda: call(
            [*ATTENTION[:2], 0, 0, *ATTENTION[4:9], 1, *ATTENTION[10:], 16, 16, 0],
            [1],
            X,
            *[jnp.zeros(2, jnp.int32)] * 3,
            jnp.zeros((1, 1), jnp.int32),
            *[jnp.zeros(0)] * 2,
            *[jnp.zeros((1, 4, 64, 16))] * 2,
        ),
    ),
    "a result too many": (
        "wrong number of results",
        lambda: call([int(Operation.SCALE), 0, 0], [1], X, more=1),
    ),
    "no such function": (
        "no such activation",
        lambda: call([int(Operation.ACTIVATE), 0, len(ACTIVATIONS)], [1], X),
    ),
    "no function": ("no such activation", lambda: call([int(Operation.ACTIVATE), 0, 0], [1], X)),
    "a factor that is not there": (
        "no such value",
        lambda: call([int(Operation.MULTIPLY), 0, 3], [1], X),
    ),
    "a factor of another size": (
        "no such value",
        lambda: call([int(Operation.MULTIPLY), 0, 1], [2], X, random(2, 32), inputs=2),
    ),
    "an argument that is not there again": ("out of range", lambda: add_weight([-7])),
    "too short a vector": (
        "does not fit its rows",
        lambda: call([int(Operation.ADD_VECTOR), 0], [1], X, random(63)),
    ),
    "nothing given": ("there are no inputs", lambda: call([], [0], X, inputs=0)),
    "too much given": ("there are no inputs", lambda: call([], [0], X, inputs=2)),
    "other rows": ("equally many rows", lambda: call([], [0], X, random(3, 64), inputs=2)),
    "what is there asked for": ("does not fit", lambda: call([], [0], X)),
    "asked for twice": (
        "does not fit",
        lambda: call([int(Operation.SCALE), 0, 0], [1, 1], X),
    ),
    "a row that the table has not": ("a weight's pointer", lambda: add_weight([1, 11, 1, 64])),
    "another number of bytes": ("a weight's pointer", lambda: add_weight([0, 11, 1, 65])),
    "more axes than are told": ("a weight's pointer", lambda: add_weight([0, 11, 2, 64])),
    "less than a type and axes": ("a weight's pointer", lambda: add_weight([0, 11])),
    "fewer than no axes": ("a weight's pointer", lambda: add_weight([0, 11, -1])),
    "a type that does not fit": ("does not fit its rows", lambda: add_weight([0, 8, 1, 64])),
    "too much told": ("wrong number of buffers", lambda: add_weight([0, 11, 1, 64, -1])),
    "told without a table": (
        "a weight's pointer",
        lambda: call([int(Operation.ADD_VECTOR), 0], [1], X, X, layout=[0, 11, 1, 64]),
    ),
    "a buffer too many": (
        "wrong number of buffers",
        lambda: call([int(Operation.SCALE), 0, 0], [1], X, random(64)),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_programs_are_errors(name: str) -> None:
    what, refused = REFUSED[name]
    with pytest.raises(Exception, match=what):
        refused()
