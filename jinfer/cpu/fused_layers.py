"""Fused layers: norms, matmuls, RoPE, activations, sums and attentions as one custom call.

A `Program` is built operation by operation. Each yields one or more values, ids of matrices [rows,
size] that later operations may use. Values that are not results exist only within the call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jax import Array

from jinfer.cpu.build_library import custom_call

if TYPE_CHECKING:
    from jaxtyping import Float, Int, UInt


class Operation(IntEnum):
    """Operations of a program, numbered as in fused_program.h."""

    NORM = 0
    LINEAR = 1
    ADD = 2
    ADD_VECTOR = 3
    SCALE = 4
    DENSE = 5
    ROTATE = 6
    ATTENTION = 7
    ACTIVATE = 8
    MULTIPLY = 9
    HADAMARD = 10
    LORA = 11


class AttentionAttributes(NamedTuple):
    """Attributes of `jinfer_attention`, in a program's order."""

    scale: float
    softcap: float
    window: int
    ahead: int
    lowest: int
    written: bool
    shared: bool
    bits: int
    levels: int
    per_code: int
    symmetric: bool
    dim: int
    value_dim: int
    int8_keys: bool

    def numbers(self) -> list[int]:
        """Encodes the attributes for a program."""
        return [_bits(x) if isinstance(x, float) else int(x) for x in self]


