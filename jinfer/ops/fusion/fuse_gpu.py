"""Operator fusion on GPUs: what stands before a matmul is computed by the kernel of its prologue.

Norms, residual sums and gates are computed of each row by itself; so are the power of two that a
product's x is divided by, and its order (`matmul.prologue`). As XLA's operations they
are three to five kernels a product, which for small models take longer than reading its weights.
So a traced function is rewritten, whatever its wiring: row-wise operations wait until they are
needed. Where that is a product they become part of one kernel with its rounding, which adds up the
parts of the product before it, and what others need of them comes out of it too. In the same way
new keys and values are written to the cache by one kernel that makes them. Other users get them
from XLA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Literal

from jinfer.ops.backend import interpreted
from jinfer.ops.fusion.fuse_gpu_rules import MOVES, REDUCE, Rows, keeps, waits
from jinfer.ops.fusion.jaxpr_walk import Operand, Operation, Slot, evaluate, operations

if TYPE_CHECKING:
    from kernels_pallas.attention.write_kv import Heads
    from kernels_pallas.matmul.prologue import Compute, Prepared, Reductions

_MOST = 24  # operands of a kernel
# Superblocks of a long row: computed apart, as one program takes 5 us for 14 of them, 1.5 for 4.
_LONG = 8


def prepared[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """The same function with such kernels."""

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        flat, tree = jax.tree.flatten((args, kwargs))

        def of_flat(*leaves: Any) -> R:
            given, named = jax.tree.unflatten(tree, leaves)
            return function(*given, **named)

        traced, shape = jax.make_jaxpr(of_flat, return_shape=True)(*flat)
        return jax.tree.unflatten(jax.tree.structure(shape), _Evaluation(traced, flat).results())

    return run


class _Evaluation:
    """A function's operations, one after the other."""

    def __init__(self, traced: Any, args: Sequence[Array]) -> None:
        self._known: dict[Slot, Any] = {}
        inputs = [Slot(var.aval) for var in traced.jaxpr.invars]
        found, self._outs = operations(traced, inputs, self._known)
        self._known |= dict(zip(inputs, args, strict=True))
        self._makers: dict[Slot, Operation] = {}  # of what waits
        self._parts: dict[Slot, Array] = {}  # [split, rows, width] that add up to a result
        self._prepared: dict[tuple[Slot, Any], Prepared] = {}
        self._operations, self._users = found, dict[Slot, set[Operation]]()
        for operation in found:
            self._note_users(operation)

    def results(self) -> list[Array]:
        """What the function gives."""
        for operation in self._operations:
            if operation.name == "packed_product":
                self._multiply(operation)
            elif operation.name == "enter_cache":
                self._enter(operation)
            elif waits(operation):
                self._makers |= dict.fromkeys(operation.results, operation)
            else:
                self._run(operation)
        return [self._value(out) for out in self._outs]

    def _note_users(self, operation: Operation) -> None:
        for operand in operation.operands:
            if isinstance(operand, Slot):
                self._users.setdefault(operand, set()).add(operation)

    def _value(self, operand: Operand) -> Any:
        """An array, by XLA if nobody has computed it yet."""
        if isinstance(operand, Literal):
            return operand.val
        if operand not in self._known:
            if operand in self._parts:
                self._known[operand] = jnp.sum(self._parts[operand], axis=0)
            else:
                self._run(self._makers[operand])
        return self._known[operand]

    def _run(self, operation: Operation) -> None:
        out = evaluate(operation.eqn, [self._value(operand) for operand in operation.operands])
        self._known |= dict(zip(operation.results, out, strict=True))

    def _multiply(self, operation: Operation) -> None:
        """A product: its results in parts, where the kernels take its rows together."""
        from kernels_pallas.matmul.quantized import product_parts, shares

        x, *leaves = operation.operands
        params = operation.eqn.params
        matrices, index = jax.tree.unflatten(params["tree"], map(self._value, leaves))
        rows, width = x.aval.shape
        if rows == width or width == 1 or not isinstance(x, Slot) or not shares(matrices):
            self._run(operation)
            return
        given = self._prepare(x, matrices, interpret=params["interpret"])
        parts = product_parts(given, matrices, index=index, interpret=params["interpret"])
        if params["gated"]:
            self._combine(parts, operation)
        else:
            self._parts |= dict(zip(operation.results, parts, strict=True))

    def _combine(self, parts: Sequence[Array], operation: Operation) -> None:
        """Gate and up with their product, which waits."""
        (out,) = operation.results
        traced = jax.make_jaxpr(lambda gate, up: jax.nn.silu(gate) * up)(*[out.aval] * 2)
        both = [Slot(out.aval) for _ in parts]
        self._parts |= dict(zip(both, parts, strict=True))
        found, (result,) = operations(traced, both, self._known)
        for one in found:
            if result in one.results:
                one.results = operation.results
            self._note_users(one)
            self._makers |= dict.fromkeys(one.results, one)

    def _prepare(self, x: Slot, matrices: Sequence[Any], *, interpret: bool) -> Prepared:
        """The rows of x for these matrices, once for all products that read them."""
        from kernels_pallas.matmul.grid import SMALL_ROWS
        from kernels_pallas.matmul.prologue import prepare

        rows, width = x.aval.shape
        key = self._root(x), (matrices[0].per_code, matrices[0].superblocks)
        if key in self._prepared:
            return self._prepared[key]
        cone = _Cone(Rows(rows, width), self)
        cone.add(x)
        if len(cone.leaves) > _MOST:
            cone = _Cone(Rows(rows, width), self)
            self._value(x)
            cone.add(x)
        wanted = [slot for slot in cone.inside if self._is_wanted(slot, cone)]
        # Tiles of more rows have no registers for a superblock's sum beside that of the row.
        apart = rows <= SMALL_ROWS and matrices[0].superblocks >= _LONG
        given, others = prepare(
            cone.operands(),
            cone.compute([x, *wanted]),
            rows,
            matrices[0],
            [slot.aval.dtype for slot in wanted],
            apart=apart and not any(operation.name in REDUCE for operation in cone.operations),
            interpret=interpret,
        )
        for slot, other in zip(wanted, others, strict=True):
            self._known[slot] = other.reshape(slot.aval.shape)
        self._prepared[key] = given
        return given

    def _enter(self, operation: Operation) -> None:
        """New tokens in the cache: their vectors are summed, rotated and written by one kernel."""
        from kernels_pallas.attention.write_kv import Places, enter

        q, k, v, keys, values, *at = operation.operands
        results = enter(
            self._heads(q),
            self._heads(k),
            self._heads(v),
            self._value(keys),
            self._value(values),
            Places(*map(self._value, at)),
            interpret=interpreted(),
        )
        self._known |= dict(zip(operation.results, results, strict=True))

    def _heads(self, vectors: Operand) -> Heads:
        """What the kernel makes queries, keys or values from."""
        from kernels_pallas.attention.write_kv import Heads, Rotation
        from kernels_pallas.matmul.prologue import Operand as RowOperand
        from kernels_pallas.matmul.prologue import alone

        assert isinstance(vectors, Slot)
        tokens, heads, size = vectors.aval.shape
        x, rotation = self._root(vectors), None
        if (maker := self._makers.get(x)) is not None and maker.name == "rotate":
            base, *turn = maker.operands
            assert isinstance(base, Slot)
            cos, sin = (self._value(part).reshape(tokens, -1) for part in turn)
            x, rotation = base, Rotation(cos, sin, maker.eqn.params["adjacent"])
        rows = Rows(tokens, heads * size)
        if rows.kind(x.aval) != "full" or rows.number == rows.width:
            operands = [RowOperand(self._value(x), "full")]
            return Heads(operands, alone, heads, size, rotation, vectors.aval.dtype)
        cone = _Cone(rows, self, reduces=False)
        cone.add(x)
        given = cone.operands(), cone.compute([x])
        return Heads(*given, heads, size, rotation, vectors.aval.dtype)

    def _root(self, x: Slot) -> Slot:
        """What x is, in another shape or a wider type."""
        while (maker := self._makers.get(x)) is not None and keeps(maker):
            (x,) = (operand for operand in maker.operands if isinstance(operand, Slot))
        return x

    def _is_wanted(self, slot: Slot, cone: _Cone) -> bool:
        """Whether others than the kernel need what is computed in it."""
        if keeps(self._makers[slot]) or cone.rows.kind(slot.aval) != "full":
            return False
        return self._is_given_on(slot, cone)

    def _is_given_on(self, slot: Slot, cone: _Cone) -> bool:
        """Whether others need an array, perhaps in another shape or a wider type."""
        for user in self._users.get(slot, ()):
            inside = user in cone.operations
            if not inside or (keeps(user) and self._is_given_on(user.results[0], cone)):
                return True
        return slot in self._outs


