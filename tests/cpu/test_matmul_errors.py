"""Handlers compare every buffer with its declared shape, and refuse others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.cpu import build_library
from jinfer.cpu.matmul_call import QuantizedMatrix, quantized_linear
from jinfer.quant_format import QuantFormat
from tests.cpu.test_quantized_matmul import coded, matrix

pytestmark = pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")

PLAIN = coded(matrix(QuantFormat("4", symmetric=True), 48, 320))
TWO_LEVEL = coded(matrix(QuantFormat("4", 32, False, two_level=True), 48, 512))
CODED = coded(matrix(QuantFormat("4", symmetric=True, codebook=tuple(range(16))), 48, 320))
DENSE: dict[str, Any] = {
    "activation": np.int64(0),
    "select": np.int64(0),
    "transposed": np.bool_(False),
    "first": np.int64(0),
    "taken": np.int64(0),
    "rounded": np.bool_(False),
}


def run(
    matrices: list[QuantizedMatrix], inputs: int, activation: str = "none", **which: Any
) -> None:
    x = jnp.ones((3, inputs), jnp.float32)
    jax.block_until_ready(quantized_linear(x, matrices, activation=activation, **which))


def as_other(words: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Enough zeros for no read beyond them to be the test's doing."""
    return np.zeros(shape, np.asarray(words).dtype)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"scales": np.ones((1, 1, 1, 1, 1), np.float16)}, "do not fit"),
        ({"scales": np.asarray(PLAIN.scales).astype(np.float32)}, "do not fit"),
        ({"scales": np.asarray(PLAIN.scales).view(np.int16)}, "do not fit"),
        ({"words": np.asarray(PLAIN.words).view(np.int32)}, "do not fit"),
        ({"words": np.asarray(PLAIN.words)[:1]}, "do not fit"),
        ({"words": as_other(PLAIN.words, (6, 5, 9, 8, 2))}, "format is not known"),
        ({"words": as_other(PLAIN.words, (6, 5, 1, 8, 2))}, "format is not known"),
        ({"words": as_other(PLAIN.words, (6, 5, 4, 1, 17))}, "layout without kernels"),
        ({"words": as_other(PLAIN.words, (6, 5, 4, 8, 4))}, "layout without kernels"),
        ({"words": as_other(PLAIN.words, (6, 5, 4, 8, 2))[None, None]}, "neither 5 nor 6 axes"),
        ({"block": 0}, "format is not known"),
        ({"block": 48}, "format is not known"),
        ({"block": 64}, "do not fit"),
        ({"per_code": 2}, "format is not known"),
        ({"zero": -5}, "format is not known"),
        ({"outputs": 49}, "do not fit"),
        ({"codebook": ()}, "format is not known"),
        ({"steps": np.ones((6, 5, 8, 1, 1), np.float16)}, "layout without kernels"),
        ({"block": 16}, "format is not known"),
        ({"block": 128}, "do not fit"),
    ],
)
def test_mismatched_matrix_is_an_error(changes: dict[str, Any], what: str) -> None:
    run([PLAIN], 320)
    with pytest.raises(Exception, match=what):
        run([replace(PLAIN, **changes)], 320)


@pytest.mark.parametrize(
    "steps",
    [
        np.ones((1, 1, 1, 1, 1), np.float16),
        np.asarray(TWO_LEVEL.steps).astype(np.float32),
        np.asarray(TWO_LEVEL.steps)[:, :1],
    ],
)
def test_mismatched_steps_are_errors(steps: Any) -> None:
    run([TWO_LEVEL], 512)
    with pytest.raises(Exception, match="steps do not fit"):
        run([replace(TWO_LEVEL, steps=steps)], 512)


def test_too_many_inputs_are_an_error() -> None:
    with pytest.raises(Exception, match="do not fit"):
        run([PLAIN], 321)


def test_gate_and_up_of_different_shapes_are_an_error() -> None:
    """Equal words, but fewer outputs of the one; and other words."""
    run([PLAIN, PLAIN], 320, "silu")
    other = coded(matrix(QuantFormat("4", symmetric=True), 64, 320))
    for up in (replace(PLAIN, outputs=41), other):
        for pair in ([PLAIN, up], [up, PLAIN]):
            with pytest.raises(Exception, match="not two matrices of one shape"):
                run(pair, 320, "silu")


@pytest.mark.parametrize(
    ("args", "attributes"),
    [
        ([], {"activation": np.int64(1)}),
        ([np.ones((2, 3), np.int32)], {"activation": np.int64(1)}),
        ([np.ones((2, 3), np.float32)] * 2, {"activation": np.int64(1)}),
        ([np.ones((2, 3), np.float32)], {}),
        ([np.ones((2, 3), np.float32)], {"activation": np.int32(2)}),
        ([np.ones((2, 3), np.float32)], {"another": np.int64(0)}),
        ([np.ones((2, 3), np.float32)], {"activation": np.int64(1), "more": np.int64(0)}),
    ],
)
def test_unexpected_arguments_or_attributes_are_errors(
    args: list[np.ndarray], attributes: dict[str, Any]
) -> None:
    assert build_library.register("jinfer_activate")
    result = jax.ShapeDtypeStruct((2, 3), np.float32)
    call = jax.ffi.ffi_call("jinfer_activate", result)
    jax.block_until_ready(call(np.ones((2, 3), np.float32), activation=np.int64(1)))
    with pytest.raises(Exception, match=r"INVALID_ARGUMENT|INTERNAL"):
        jax.block_until_ready(call(*args, **attributes))
    both = jax.ffi.ffi_call("jinfer_activate", [result, result])
    with pytest.raises(Exception, match=r"INVALID_ARGUMENT|INTERNAL"):
        jax.block_until_ready(both(np.ones((2, 3), np.float32), activation=np.int64(1)))


def test_activations_of_wrong_rank_are_an_error() -> None:
    assert build_library.register("jinfer_dense")
    call = jax.ffi.ffi_call("jinfer_dense", [jax.ShapeDtypeStruct((3,), np.float32)])
    more = DENSE
    with pytest.raises(Exception, match="x is no matrix"):
        jax.block_until_ready(call(jnp.ones(8), jnp.ones((3, 8)), **more))


@pytest.mark.parametrize("shape", [(3, 7), (2, 8), (3, 8, 1)])
def test_result_of_wrong_shape_is_an_error(shape: tuple[int, ...]) -> None:
    assert build_library.register("jinfer_dense")
    call = jax.ffi.ffi_call("jinfer_dense", [jax.ShapeDtypeStruct(shape, np.float32)])
    more = DENSE
    with pytest.raises(Exception, match="result's shape"):
        jax.block_until_ready(call(jnp.ones((3, 5)), jnp.ones((8, 5)), **more))


@pytest.mark.parametrize(("first", "taken"), [(-1, 2), (0, 9), (7, 2), (8, 1), (0, -1)])
def test_part_outside_the_matrix_is_an_error(first: int, taken: int) -> None:
    assert build_library.register("jinfer_dense")
    call = jax.ffi.ffi_call("jinfer_dense", [jax.ShapeDtypeStruct((3, 2), np.float32)])
    more = DENSE | {"first": np.int64(first), "taken": np.int64(taken)}
    with pytest.raises(Exception, match="not so many rows"):
        jax.block_until_ready(call(jnp.ones((3, 5)), jnp.ones((8, 5)), **more))


def test_a_codebook_is_accepted() -> None:
    run([CODED], 320)