@dataclass
class Program:
    """Operations on rows, in order.

    Attributes:
        inputs: float32 [rows, size], all with the same number of rows: the values 0, 1, ...
        table: pointers to weights (see `jinfer.ops.fusion.weight_pointers`), or None.
        table_rows: id of a weight -> its row of the table. The call reads such a weight through its
            pointer instead of taking it as an argument.
    """

    inputs: Sequence[Float[Array, "rows size"]]
    table: UInt[Array, "weights 4"] | None = None
    table_rows: Mapping[int, int] = field(default_factory=dict)
    _numbers: list[int] = field(default_factory=list)
    _operands: list[Array] = field(default_factory=list)
    _arguments: dict[int, int] = field(default_factory=dict)  # argument index by operand id
    _layout: list[int] = field(default_factory=list)  # where each operand is; see operands.h
    _sizes: list[int] = field(default_factory=list)  # of the operations' values
    _pools: list[int] = field(default_factory=list)  # operands that attentions write to

    def norm(
        self,
        x: int,
        weight: Float[Array, "*rows width"] | None,
        bias: Float[Array, "*rows width"] | None,
        *,
        centered: bool,
        eps: float,
        offset: float,
        width: int | None = None,
    ) -> int:
        """Adds `jinfer.cpu.rowwise.norm` with the same weights and biases for all rows.

        Args:
            width: numbers of a norm, such as a head's; None: the whole row.
        """
        width = width or self._size(x)
        present = int(weight is not None), int(bias is not None)
        numbers = [int(centered), *present, _bits(eps), _bits(offset), width]
        vectors = [vector for vector in (weight, bias) if vector is not None]
        return self._add(Operation.NORM, x, numbers, vectors, [self._size(x)])[0]

    def linear(
        self,
        x: int,
        buffers: Sequence[Array],
        fields: Sequence[int],
        codebook: Sequence[int],
        *,
        digits: int,
        activation: int,
        outputs: Sequence[int],
    ) -> list[int]:
        """Adds `jinfer.cpu.matmul_call.quantized_linear`.

        Args:
            buffers, fields, codebook, digits, activation: arguments of its call.
            outputs: sizes of its results.
        """
        count = len(fields) // FIELDS
        numbers = [count, digits, activation, len(codebook), *codebook, *fields]
        return self._add(Operation.LINEAR, x, numbers, buffers, outputs)

    def dense(
        self,
        x: int,
        weights: Sequence[Float[Array, "outputs inputs"]],
        *,
        activation: int,
        transposed: bool,
        first: int,
        taken: int,
        rounded: bool,
        outputs: Sequence[int],
    ) -> list[int]:
        """Adds `jinfer.cpu.matmul_call.dense_linear`.

        Args:
            weights, activation, transposed, first, taken, rounded: arguments of its call, with
                scales after the weights that have them.
            outputs: sizes of its results.
        """
        count = 2 if activation else len(outputs)
        numbers = [count, activation, int(transposed), first, taken, int(rounded)]
        return self._add(Operation.DENSE, x, numbers, weights, outputs)

    def add(self, x: int, y: int) -> int:
        """Adds x + y."""
        return self._add(Operation.ADD, x, [y], [], [self._size(x)])[0]

    def add_vector(self, x: int, vector: Float[Array, "*one size"]) -> int:
        """Adds x + vector, with the same vector for all rows."""
        return self._add(Operation.ADD_VECTOR, x, [], [vector], [self._size(x)])[0]

    def multiply(self, x: int, y: int) -> int:
        """Adds the element-wise product x * y."""
        return self._add(Operation.MULTIPLY, x, [y], [], [self._size(x)])[0]

    def activate(self, x: int, activation: int) -> int:
        """Adds `jinfer.cpu.rowwise.activate` of the function with this number."""
        return self._add(Operation.ACTIVATE, x, [activation], [], [self._size(x)])[0]

    def scale(self, x: int, factor: float) -> int:
        """Adds x * factor."""
        return self._add(Operation.SCALE, x, [_bits(factor)], [], [self._size(x)])[0]

    def rotate(self, x: int, cos: int, sin: int, *, size: int, adjacent: bool) -> int:
        """Adds `jinfer.cpu.rowwise.rotate`."""
        numbers = [cos, sin, size, int(adjacent)]
        return self._add(Operation.ROTATE, x, numbers, [], [self._size(x)])[0]

    def hadamard(self, x: int, *, size: int, query: bool) -> int:
        """Adds `jinfer.cpu.rowwise.hadamard`."""
        return self._add(Operation.HADAMARD, x, [size, int(query)], [], [self._size(x)])[0]

    def lora(
        self,
        x: int,
        ys: Sequence[int],
        adapters: Sequence[Array],
        a: Sequence[Float[Array, "slots rank inputs"]],
        b: Sequence[Float[Array, "slots rank last"]],
    ) -> list[int]:
        """Adds `jinfer.cpu.matmul_call.add_lora`.

        Args:
            adapters: slots, scales and order of the rows.
            b: int8 matrices are followed by their factors.
        """
        sizes = [*(stack.shape[1] for stack in a), *map(self._size, ys)]
        out = self._add(Operation.LORA, x, [len(ys), *ys], [*adapters, *a, *b], sizes)
        return out[len(a) :]

    def attention(
        self,
        q: int,
        new: Sequence[int],
        indices: Sequence[Int[Array, ...]],
        biases: Sequence[Float[Array, ...]],
        pools: Sequence[Array],
        attributes: AttentionAttributes,
    ) -> list[int]:
        """Adds `attention_call.attention`, with normalized results and without biases by distance.

        Args:
            new: keys and, unless shared, values to be written to the pool first; or nothing.
            indices: rows, positions, last and tables.
            biases: sinks and slopes.
            pools: the arrays of keys, values and int8 keys.
            attributes: the call's attributes.

        Returns:
            The result, and the pools if they are written to; they can only be results of `run`.
        """
        key, value = (*new, -1, -1)[:2]
        size = self._size(q) // attributes.dim * attributes.value_dim
        numbers = [key, value, *attributes.numbers()]
        out = self._add(Operation.ATTENTION, q, numbers, [*indices, *biases], [size])
        # Never shared with other operands, which must see the old pool.
        arguments = [self._add_argument(pool) for pool in pools]
        if attributes.written:
            before = len(self._pools)
            self._pools += arguments
            out += [-1 - number for number in range(before, len(self._pools))]
        return out

    def run(self, results: Sequence[int]) -> Sequence[Array]:
        """Runs the program; results are values of operations, float32 [rows, size], or pools."""
        rows = self.inputs[0].shape[0]
        values = [value for value in results if value >= 0]
        shapes = [jax.ShapeDtypeStruct((rows, self._size(value)), np.float32) for value in values]
        pools = [self._operands[index] for index in self._pools]
        shapes += [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools]
        has_layout = any(number != -1 for number in self._layout)  # else all weights are arguments
        first = len(self.inputs) + has_layout
        aliases = {first + index: len(values) + i for i, index in enumerate(self._pools)}
        call = custom_call("jinfer_fused_layers", shapes, aliases=aliases)
        out = call(
            *self.inputs,
            *([self.table] if has_layout else []),
            *self._operands,
            program=np.array(self._numbers, np.int64),
            results=np.array(values, np.int64),
            inputs=np.int64(len(self.inputs)),
            operands=np.array(self._layout if has_layout else [], np.int64),
        )
        computed = iter(out)
        return [out[len(values) - 1 - value] if value < 0 else next(computed) for value in results]

    def _size(self, value: int) -> int:
        count = len(self.inputs)
        return self.inputs[value].shape[1] if value < count else self._sizes[value - count]

    def _add(
        self,
        kind: Operation,
        x: int,
        numbers: Sequence[int],
        operands: Sequence[Array],
        sizes: Sequence[int],
    ) -> list[int]:
        first = len(self.inputs) + len(self._sizes)
        self._numbers += [int(kind), x, *numbers]
        for operand in operands:
            row = self.table_rows.get(id(operand))
            if row is None:
                before = None if self.table is None else self._arguments.get(id(operand))
                if before is None:
                    self._arguments[id(operand)] = self._add_argument(operand)
                else:
                    self._layout.append(-2 - before)
            else:
                shape = operand.shape
                self._layout += [row, _TYPES[np.dtype(operand.dtype).name], len(shape), *shape]
        self._sizes += sizes
        return list(range(first, first + len(sizes)))

    def _add_argument(self, operand: Array) -> int:
        """Adds an argument to the call; returns its index among the operands' arguments."""
        self._operands.append(operand)
        self._layout.append(-1)
        return len(self._operands) - 1


# XLA's dtype numbers.
_TYPES = {"int8": 2, "uint32": 8, "float16": 10, "float32": 11, "bfloat16": 16}
_TYPES["float8_e4m3fn"] = 20
FIELDS = 8  # numbers of a matrix; see `Field` in linear_driver.h


def _bits(number: float) -> int:
    return int(np.float32(number).view(np.int32))
