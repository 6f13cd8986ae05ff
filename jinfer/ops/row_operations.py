"""Which operations of a traced function compute each row of a matrix by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from jinfer.cpu.chain import Program

type Known = Mapping[Any, Any]  # variable -> its array


@dataclass(frozen=True)
class RowOperation:
    """One that a `Program` can do.

    Attributes:
        rows: of its matrices, all axes but the last one counted together.
        operands: those of its operands that are matrices of rows.
        add: puts it into a program, given its operands' values there, and gives its results'.
        product: whether it is worth a call of its own.
        moves: whether it computes nothing.
    """

    rows: int
    operands: tuple[Any, ...]
    add: Callable[[Program, Sequence[int], Known], list[int]]
    product: bool = False
    moves: bool = False


def row_operation(
    eqn: JaxprEqn, makers: Mapping[Any, JaxprEqn], found: Mapping[int, RowOperation]
) -> RowOperation | None:
    """What an equation is, if it is one.

    Args:
        makers: the equation that gives each variable.
        found: those before it, by the equation's id.
    """
    if any(_aval(out).dtype != jnp.float32 for out in eqn.outvars):
        return None
    match eqn.primitive.name:
        case "ffi_call":
            return _custom_call(eqn, makers)
        case "reshape":
            return _reshape(eqn, makers, found)
        case "add":
            return _add(eqn, makers)
        case "mul":
            return _scale(eqn)
    return None


def _custom_call(eqn: JaxprEqn, makers: Mapping[Any, JaxprEqn]) -> RowOperation | None:
    match eqn.params["target_name"]:
        case "jinfer_linear":
            return _linear(eqn)
        case "jinfer_dense":
            return _dense(eqn)
        case "jinfer_norm":
            return _norm(eqn, makers)
        case "jinfer_rotate":
            return _rotate(eqn)
    return None


def _linear(eqn: JaxprEqn) -> RowOperation | None:
    given = _attributes(eqn)
    if given["select"] != 0:
        return None
    x, *buffers = eqn.invars
    fixed: dict[str, Any] = {
        "exact": bool(given["exact"]),
        "activation": int(given["activation"]),
        "outputs": [_aval(var).shape[1] for var in eqn.outvars],
    }
    fields, codebook = given["tensors"].tolist(), given["codebook"].tolist()

    def add(program: Program, values: Sequence[int], known: Known) -> list[int]:
        read = [known[buffer] for buffer in buffers]
        return program.linear(values[0], read, fields, codebook, **fixed)

    return RowOperation(_aval(x).shape[0], (x,), add, product=True)


def _dense(eqn: JaxprEqn) -> RowOperation | None:
    given = _attributes(eqn)
    x, *weights = eqn.invars
    if given["select"] != 0 or 0 in _aval(x).shape:
        return None
    fixed: dict[str, Any] = {
        **{name: int(given[name]) for name in ("activation", "first", "taken")},
        **{name: bool(given[name]) for name in ("transposed", "rounded")},
        "outputs": [_aval(var).shape[1] for var in eqn.outvars],
    }

    def add(program: Program, values: Sequence[int], known: Known) -> list[int]:
        return program.dense(values[0], [known[weight] for weight in weights], **fixed)

    return RowOperation(_aval(x).shape[0], (x,), add, product=True)


def _norm(eqn: JaxprEqn, makers: Mapping[Any, JaxprEqn]) -> RowOperation | None:
    given = _attributes(eqn)
    x, *vectors = eqn.invars
    if any(_aval(vector).shape[0] != 1 for vector in vectors):
        return None  # rows are heads with weights of their own
    vectors = [_as_stored(vector, makers) for vector in vectors]
    kind = {name: given[name] for name in ("centered", "eps", "offset")}

    def add(program: Program, values: Sequence[int], known: Known) -> list[int]:
        left = iter(vectors)
        weight = known[next(left)] if given["weighted"] else None
        bias = known[next(left)] if given["biased"] else None
        return [program.norm(values[0], weight, bias, **kind)]

    return RowOperation(_aval(x).shape[0], (x,), add)


def _rotate(eqn: JaxprEqn) -> RowOperation:
    given = _attributes(eqn)
    size, adjacent = int(given["size"]), bool(given["adjacent"])

    def add(program: Program, values: Sequence[int], _: Known) -> list[int]:
        return [program.rotate(*values, size=size, adjacent=adjacent)]

    return RowOperation(_aval(eqn.invars[0]).shape[0], tuple(eqn.invars), add)


def _reshape(
    eqn: JaxprEqn, makers: Mapping[Any, JaxprEqn], found: Mapping[int, RowOperation]
) -> RowOperation | None:
    """Of what such an operation gives, if its rows stay the same."""
    x, shape = eqn.invars[0], _aval(eqn.outvars[0]).shape
    maker = found.get(id(makers.get(x)))
    if maker is None or _aval(x).shape[-1:] != shape[-1:] or not shape:
        return None
    return RowOperation(maker.rows, (x,), lambda _, values, __: [values[0]], moves=True)


def _add(eqn: JaxprEqn, makers: Mapping[Any, JaxprEqn]) -> RowOperation | None:
    shape = _aval(eqn.outvars[0]).shape
    if len(shape) < 2:
        return None
    rows = math.prod(shape[:-1])
    a, b = eqn.invars
    for x, other in ((a, b), (b, a)):
        vector = _repeated(other, shape, makers)
        if vector is not None and _aval(x).shape == shape:

            def add_vector(
                program: Program, values: Sequence[int], known: Known, vector: Any = vector
            ) -> list[int]:
                return [program.add_vector(values[0], known[vector])]

            return RowOperation(rows, (x,), add_vector)
    if any(_aval(atom).shape != shape for atom in (a, b)):
        return None
    return RowOperation(rows, (a, b), lambda program, values, _: [program.add(*values)])


def _scale(eqn: JaxprEqn) -> RowOperation | None:
    """Of a matrix by a number that is known."""
    for x, by in (eqn.invars, eqn.invars[::-1]):
        shape = _aval(x).shape
        if isinstance(by, Literal) and _aval(by).shape == () and len(shape) > 1:
            factor = float(by.val)

            def add(
                program: Program, values: Sequence[int], _: Known, factor: float = factor
            ) -> list[int]:
                return [program.scale(values[0], factor)]

            return RowOperation(math.prod(shape[:-1]), (x,), add)
    return None


def _repeated(atom: Any, shape: tuple[int, ...], makers: Mapping[Any, JaxprEqn]) -> Var | None:
    """The vector that an operand is in each row of a matrix, if that is what it is."""
    if isinstance(atom, Literal):
        return None
    maker, size = makers.get(atom), shape[-1:]
    if _aval(atom).shape != shape:
        vector = atom
    elif maker is not None and maker.primitive.name == "broadcast_in_dim":
        (vector, *_), axes = maker.invars, maker.params["broadcast_dimensions"]
        if isinstance(vector, Literal) or axes[-1:] != (len(shape) - 1,):
            return None
    else:
        return None
    own = _aval(vector).shape
    return vector if own[-1:] == size and math.prod(own) == size[0] else None


def _as_stored(vector: Any, makers: Mapping[Any, JaxprEqn]) -> Any:
    """What a vector was before it was given an axis of one: a weight, if it is stored like that."""
    maker = makers.get(vector)
    if maker is None or maker.primitive.name not in ("reshape", "broadcast_in_dim"):
        return vector
    stored = maker.invars[0]
    same = math.prod(_aval(stored).shape) == math.prod(_aval(vector).shape)
    return stored if same and not isinstance(stored, Literal) else vector


def _attributes(eqn: JaxprEqn) -> dict[str, Any]:
    attributes = dict(eqn.params["attributes"])
    return {name: getattr(value, "val", value) for name, value in attributes.items()}


def _aval(atom: Any) -> Any:
    return atom.aval
