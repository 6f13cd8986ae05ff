"""Fused layers: one custom call gives the bits of the separate calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.cpu import build_library, rowwise
from jinfer.cpu.fused_layers import Program
from jinfer.cpu.isa import Isa
from jinfer.cpu.matmul_call import (
    ACTIVATIONS,
    QuantizedMatrix,
    dense_linear,
    fields_of,
    quantized_linear,
)
from jinfer.ops.fusion.weight_pointers import table
from jinfer.quant_format import QuantFormat
from tests.arrays import on_device
from tests.cpu.helpers import isas
from tests.cpu.test_quantized_matmul import coded, matrix

pytestmark = pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")

FOUR = QuantFormat("4", symmetric=True)
COUNTS = (1, 3, 17, 130)


def random(*shape: int, seed: int = 0) -> jax.Array:
    return on_device(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def arrays(one: Any) -> list[jax.Array]:
    """Those of a matrix."""
    parts = (one.words, one.scales, one.steps) if isinstance(one, QuantizedMatrix) else (one,)
    return [part for part in parts if part is not None]


def product(
    program: Program, x: int, matrices: Sequence[QuantizedMatrix], activation: str = "none"
) -> list[int]:
    buffers = [part for m in matrices for part in arrays(m)]
    fields = [number for m in matrices for number in fields_of(m)]
    codebook = next((m.codebook for m in matrices if m.codebook is not None), ())
    results = matrices if activation == "none" else matrices[:1]
    return program.linear(
        x,
        buffers,
        fields,
        codebook,
        digits=1,
        activation=ACTIVATIONS.index(activation),
        outputs=[m.outputs for m in results],
    )


def one_norm(x: Any, weight: Any, bias: Any = None, *, centered: bool = False) -> Any:
    return rowwise.norm(x, weight, bias, centered=centered, eps=1e-5, offset=0.0)


class Quantized:
    """Products with matrices of a format, fused and alone."""

    def __init__(self, format: QuantFormat = FOUR) -> None:
        self.format = format

    def matrix(self, *shape: int, seed: int) -> Any:
        return coded(jax.device_put(matrix(self.format, *shape, seed=seed)))

    def add(self, program: Program, x: int, of: Sequence[Any], activation: str) -> list[int]:
        return product(program, x, of, activation)

    def alone(self, x: Any, of: Sequence[Any], activation: str) -> Sequence[Any]:
        return quantized_linear(x, of, activation=activation)


class Plain:
    """The same with plain matrices."""

    def __init__(self, dtype: Any, rounded: bool = False) -> None:
        self.dtype, self.rounded = dtype, rounded

    def matrix(self, *shape: int, seed: int) -> Any:
        return random(*shape, seed=seed).astype(self.dtype)

    def add(self, program: Program, x: int, of: Sequence[Any], activation: str) -> list[int]:
        return program.dense(
            x,
            of,
            activation=ACTIVATIONS.index(activation),
            transposed=False,
            first=0,
            taken=0,
            rounded=self.rounded,
            outputs=[m.shape[0] for m in (of if activation == "none" else of[:1])],
        )

    def alone(self, x: Any, of: Sequence[Any], activation: str) -> Sequence[Any]:
        return dense_linear(x, of, activation=activation, rounded=self.rounded)


class Layer:
    """What a layer does after its attention, and the projections of the next one."""

    def __init__(self, hidden: int, width: int, kind: Quantized | Plain | None = None) -> None:
        self.kind = kind or Quantized()
        shapes = {
            "o": (hidden, hidden),
            "gate": (width, hidden),
            "up": (width, hidden),
            "down": (hidden, width),
            "q": (hidden, hidden),
            "k": (hidden // 2, hidden),
        }
        self.of = {
            name: self.kind.matrix(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())
        }
        self.weight, self.bias = random(1, hidden, seed=7), random(1, hidden, seed=8)

    def fused(self, x: Any, attended: Any, **weights: Any) -> Sequence[Any]:
        program = Program([x, attended], **weights)

        def product(x: int, *names: str, activation: str = "none") -> list[int]:
            return self.kind.add(program, x, [self.of[name] for name in names], activation)

        (o,) = product(1, "o")
        x1 = program.add(0, o)
        normal = program.norm(x1, self.weight, None, centered=False, eps=1e-5, offset=0.0)
        (h,) = product(normal, "gate", "up", activation="silu")
        (down,) = product(h, "down")
        x2 = program.add(x1, program.scale(down, 0.25))
        x3 = program.add_vector(x2, self.bias[0])
        after = program.norm(x3, self.weight, self.bias, centered=True, eps=1e-5, offset=0.0)
        return program.run([x3, *product(after, "q", "k"), h])

    def apart(self, x: Any, attended: Any) -> Sequence[Any]:
        def product(x: Any, *names: str, activation: str = "none") -> Sequence[Any]:
            return self.kind.alone(x, [self.of[name] for name in names], activation)

        x1 = x + product(attended, "o")[0]
        normal = one_norm(x1, self.weight)
        (h,) = product(normal, "gate", "up", activation="silu")
        x2 = x1 + product(h, "down")[0] * 0.25
        x3 = x2 + self.bias
        after = one_norm(x3, self.weight, self.bias, centered=True)
        return [x3, *product(after, "q", "k"), h]


KINDS: dict[str, Quantized | Plain] = {
    "q4": Quantized(),
    "f32": Plain(jnp.float32),
    "bf16": Plain(jnp.bfloat16),
    "f16": Plain(jnp.float16),
    "rounded": Plain(jnp.bfloat16, rounded=True),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("hidden", [64, 96, 576])
def test_fused_layer_has_the_bits_of_separate_calls(hidden: int, isa: Isa, kind: str) -> None:
    layer = Layer(hidden, 3 * hidden, KINDS[kind])
    for count in COUNTS:
        x, attended = random(count, hidden, seed=count), random(count, hidden, seed=count + 1)
        with build_library.lowered_isa(isa):
            got = jax.jit(layer.fused)(x, attended)
            expected = [on_device(part) for part in layer.apart(x, attended)]
            for a, b in zip(got, expected, strict=True):
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(
    "format",
    [
        QuantFormat("3.5", symmetric=True),
        QuantFormat("8", symmetric=True),
        QuantFormat("4", 32, False, two_level=True),
        QuantFormat("4", symmetric=True, codebook=tuple(range(16))),
    ],
    ids=["pairs", "bytes", "two-level", "codebook"],
)
def test_formats(format: QuantFormat) -> None:
    layer = Layer(256, 512, Quantized(format))
    x, attended = random(5, 256), random(5, 256, seed=1)
    for a, b in zip(layer.fused(x, attended), layer.apart(x, attended), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_parallel_products() -> None:
    """Both take the same rows, so they are one stage; one result is used twice."""
    left, right = coded(matrix(FOUR, 64, 128)), coded(matrix(FOUR, 96, 128, seed=1))
    x = random(4, 128)
    program = Program([x])
    (a,), (b,) = product(program, 0, [left]), product(program, 0, [right])
    got = program.run([b, a])
    expected = quantized_linear(x, [left, right])
    np.testing.assert_array_equal(np.asarray(got[0]), np.asarray(expected[1]))
    np.testing.assert_array_equal(np.asarray(got[1]), np.asarray(expected[0]))


def test_weights_by_pointer_give_the_bits_of_arguments() -> None:
    """One after the other, and both kinds in one call."""
    for kind in KINDS.values():
        layer = Layer(96, 288, kind)
        weights = [part for one in layer.of.values() for part in arrays(one)] + [layer.weight]
        where = table(weights)
        x, attended = random(3, 96), random(3, 96, seed=1)
        expected = layer.fused(x, attended)
        for some in (weights, weights[::2]):
            rows = {id(one): row for row, one in enumerate(weights) if any(one is w for w in some)}
            got = layer.fused(x, attended, table=where, table_rows=rows)
            for a, b in zip(got, expected, strict=True):
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_no_rows() -> None:
    program = Program([random(0, 128)])
    (a,) = product(program, 0, [coded(matrix(FOUR, 64, 128))])
    assert program.run([a])[0].shape == (0, 64)


def test_concurrent_calls() -> None:
    """Calls on several threads each have memory of their own."""
    layer = Layer(576, 1536)
    run = jax.jit(layer.fused)
    given = [(random(3, 576, seed=i), random(3, 576, seed=i + 50)) for i in range(12)]
    alone = [jax.block_until_ready(run(*each)) for each in given]
    together = jax.block_until_ready([run(*each) for each in given for _ in range(4)])
    for i, got in enumerate(together):
        for a, b in zip(got, alone[i // 4], strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
