"""Operator fusion rules on GPUs: which jaxpr operations are row-wise."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from jinfer.ops.fusion.jaxpr_walk import JaxprOperation

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

type Kind = Literal["full", "row", "vector", "one"]


def is_deferrable(operation: JaxprOperation) -> bool:
    """Whether it is cheap to compute later, or twice."""
    return operation.name in _ELEMENTWISE | MOVES | REDUCE.keys() | {"rotate"}


def preserves_values(operation: JaxprOperation) -> bool:
    """Whether its result is its operand reshaped or widened."""
    if operation.name == "convert_element_type":
        before, after = operation.operands[0].aval.dtype, operation.results[0].aval.dtype
        is_wider = after == jnp.float32 and jnp.issubdtype(before, jnp.floating)
        return bool(before == after or is_wider)
    return operation.name in MOVES - {"broadcast_in_dim"} and len(operation.operands) == 1


class RowMatrix(NamedTuple):
    """Shape of a matrix [number, width]; the two differ."""

    number: int
    width: int

    def kind(self, aval: Any) -> Kind | None:
        """How an array relates to the rows (`kernels_pallas.matmul.prologue.PrologueOperand`)."""
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
        self, kind: Kind | None, before: tuple[int, ...], after: tuple[int, ...], dims: Any
    ) -> bool:
        """Whether a broadcast keeps row numbers along rows and vectors along columns, in order."""
        last = {dim for size, dim in zip(before, dims, strict=True) if size > 1} & {len(after) - 1}
        if kind == "row":
            return not last and math.prod(after[:-1]) == self.number
        return kind == "one" or bool(last)


def _is_number(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.floating) or aval.dtype == jnp.bool_)
