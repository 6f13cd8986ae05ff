"""Operator fusion on GPUs: operations before a matmul become its prologue kernel.

Norms, residual sums and gates are row-wise; so are the power of two that scales a matmul's x to
fp16, and the order of x (`matmul.prologue`). As XLA operations they take several kernels per
matmul, which for small models cost more than reading its weights.

So a traced function (jaxpr) of any wiring is rewritten: row-wise operations are deferred until
their results are needed. A matmul computes them in one prologue kernel together with its rounding;
the kernel also adds up the partial sums of the preceding matmul and returns intermediate results
that other operations need. In the same way one kernel rotates new keys and values and writes them
to the cache. All other users get deferred results from XLA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend import core

from jinfer.ops.backend import interpreted
from jinfer.ops.fusion.jaxpr_walk import (
    JaxprOperation,
    JaxprValue,
    Operand,
    evaluate,
    flatten_jaxpr,
    value,
)

if TYPE_CHECKING:
    from kernels_pallas.attention.write_kv import HeadVectors
    from kernels_pallas.matmul.prologue import Compute, PreparedRows, Reductions

# Element-wise primitives that kernels support.
_ELEMENTWISE = {
    "abs", "add", "convert_element_type", "div", "eq", "exp", "exp2", "ge", "gt", "integer_pow",
    "le", "log", "logistic", "lt", "max", "min", "mul", "ne", "neg", "rsqrt", "select_n", "sqrt",
    "square", "sub", "tanh",
}  # fmt: skip
# Primitives that only change the shape.
MOVES = {"broadcast_in_dim", "expand_dims", "reshape", "squeeze"}
# Row reductions and their names in kernels.
REDUCE = {"reduce_sum": "sum", "reduce_max": "max"}

type OperandKind = Literal["full", "row", "vector", "one"]


def is_deferrable(operation: JaxprOperation) -> bool:
    """Whether an operation is cheap to compute later, or twice."""
    return operation.name in _ELEMENTWISE | MOVES | REDUCE.keys() | {"rotate"}


def preserves_values(operation: JaxprOperation) -> bool:
    """Whether an operation's result is its operand reshaped or widened."""
    if operation.name == "convert_element_type":
        before, after = operation.operands[0].aval.dtype, operation.results[0].aval.dtype
        is_wider = after == jnp.float32 and jnp.issubdtype(before, jnp.floating)
        return bool(before == after or is_wider)
    return operation.name in MOVES - {"broadcast_in_dim"} and len(operation.operands) == 1


class RowMatrix(NamedTuple):
    """Shape of a matrix [number, width]; the two differ."""

    number: int
    width: int

    def kind(self, aval: Any) -> OperandKind | None:
        """Returns the kind of an array (`kernels_pallas.matmul.prologue.PrologueOperand`)."""
        size, wide = math.prod(aval.shape), aval.shape[-1:] == (self.width,)
        if size == self.number * self.width:
            return "full" if wide else None
        if size == 1:
            return "one"
        if size == self.width and wide:
            return "vector"
        return "row" if size == self.number else None

    def takes(self, operation: JaxprOperation) -> bool:
        """Whether an operation is row-wise on operands of these kinds."""
        if operation.name == "rotate":
            return False
        (result,) = operation.results
        arrays = [result, *operation.operands]
        kinds = [self.kind(array.aval) for array in arrays]
        if None in kinds or not all(_is_number(array.aval) for array in arrays):
            return False
        before, after = arrays[1].aval, result.aval
        match operation.name:
            case "reduce_sum" | "reduce_max":
                return kinds[1] == "full" and operation.eqn.params["axes"] == (before.ndim - 1,)
            case "broadcast_in_dim":
                if len(operation.operands) > 1:
                    return False
                dims = operation.eqn.params["broadcast_dimensions"]
                return self._spreads(kinds[1], before.shape, after.shape, dims)
            case "reshape":
                return kinds[0] == kinds[1] and operation.eqn.params["dimensions"] is None
            case "expand_dims" | "squeeze":
                return kinds[0] == kinds[1]
        return True

    def _spreads(
        self, kind: OperandKind | None, before: tuple[int, ...], after: tuple[int, ...], dims: Any
    ) -> bool:
        """Whether a broadcast keeps row numbers along rows and vectors along columns, in order."""
        last = {dim for size, dim in zip(before, dims, strict=True) if size > 1} & {len(after) - 1}
        if kind == "row":
            return not last and math.prod(after[:-1]) == self.number
        return kind == "one" or bool(last)