class _Cone:
    """What an array is computed from, as far as that is done row by row."""

    def __init__(self, rows: Rows, evaluation: _Evaluation, *, reduces: bool = True) -> None:
        self.rows, self._reduces = rows, reduces
        self.leaves: list[Slot] = []
        self.inside: list[Slot] = []  # in the order in which they can be computed
        self.operations: set[Operation] = set()
        self._evaluation = evaluation

    def add(self, slot: Slot) -> None:
        """Puts an array into it, and all that it is computed from."""
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
            if isinstance(operand, Slot):
                self.add(operand)
        self.inside.append(slot)
        self.operations.add(maker)

    def _takes(self, maker: Operation) -> bool:
        return (self._reduces or maker.name not in REDUCE) and self.rows.takes(maker)

    def operands(self) -> list[Any]:
        """Its leaves as the kernel takes them."""
        from kernels_pallas.matmul.prologue import Operand

        known, parts = self._evaluation._known, self._evaluation._parts
        found = []
        for leaf in self.leaves:
            kind = self.rows.kind(leaf.aval)
            assert kind is not None, "only what is something to the rows is taken"
            here = leaf in known
            found.append(Operand(known[leaf], kind) if here else Operand(parts[leaf], "parts"))
        return found

    def compute(self, wanted: Sequence[Slot]) -> Compute:
        """The function from the leaves to some of its arrays."""
        makers = [self._evaluation._makers[slot] for slot in self.inside]
        return partial(_compute, tuple(self.leaves), tuple(makers), tuple(wanted))


def _compute(
    leaves: Sequence[Slot],
    makers: Sequence[Operation],
    wanted: Sequence[Slot],
    values: Sequence[Array],
    reductions: Reductions,
) -> list[Array]:
    known: dict[Slot, Any] = dict(zip(leaves, values, strict=True))

    def value(operand: Operand) -> Any:
        return operand.val if isinstance(operand, Literal) else known[operand]

    for maker in makers:
        operands = [value(operand) for operand in maker.operands]
        (result,) = maker.results
        if maker.name in REDUCE:
            known[result] = getattr(reductions, REDUCE[maker.name])(operands[0])
        elif maker.name in MOVES:
            known[result] = operands[0]
        else:
            known[result] = _elementwise(maker, operands)
    return [known[slot] for slot in wanted]


def _elementwise(maker: Operation, operands: Sequence[Any]) -> Array:
    """With operands as large as the largest one: kernels have no others."""
    shape = jnp.broadcast_shapes(*(jnp.shape(operand) for operand in operands))
    full = [
        jnp.broadcast_to(jnp.asarray(operand, known.aval.dtype), shape)
        for operand, known in zip(operands, maker.operands, strict=True)
    ]
    return evaluate(maker.eqn, full)[0]
