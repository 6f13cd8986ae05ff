"""Fused layers: one custom call gives the bits of the separate calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.cpu import build_library, rowwise
from jinfer.cpu.dense_matmul import dense_linear
from jinfer.cpu.fused_layers import Operation, Program
from jinfer.cpu.isa import Isa
from jinfer.cpu.quantized_matmul import ACTIVATIONS, QuantizedMatrix, fields_of, quantized_linear
from jinfer.modelspec.quant_format import QuantFormat
from jinfer.ops.fusion.weight_pointers import table
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
def test_a_layer_has_the_bits_of_its_calls(hidden: int, isa: Isa, kind: str) -> None:
    layer = Layer(hidden, 3 * hidden, KINDS[kind])
    for count in COUNTS:
        x, attended = random(count, hidden, seed=count), random(count, hidden, seed=count + 1)
        with build_library.lowered_isa(isa):
            got = jax.jit(layer.fused)(x, attended)
            wanted = [on_device(part) for part in layer.apart(x, attended)]
            for a, b in zip(got, wanted, strict=True):
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


def test_products_side_by_side() -> None:
    """Both take the same rows, so they are one stage; only one's result is asked for twice."""
    left, right = coded(matrix(FOUR, 64, 128)), coded(matrix(FOUR, 96, 128, seed=1))
    x = random(4, 128)
    program = Program([x])
    (a,), (b,) = product(program, 0, [left]), product(program, 0, [right])
    got = program.run([b, a])
    wanted = quantized_linear(x, [left, right])
    np.testing.assert_array_equal(np.asarray(got[0]), np.asarray(wanted[1]))
    np.testing.assert_array_equal(np.asarray(got[1]), np.asarray(wanted[0]))


def test_weights_by_pointer_give_the_bits_of_arguments() -> None:
    """One after the other, and both kinds in one call."""
    for kind in KINDS.values():
        layer = Layer(96, 288, kind)
        weights = [part for one in layer.of.values() for part in arrays(one)] + [layer.weight]
        where = table(weights)
        x, attended = random(3, 96), random(3, 96, seed=1)
        wanted = layer.fused(x, attended)
        for some in (weights, weights[::2]):
            rows = {id(one): row for row, one in enumerate(weights) if any(one is w for w in some)}
            got = layer.fused(x, attended, table=where, table_rows=rows)
            for a, b in zip(got, wanted, strict=True):
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_no_rows() -> None:
    program = Program([random(0, 128)])
    (a,) = product(program, 0, [coded(matrix(FOUR, 64, 128))])
    assert program.run([a])[0].shape == (0, 64)


def test_many_at_once() -> None:
    """Calls on several threads each have memory of their own."""
    layer = Layer(576, 1536)
    run = jax.jit(layer.fused)
    given = [(random(3, 576, seed=i), random(3, 576, seed=i + 50)) for i in range(12)]
    alone = [jax.block_until_ready(run(*each)) for each in given]
    together = jax.block_until_ready([run(*each) for each in given for _ in range(4)])
    for i, got in enumerate(together):
        for a, b in zip(got, alone[i // 4], strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


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
        jax.ffi.ffi_call("jinfer_fused_layers", out)(
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
    "attention without a place": ("out of range", lambda: call([*ATTENTION, 16, 16], [1], X)),
    "heads of another size": ("heads that do not", lambda: call([*ATTENTION, 48, 16], [1], X)),
    "heads of no size": ("heads that do not", lambda: call([*ATTENTION, 0, 16], [1], X)),
    "keys that are not there": (
        "heads that do not",
        lambda: call([*ATTENTION[:2], 0, 5, *ATTENTION[4:9], 1, *ATTENTION[10:], 16, 16], [1], X),
    ),
    "pools that are no results": (
        "out of range",
        lambda: call(
            [*ATTENTION[:2], 0, 0, *ATTENTION[4:9], 1, *ATTENTION[10:], 16, 16],
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
def test_what_does_not_fit_is_refused(name: str) -> None:
    what, refused = REFUSED[name]
    with pytest.raises(Exception, match=what):
        refused()