def _is_number(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.floating) or aval.dtype == jnp.bool_)


_MAX_OPERANDS = 24  # max operands of a kernel
# Superblocks of a long row, which is split among several programs.
_LONG_ROW = 8


def fuse_for_gpu[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Returns the same function with prologue kernels."""

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        flat, tree = jax.tree.flatten((args, kwargs))

        def of_flat(*leaves: Any) -> R:
            given, named = jax.tree.unflatten(tree, leaves)
            return function(*given, **named)

        traced, shape = jax.make_jaxpr(of_flat, return_shape=True)(*flat)
        return jax.tree.unflatten(jax.tree.structure(shape), _Evaluator(traced, flat).results())

    return run


class _Evaluator:
    """Evaluates a function's operations in order, deferring row-wise ones."""

    def __init__(self, traced: Any, args: Sequence[Array]) -> None:
        self._known: dict[JaxprValue, Any] = {}
        inputs = [JaxprValue(var.aval) for var in traced.jaxpr.invars]
        found, self._outs = flatten_jaxpr(traced, inputs, self._known)
        self._known |= dict(zip(inputs, args, strict=True))
        self._makers: dict[JaxprValue, JaxprOperation] = {}  # producers of deferred arrays
        self._parts: dict[JaxprValue, Array] = {}  # partial sums [split, rows, width]
        self._prepared: dict[tuple[JaxprValue, Any], PreparedRows] = {}
        self._operations, self._users = found, dict[JaxprValue, set[JaxprOperation]]()
        for operation in found:
            self._note_users(operation)

    def results(self) -> list[Array]:
        """The function's results."""
        for operation in self._operations:
            if operation.name == "packed_product":
                self._multiply(operation)
            elif operation.name == "enter_cache":
                self._enter(operation)
            elif is_deferrable(operation):
                self._makers |= dict.fromkeys(operation.results, operation)
            else:
                self._run(operation)
        return [self._value(out) for out in self._outs]

    def _note_users(self, operation: JaxprOperation) -> None:
        for operand in operation.operands:
            if isinstance(operand, JaxprValue):
                self._users.setdefault(operand, set()).add(operation)

    def _value(self, operand: Operand) -> Any:
        """Returns an array; XLA computes it if it is still deferred."""
        if isinstance(operand, core.Literal):
            return operand.val
        if operand not in self._known:
            if operand in self._parts:
                sums = jnp.sum(self._parts[operand], axis=0)
                self._known[operand] = sums[: operand.aval.shape[0]]
            else:
                self._run(self._makers[operand])
        return self._known[operand]

    def _run(self, operation: JaxprOperation) -> None:
        out = evaluate(operation.eqn, [self._value(operand) for operand in operation.operands])
        self._known |= dict(zip(operation.results, out, strict=True))

    def _multiply(self, operation: JaxprOperation) -> None:
        """Runs a matmul; its results stay partial sums if one kernel computes all its matrices."""
        from kernels_pallas.matmul.quantized import matmul_partials, supports_partials

        x, *leaves = operation.operands
        params = operation.eqn.params
        matrices, index = jax.tree.unflatten(params["tree"], map(self._value, leaves))
        rows, width = x.aval.shape
        if (
            rows == width
            or width == 1
            or not isinstance(x, JaxprValue)
            or not supports_partials(matrices)
        ):
            self._run(operation)
            return
        given = self._prepare(x, matrices, interpret=params["interpret"])
        parts = matmul_partials(given, matrices, index=index, interpret=params["interpret"])
        sums = self._combine(operation) if params["gated"] else operation.results
        self._parts |= dict(zip(sums, parts, strict=True))

    def _combine(self, operation: JaxprOperation) -> list[JaxprValue]:
        """Defers the gated activation of gate and up; returns these two."""
        (out,) = operation.results
        traced = jax.make_jaxpr(lambda gate, up: jax.nn.silu(gate) * up)(*[out.aval] * 2)
        halves = [JaxprValue(out.aval) for _ in range(2)]
        found, (result,) = flatten_jaxpr(traced, halves, self._known)
        for inner in found:
            if result in inner.results:
                inner.results = operation.results
            self._note_users(inner)
            self._makers |= dict.fromkeys(inner.results, inner)
        return halves

    def _prepare(self, x: JaxprValue, matrices: Sequence[Any], *, interpret: bool) -> PreparedRows:
        """Returns the prologue's output for these matrices, shared by all matmuls that read x."""
        from kernels_pallas.matmul.grid import SMALL_ROWS
        from kernels_pallas.matmul.prologue import prepare_rows

        rows, width = x.aval.shape
        key = self._root(x), (matrices[0].per_code, matrices[0].superblocks)
        if key in self._prepared:
            return self._prepared[key]
        cone = _RowwiseSubgraph(RowMatrix(rows, width), self)
        cone.add(x)
        if len(cone.leaves) > _MAX_OPERANDS:
            cone = _RowwiseSubgraph(RowMatrix(rows, width), self)
            self._value(x)
            cone.add(x)
        outputs = self._wanted(cone)
        # Larger tiles lack registers for the sums of a superblock and of the row.
        apart = rows <= SMALL_ROWS and matrices[0].superblocks >= _LONG_ROW
        given, others = prepare_rows(
            cone.operands(),
            cone.compute([x, *outputs]),
            rows,
            matrices[0],
            [slot.aval.dtype for slot in outputs],
            apart=apart and not any(operation.name in REDUCE for operation in cone.operations),
            interpret=interpret,
        )
        for slot, other in zip(outputs, others, strict=True):
            self._known[slot] = other.reshape(slot.aval.shape)
        self._prepared[key] = given
        return given

    def _enter(self, operation: JaxprOperation) -> None:
        """Sums, rotates and writes new vectors to the KV cache in one kernel."""
        from kernels_pallas.attention.write_kv import WriteSlots, write_kv

        q, k, v, keys, values, *at = operation.operands
        results = write_kv(
            self._heads(q),
            self._heads(k),
            self._heads(v),
            self._value(keys),
            self._value(values),
            WriteSlots(*map(self._value, at)),
            interpret=interpreted(),
        )
        self._known |= dict(zip(operation.results, results, strict=True))

    def _heads(self, vectors: Operand) -> HeadVectors:
        """Returns the kernel's inputs for queries, keys or values."""
        from kernels_pallas.attention.write_kv import HeadVectors, Rotation
        from kernels_pallas.matmul.prologue import PrologueOperand as RowOperand
        from kernels_pallas.matmul.prologue import identity

        assert isinstance(vectors, JaxprValue)
        tokens, heads, size = vectors.aval.shape
        x, rotation = self._root(vectors), None
        if (maker := self._makers.get(x)) is not None and maker.name == "rotate":
            base, *turn = maker.operands
            assert isinstance(base, JaxprValue)
            cos, sin = (self._value(part).reshape(tokens, -1) for part in turn)
            x, rotation = base, Rotation(cos, sin, maker.eqn.params["adjacent"])
        rows = RowMatrix(tokens, heads * size)
        if rows.kind(x.aval) != "full" or rows.number == rows.width:
            operands = [RowOperand(self._value(x), "full")]
            return HeadVectors(operands, identity, heads, size, rotation, vectors.aval.dtype)
        cone = _RowwiseSubgraph(rows, self, reduces=False)
        cone.add(x)
        given = cone.operands(), cone.compute([x])
        return HeadVectors(*given, heads, size, rotation, vectors.aval.dtype)

    def _root(self, x: JaxprValue) -> JaxprValue:
        """Returns the array that x is reshaped or widened from."""
        while (maker := self._makers.get(x)) is not None and preserves_values(maker):
            (x,) = (operand for operand in maker.operands if isinstance(operand, JaxprValue))
        return x

    def _wanted(self, cone: _RowwiseSubgraph) -> list[JaxprValue]:
        """Returns the arrays computed inside a kernel that other operations need."""
        return [slot for slot in cone.inside if self._is_wanted(slot, cone)]

    def _is_wanted(self, slot: JaxprValue, cone: _RowwiseSubgraph) -> bool:
        """Whether anything outside the kernel needs an array computed inside it."""
        if preserves_values(self._makers[slot]) or cone.rows.kind(slot.aval) != "full":
            return False
        return self._is_given_on(slot, cone)

    def _is_given_on(self, slot: JaxprValue, cone: _RowwiseSubgraph) -> bool:
        """Whether anything else needs an array, perhaps reshaped or widened."""
        for user in self._users.get(slot, ()):
            inside = user in cone.operations
            if not inside or (preserves_values(user) and self._is_given_on(user.results[0], cone)):
                return True
        return slot in self._outs


class _RowwiseSubgraph:
    """The row-wise operations that an array is computed from."""

    def __init__(self, rows: RowMatrix, evaluation: _Evaluator, *, reduces: bool = True) -> None:
        self.rows, self._reduces = rows, reduces
        self.leaves: list[JaxprValue] = []
        self.inside: list[JaxprValue] = []  # in topological order
        self.operations: set[JaxprOperation] = set()
        self._evaluation = evaluation

    def add(self, slot: JaxprValue) -> None:
        """Adds an array and everything it is computed from."""
        if slot in self.leaves or slot in self.inside:
            return
        evaluation = self._evaluation
        maker = evaluation._makers.get(slot)
        if maker is None or slot in evaluation._known or not self._takes(maker):
            if slot not in evaluation._parts:
                evaluation._value(slot)
            self.leaves.append(slot)
            return
        for operand in maker.operands:
            if isinstance(operand, JaxprValue):
                self.add(operand)
        self.inside.append(slot)
        self.operations.add(maker)

    def _takes(self, maker: JaxprOperation) -> bool:
        return (self._reduces or maker.name not in REDUCE) and self.rows.takes(maker)

    def operands(self) -> list[Any]:
        """Returns the inputs as operands of the kernel."""
        from kernels_pallas.matmul.prologue import PrologueOperand

        return [PrologueOperand(*self.operand(leaf)) for leaf in self.leaves]

    def operand(self, leaf: JaxprValue) -> tuple[Array, Any]:
        """An input that is already computed, and its kind."""
        known, kind = self._evaluation._known, self.rows.kind(leaf.aval)
        assert kind is not None, "only operands of a row-wise kind are taken"
        return (known[leaf], kind) if leaf in known else (self._evaluation._parts[leaf], "parts")

    def compute(self, outputs: Sequence[JaxprValue]) -> Compute:
        """Returns a function from the inputs to some of the arrays."""
        makers = [self._evaluation._makers[slot] for slot in self.inside]
        return partial(_compute, tuple(self.leaves), tuple(makers), tuple(outputs))


def _compute(
    leaves: Sequence[JaxprValue],
    makers: Sequence[JaxprOperation],
    outputs: Sequence[JaxprValue],
    values: Sequence[Array],
    reductions: Reductions,
) -> list[Array]:
    known: dict[JaxprValue, Any] = dict(zip(leaves, values, strict=True))
    for maker in makers:
        operands = [value(operand, known) for operand in maker.operands]
        (result,) = maker.results
        if maker.name in REDUCE:
            known[result] = getattr(reductions, REDUCE[maker.name])(operands[0])
        elif maker.name in MOVES:
            known[result] = operands[0]
        else:
            known[result] = _elementwise(maker, operands)
    return [known[slot] for slot in outputs]


def _elementwise(maker: JaxprOperation, operands: Sequence[Any]) -> Array:
    """Evaluates an element-wise operation with its operands broadcast, as kernels need them."""
    shape = jnp.broadcast_shapes(*(jnp.shape(operand) for operand in operands))
    full = [
        jnp.broadcast_to(jnp.asarray(operand, known.aval.dtype), shape)
        for operand, known in zip(operands, maker.operands, strict=True)
    ]
    return evaluate(maker.eqn, full)[0]
