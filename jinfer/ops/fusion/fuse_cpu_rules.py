"""Operator fusion rules on CPUs: which jaxpr operations are row-wise, or attention, and fusible."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jinfer.cpu.fused_layers import AttentionAttributes, Program
from jinfer.ops.fusion.jaxpr_walk import JaxprOperation, JaxprValue, Operand

type Known = Mapping[JaxprValue, Any]  # an array's slot -> the array
type Producers = Mapping[
    JaxprValue, JaxprOperation
]  # an array's slot -> the operation that produces it


# Primitives that only change a shape, if the number of elements stays the same.
MOVES = ("reshape", "squeeze", "broadcast_in_dim")


@dataclass(frozen=True)
class FusibleOperation:
    """An operation that a fused `Program` can compute.

    Attributes:
        rows: rows of its matrices: all axes but the last one flattened, or fewer where a row spans
            several axes, as a token's heads do.
        operands: its operands that are matrices of rows.
        add: adds it to a program by the ids of its operands there; returns the ids of its results.
        product: whether it is a matmul or attention, worth a call of its own.
        moves: whether it only reshapes.
    """

    rows: int
    operands: tuple[Operand, ...]
    add: Callable[[Program, Sequence[int], Known], list[int]]
    product: bool = False
    moves: bool = False


_DENSE = ("activation", "first", "taken", "transposed", "rounded")

type Fusible = Mapping[JaxprOperation, FusibleOperation]


def fusible_operation(
    operation: JaxprOperation, makers: Producers, found: Fusible
) -> FusibleOperation | None:
    """Returns the fusible form of an operation; None if it cannot be fused.

    Args:
        found: fusible operations before it.
    """
    result = operation.results[0].aval
    if result.dtype != jnp.float32 or 0 in result.shape:
        return None
    match operation.name:
        case "ffi_call":
            return _custom_call(operation, makers, found)
        case name if name in MOVES:
            return _reshape(operation, makers, found)
        case "add":
            return _add(operation, makers, found)
        case "mul":
            return _scale(operation, makers, found) or _multiply(operation, makers, found)
    return None


def _rows(rows: int, operands: Sequence[Operand], makers: Producers, found: Fusible) -> int:
    """Returns an operation's number of rows: its producers', if its rows are parts of theirs."""
    makes = [maker for operand in operands if (maker := producer_of(operand, makers)) is not None]
    before = {found[maker].rows for maker in makes if maker in found}
    own = before.pop() if len(before) == 1 else rows
    return own if rows % own == 0 else rows


def producer_of(operand: Operand, makers: Producers) -> JaxprOperation | None:
    """Returns the operation that produces an operand, if any."""
    return makers.get(operand) if isinstance(operand, JaxprValue) else None


def _custom_call(
    operation: JaxprOperation, makers: Producers, found: Fusible
) -> FusibleOperation | None:
    match operation.eqn.params["target_name"]:
        case "jinfer_linear":
            return _linear(operation)
        case "jinfer_dense":
            return _dense(operation)
        case "jinfer_norm":
            return _norm(operation, makers, found)
        case "jinfer_rotate":
            return _same_rows(operation, Program.rotate, "size", "adjacent")
        case "jinfer_hadamard":
            return _same_rows(operation, Program.hadamard, "size", "query")
        case "jinfer_activate":
            return _activate(operation, makers, found)
        case "jinfer_attention":
            return _attention(operation)
        case "jinfer_lora":
            return _lora(operation)
    return None


def _linear(operation: JaxprOperation) -> FusibleOperation | None:
    attributes = _attributes(operation)
    if attributes["select"] != 0:
        return None
    x, *buffers = operation.operands
    fixed: dict[str, Any] = {
        "digits": attributes["digits"],
        "activation": attributes["activation"],
        "outputs": [out.aval.shape[1] for out in operation.results],
    }
    fields, codebook = attributes["tensors"], attributes["codebook"]

    def add(program: Program, values: Sequence[int], known: Known) -> list[int]:
        read = [known[buffer] for buffer in buffers]
        return program.linear(values[0], read, fields, codebook, **fixed)

    return FusibleOperation(x.aval.shape[0], (x,), add, product=True)


def _dense(operation: JaxprOperation) -> FusibleOperation | None:
    attributes = _attributes(operation)
    x, *weights = operation.operands
    if attributes["select"] != 0 or 0 in x.aval.shape:
        return None
    fixed: dict[str, Any] = {
        **{name: attributes[name] for name in _DENSE},
        "outputs": [out.aval.shape[1] for out in operation.results],
    }

    def add(program: Program, values: Sequence[int], known: Known) -> list[int]:
        return program.dense(values[0], [known[weight] for weight in weights], **fixed)

    return FusibleOperation(x.aval.shape[0], (x,), add, product=True)


def _norm(operation: JaxprOperation, makers: Producers, found: Fusible) -> FusibleOperation | None:
    attributes = _attributes(operation)
    x, *vectors = operation.operands
    if any(vector.aval.shape[0] != 1 for vector in vectors):
        return None  # a different weight vector for each head
    vectors = [_as_stored(vector, makers, found) for vector in vectors]
    kind = {name: attributes[name] for name in ("centered", "eps", "offset")}
    rows, columns = x.aval.shape

    def add(program: Program, values: Sequence[int], known: Known) -> list[int]:
        left = iter(vectors)
        weight = known[next(left)] if attributes["weighted"] else None
        bias = known[next(left)] if attributes["biased"] else None
        return [program.norm(values[0], weight, bias, **kind, width=columns)]

    return FusibleOperation(_rows(rows, (x,), makers, found), (x,), add)


def _same_rows(
    operation: JaxprOperation, method: Callable[..., int], *names: str
) -> FusibleOperation:
    """Matches a custom call whose operands all have the rows of its result."""
    attributes = _attributes(operation)
    kind = {name: attributes[name] for name in names}

    def add(program: Program, values: Sequence[int], _: Known) -> list[int]:
        return [method(program, *values, **kind)]

    return FusibleOperation(operation.operands[0].aval.shape[0], operation.operands, add)


def _activate(operation: JaxprOperation, makers: Producers, found: Fusible) -> FusibleOperation:
    x, number = operation.operands[0], _attributes(operation)["activation"]

    def add(program: Program, values: Sequence[int], _: Known) -> list[int]:
        return [program.activate(values[0], number)]

    return FusibleOperation(_rows(x.aval.shape[0], (x,), makers, found), (x,), add)


def _attention(operation: JaxprOperation) -> FusibleOperation | None:
    """Matches attention with its new keys and values, if it is complete on this device."""
    attributes = _attributes(operation)
    q, *ranges = operation.operands[:5]
    *numbers, distances = operation.operands[5:8]
    if attributes["partial"] or distances.aval.size:
        return None
    new = (2 - attributes["shared"]) * attributes["written"]
    matrices, pools = operation.operands[8 : 8 + new], operation.operands[8 + new :]
    kind = AttentionAttributes(*(attributes[name] for name in AttentionAttributes._fields))

    def add(program: Program, values: Sequence[int], known: Known) -> list[int]:
        where, own, read = (
            [known[operand] for operand in operands] for operands in (ranges, numbers, pools)
        )
        return program.attention(values[0], values[1:], where, own, read, kind)

    return FusibleOperation(q.aval.shape[0], (q, *matrices), add, product=True)


def _lora(operation: JaxprOperation) -> FusibleOperation:
    count = len(operation.results)
    x, *others = operation.operands
    ys, others = others[:count], others[count:]
    adapters, a, b = others[:3], others[3 : 3 + count], others[3 + count :]

    def add(program: Program, values: Sequence[int], known: Known) -> list[int]:
        rows, first, second = (
            [known[operand] for operand in operands] for operands in (adapters, a, b)
        )
        return program.lora(values[0], values[1:], rows, first, second)

    return FusibleOperation(x.aval.shape[0], (x, *ys), add, product=True)


def _reshape(
    operation: JaxprOperation, makers: Producers, found: Fusible
) -> FusibleOperation | None:
    """Matches a reshape of a fusible result, if rows stay whole or are split into heads."""
    x, shape = operation.operands[0], operation.results[0].aval.shape
    maker = producer_of(x, makers)
    row = None if maker is None else found.get(maker)
    if row is None or math.prod(shape) != math.prod(x.aval.shape):
        return None
    turned = operation.name == "reshape" and operation.eqn.params["dimensions"] is not None
    if turned or not shape or math.prod(shape[:-1]) % row.rows:
        return None
    return FusibleOperation(row.rows, (x,), lambda _, values, __: [values[0]], moves=True)


def _add(operation: JaxprOperation, makers: Producers, found: Fusible) -> FusibleOperation | None:
    shape = operation.results[0].aval.shape
    if len(shape) < 2:
        return None
    rows = math.prod(shape[:-1])
    a, b = operation.operands
    for x, other in ((a, b), (b, a)):
        vector = _repeated(other, shape, makers)
        # A fusible operation's result stays within the call: with one row it looks like a vector.
        own = vector is not None and producer_of(vector, makers) in found
        if vector is not None and not own and x.aval.shape == shape:

            def add_vector(
                program: Program, values: Sequence[int], known: Known, vector: Any = vector
            ) -> list[int]:
                return [program.add_vector(values[0], known[vector])]

            return FusibleOperation(rows, (x,), add_vector)
    if any(operand.aval.shape != shape for operand in (a, b)):
        return None
    rows = _rows(rows, (a, b), makers, found)
    return FusibleOperation(rows, (a, b), lambda program, values, _: [program.add(*values)])


def _scale(operation: JaxprOperation, makers: Producers, found: Fusible) -> FusibleOperation | None:
    """Matches the product of a matrix and a known number."""
    for x, by in (operation.operands, operation.operands[::-1]):
        shape = x.aval.shape
        if isinstance(by, Literal) and np.shape(by.val) == () and len(shape) > 1:
            factor = float(by.val)

            def add(
                program: Program, values: Sequence[int], _: Known, factor: float = factor
            ) -> list[int]:
                return [program.scale(values[0], factor)]

            rows = _rows(math.prod(shape[:-1]), (x,), makers, found)
            return FusibleOperation(rows, (x,), add)
    return None


def _multiply(
    operation: JaxprOperation, makers: Producers, found: Fusible
) -> FusibleOperation | None:
    """Matches the element-wise product of two matrices."""
    shape = operation.results[0].aval.shape
    if len(shape) < 2 or any(operand.aval.shape != shape for operand in operation.operands):
        return None
    if any(isinstance(operand, Literal) for operand in operation.operands):
        return None
    rows = _rows(math.prod(shape[:-1]), operation.operands, makers, found)
    return FusibleOperation(
        rows, operation.operands, lambda program, values, _: [program.multiply(*values)]
    )


def _repeated(operand: Operand, shape: tuple[int, ...], makers: Producers) -> JaxprValue | None:
    """Returns the vector that an operand repeats in each row of a matrix, if it does."""
    if isinstance(operand, Literal):
        return None
    maker, size = producer_of(operand, makers), shape[-1:]
    if operand.aval.shape != shape:
        vector = operand
    elif maker is not None and maker.name == "broadcast_in_dim":
        (vector, *_), axes = maker.operands, maker.eqn.params["broadcast_dimensions"]
        if isinstance(vector, Literal) or axes[-1:] != (len(shape) - 1,):
            return None
    else:
        return None
    own: tuple[int, ...] = vector.aval.shape
    return vector if own[-1:] == size and math.prod(own) == size[0] else None


def _as_stored(vector: Operand, makers: Producers, found: Fusible) -> Operand:
    """Returns a vector before an axis of size 1 was added: the stored weight, if possible."""
    maker = producer_of(vector, makers)
    if maker is None or maker.name not in ("reshape", "broadcast_in_dim"):
        return vector
    stored = maker.operands[0]
    same = math.prod(stored.aval.shape) == math.prod(vector.aval.shape)
    if not same or isinstance(stored, Literal) or producer_of(stored, makers) in found:
        return vector
    return stored


def _attributes(operation: JaxprOperation) -> dict[str, Any]:
    """Returns the attributes of a custom call as Python numbers and lists."""
    attributes = dict(operation.eqn.params["attributes"])
    return {
        name: np.asarray(getattr(operand, "val", operand)).tolist()
        for name, operand in attributes.items()
    }
