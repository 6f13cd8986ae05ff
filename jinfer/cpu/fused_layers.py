"""Norms, products with matrices, rotations, activations, sums and attentions, as one custom call.

A `Program` is written operation by operation; each gives one or more values, which stand for
matrices [rows, size] and may be given to the ones after it. What is not asked for at the end is
never written anywhere that XLA knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jax import Array

from jinfer.cpu import build_library

if TYPE_CHECKING:
    from jaxtyping import Float, Int, UInt


class Operation(IntEnum):
    """The numbers are those of its namesake in fused_layers.cc."""

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


def available() -> bool:
    """Whether the custom call exists on this machine; compiles it the first time."""
    return build_library.register("jinfer_chain")


class Attending(NamedTuple):
    """The attributes of `jinfer_attention`, in the order in which a program has them."""

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

    def numbers(self) -> list[int]:
        """As a program has them."""
        return [_bits(x) if isinstance(x, float) else int(x) for x in self]


@dataclass
class Program:
    """Operations on rows, one after the other.

    Attributes:
        given: float32 [rows, size], all of equally many rows: the values 0, 1, ...
        table: where weights are (see `jinfer.ops.fusion.weight_pointers`), or None.
        told: by the id of a weight: its row of the table. The call is told its address and type
            instead of being given it.
    """

    given: Sequence[Float[Array, "rows size"]]
    table: UInt[Array, "weights 4"] | None = None
    told: Mapping[int, int] = field(default_factory=dict)
    _numbers: list[int] = field(default_factory=list)
    _operands: list[Array] = field(default_factory=list)
    _arguments: dict[int, int] = field(default_factory=dict)  # where an operand is one, by its id
    _told: list[int] = field(default_factory=list)  # of all operands; see operands.h
    _sizes: list[int] = field(default_factory=list)  # of values that operations give
    _pools: list[int] = field(default_factory=list)  # operands that attentions write to

    def norm(
        self,
        x: int,
        weight: Float[Array, "*one each"] | None,
        bias: Float[Array, "*one each"] | None,
        *,
        centered: bool,
        eps: float,
        offset: float,
        each: int | None = None,
    ) -> int:
        """As `jinfer.cpu.rowwise.norm`, with the same weights and biases for all rows.

        Args:
            each: numbers of a norm, of which a row may have several, those of heads; None: all.
        """
        there, each = (weight is not None, bias is not None), each or self._size(x)
        numbers = [int(centered), *map(int, there), _bits(eps), _bits(offset), each]
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
        """As `jinfer.cpu.quantized_matmul.coded_linear`.

        Args:
            buffers, fields, codebook, digits, activation: what it gives to its call.
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
        """As `jinfer.cpu.dense_matmul.dense_linear`.

        Args:
            weights, activation, transposed, first, taken, rounded: what it gives to its call.
            outputs: sizes of its results.
        """
        numbers = [len(weights), activation, int(transposed), first, taken, int(rounded)]
        return self._add(Operation.DENSE, x, numbers, weights, outputs)

    def add(self, x: int, y: int) -> int:
        """x + y."""
        return self._add(Operation.ADD, x, [y], [], [self._size(x)])[0]

    def add_vector(self, x: int, vector: Float[Array, "*one size"]) -> int:
        """x + vector, the same for all rows."""
        return self._add(Operation.ADD_VECTOR, x, [], [vector], [self._size(x)])[0]

    def multiply(self, x: int, y: int) -> int:
        """x * y, number by number."""
        return self._add(Operation.MULTIPLY, x, [y], [], [self._size(x)])[0]

    def activate(self, x: int, activation: int) -> int:
        """As `jinfer.cpu.rowwise.activate`, of the function with this number."""
        return self._add(Operation.ACTIVATE, x, [activation], [], [self._size(x)])[0]

    def scale(self, x: int, factor: float) -> int:
        """x * factor."""
        return self._add(Operation.SCALE, x, [_bits(factor)], [], [self._size(x)])[0]

    def rotate(self, x: int, cos: int, sin: int, *, size: int, adjacent: bool) -> int:
        """As `jinfer.cpu.rowwise.rotate`."""
        numbers = [cos, sin, size, int(adjacent)]
        return self._add(Operation.ROTATE, x, numbers, [], [self._size(x)])[0]

    def hadamard(self, x: int, *, size: int, query: bool) -> int:
        """As `jinfer.cpu.rowwise.hadamard`."""
        return self._add(Operation.HADAMARD, x, [size, int(query)], [], [self._size(x)])[0]

    def attend(
        self,
        q: int,
        new: Sequence[int],
        places: Sequence[Int[Array, ...]],
        numbers: Sequence[Float[Array, ...]],
        pools: Sequence[Array],
        kind: Attending,
    ) -> list[int]:
        """As `attention_call.attention`, with whole results and without biases by distance.

        Args:
            new: keys and, unless shared, values that are first put into the pool; or none.
            places: rows, positions, last and tables.
            numbers: sinks and slopes.
            pools: the arrays of keys and values.
            kind: what the call is told else.

        Returns:
            The result, and the pools where they are written to: these only `run` may be asked for.
        """
        key, value = (*new, -1, -1)[:2]
        result = self._size(q) // kind.dim * kind.value_dim
        own = [key, value, *kind.numbers()]
        out = self._add(Operation.ATTENTION, q, own, [*places, *numbers], [result])
        # Each an argument of its own: who else reads a pool sees it as it was.
        given = [self._give(pool) for pool in pools]
        if kind.written:
            before = len(self._pools)
            self._pools += given
            out += [-1 - number for number in range(before, len(self._pools))]
        return out

    def run(self, results: Sequence[int]) -> Sequence[Array]:
        """The values with these numbers, which operations gave: float32 [rows, size], or pools."""
        rows = self.given[0].shape[0]
        values = [one for one in results if one >= 0]
        shapes = [jax.ShapeDtypeStruct((rows, self._size(one)), np.float32) for one in values]
        pools = [self._operands[place] for place in self._pools]
        shapes += [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools]
        some = any(number != -1 for number in self._told)  # else there is nothing to tell
        first = len(self.given) + some
        aliases = {first + place: len(values) + i for i, place in enumerate(self._pools)}
        call = jax.ffi.ffi_call("jinfer_chain", shapes, input_output_aliases=aliases)
        out = call(
            *self.given,
            *([self.table] if some else []),
            *self._operands,
            program=np.array(self._numbers, np.int64),
            results=np.array(values, np.int64),
            given=np.int64(len(self.given)),
            told=np.array(self._told if some else [], np.int64),
        )
        left = iter(out)
        return [out[len(values) - 1 - one] if one < 0 else next(left) for one in results]

    def _size(self, value: int) -> int:
        known = len(self.given)
        return self.given[value].shape[1] if value < known else self._sizes[value - known]

    def _add(
        self,
        kind: Operation,
        x: int,
        numbers: Sequence[int],
        operands: Sequence[Array],
        sizes: Sequence[int],
    ) -> list[int]:
        first = len(self.given) + len(self._sizes)
        self._numbers += [int(kind), x, *numbers]
        for operand in operands:
            row = self.told.get(id(operand))
            if row is None:
                before = None if self.table is None else self._arguments.get(id(operand))
                if before is None:
                    self._arguments[id(operand)] = self._give(operand)
                else:
                    self._told.append(-2 - before)
            else:
                shape = operand.shape
                self._told += [row, _TYPES[np.dtype(operand.dtype).name], len(shape), *shape]
        self._sizes += sizes
        return list(range(first, first + len(sizes)))

    def _give(self, operand: Array) -> int:
        """Gives the call one more argument; which of its operands' it is."""
        self._operands.append(operand)
        self._told.append(-1)
        return len(self._operands) - 1


# XLA's numbers of the types that weights have.
_TYPES = {"int8": 2, "uint32": 8, "float16": 10, "float32": 11, "bfloat16": 16}
FIELDS = 8  # that describe a matrix; see `Field` in linear_driver.h


def _bits(number: float) -> int:
    return int(np.float32(number).view(np.int32))
