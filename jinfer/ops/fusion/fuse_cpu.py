"""Operator fusion on CPUs: layers' operations become one custom call; for GPUs see `fuse_gpu`.

A layer consists of norms, matmuls, sums and rotations of the same rows, and attention. Separate
calls have a fixed cost each, and every matmul wakes threads. So a traced function (jaxpr) is
rewritten: adjacent fusible operations of any wiring become one call (`cpu.fused_layers`), across
layers if possible. Results stay the same to the bit.

The steps: flatten the jaxpr (`jaxpr_walk`), deduplicate shape changes, eliminate dead code, assign
each operation a level, group fusible operations (`fuse_cpu_rules`) of one level and row count, and
emit a `Program` per group. XLA computes the remaining operations in loops that may contract a
product and a sum into a fused multiply-add, depending on the number of rows: see `rounded`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jinfer.cpu import fused_layers as cpu
from jinfer.ops.activation import activate
from jinfer.ops.backend import fuses_prologue, has_cpu_calls
from jinfer.ops.fusion.fuse_cpu_rules import MOVES, FusibleOperation, fusible_operation, producer_of
from jinfer.ops.fusion.fuse_gpu import fuse_for_gpu
from jinfer.ops.fusion.jaxpr_walk import (
    JaxprOperation,
    JaxprValue,
    Operand,
    evaluate,
    flatten_jaxpr,
    value,
)
from jinfer.ops.fusion.weight_pointers import WeightPointers
from jinfer.ops.reductions import rounded
from jinfer.quant.calibration_stats import is_recording

# Primitives whose XLA loops contain contractions, and the activations that compute the same.
_PRODUCTS = frozenset({"mul", "div", "integer_pow", "square", "sqrt"})
_FUNCTIONS = {name: name for name in ("exp", "expm1", "log1p", "tanh")} | {"logistic": "sigmoid"}
_LEAST_OPERATIONS = 2  # operations that make a fused call worthwhile


def fuse_operations[**P, R](
    function: Callable[P, R], weight_pointers: WeightPointers | None = None
) -> Callable[P, R]:
    """Returns the same function with fused operations, where the CPU has custom calls.

    On a GPU they are fused into the prologue kernels of matmuls (`fuse_for_gpu`).

    The function is unchanged while calibration statistics are recorded, which mutates arrays, and
    under `jax.disable_jit`, which is for debugging.

    Args:
        weight_pointers: of the weights, which are the first arguments; fused calls read them by
            pointer instead of taking them as operands.
    """

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _stays_unfused(args, kwargs) and fuses_prologue():
            return fuse_for_gpu(function)(*args, **kwargs)
        if not fuses_for_cpu(args, kwargs):
            return function(*args, **kwargs)
        return FusedFunction(partial(function, **kwargs), args, weight_pointers).results()

    return run


def fuses_for_cpu(*arrays: Any) -> bool:
    """Whether functions of these arrays are fused into CPU custom calls."""
    return not _stays_unfused(*arrays) and has_cpu_calls()


def _stays_unfused(*arrays: Any) -> bool:
    return jax.config.jax_disable_jit or is_recording(arrays)


class FusedFunction[R]:
    """A traced function of some arrays, rewritten with fused calls.

    Attributes:
        count: number of fused calls.
    """

    def __init__(
        self,
        function: Callable[..., R],
        args: Sequence[Any],
        weight_pointers: WeightPointers | None = None,
    ) -> None:
        """Arguments as for `fuse_operations`."""
        flat, tree = jax.tree.flatten(tuple(args))
        traced, shape = jax.make_jaxpr(
            lambda *leaves: function(*jax.tree.unflatten(tree, leaves)), return_shape=True
        )(*flat)
        self._tree: Any = jax.tree.structure(shape)
        self._known: dict[JaxprValue, Any] = {}
        inputs = [JaxprValue(var.aval) for var in traced.jaxpr.invars]
        found, self._outs = flatten_jaxpr(traced, inputs, self._known)
        self._known |= dict(zip(inputs, flat, strict=True))
        table, rows = None, dict[int, int]()
        if weight_pointers is not None:
            table, rows = weight_pointers.table, weight_pointers.of(flat)
        self._program = partial(cpu.Program, table=table, table_rows=rows)
        found, self._outs = _deduplicate_reshapes(found, self._outs)
        found = _eliminate_dead_code(found, self._outs)
        self._plan, self._users = _plan_groups(found), _users(found, self._outs)
        self.count = sum(map(self._is_worth_it, self._plan.groups.values()))

    def results(self) -> R:
        """Computes the function's results."""
        plan, known = self._plan, self._known
        for level in sorted({*plan.others, *(row.level for row in plan.groups)}):
            groups = [group for row, group in plan.groups.items() if row.level == level]
            for group in groups:
                if self._is_worth_it(group):
                    known |= self._run(group)
            alone = [atom for group in groups if not self._is_worth_it(group) for atom in group]
            for operation in (*alone, *plan.others.get(level, ())):
                operands = [value(atom, known) for atom in operation.operands]
                results = _evaluated(operation, operands)
                known |= dict(zip(operation.results, results, strict=True))
        out: R = jax.tree.unflatten(self._tree, [value(out, known) for out in self._outs])
        return out

    def _is_worth_it(self, group: Sequence[JaxprOperation]) -> bool:
        rows = [self._plan.rows[operation] for operation in group]
        computing = sum(not row.moves for row in rows)
        return computing >= _LEAST_OPERATIONS and any(row.product for row in rows)

    def _run(self, group: Sequence[JaxprOperation]) -> dict[JaxprValue, Any]:
        """Computes a group in one call; returns its results that other operations need."""
        rows, known, inside = self._plan.rows, self._known, set(group)
        own = dict.fromkeys(result for operation in group for result in operation.results)
        operands = dict.fromkeys(
            atom for operation in group for atom in rows[operation].operands if atom not in own
        )
        count = rows[group[0]].rows
        program = self._program([known[atom].reshape(count, -1) for atom in operands])
        values: dict[JaxprValue, int] = {atom: number for number, atom in enumerate(operands)}
        for operation in group:
            row = rows[operation]
            out = row.add(program, [values[atom] for atom in row.operands], known)
            values |= dict(zip(operation.results, out, strict=True))
        outputs = [result for result in own if self._users[result] - inside]
        numbers = list(dict.fromkeys(values[result] for result in outputs))
        arrays = dict(zip(numbers, program.run(numbers), strict=True))
        return {atom: arrays[values[atom]].reshape(atom.aval.shape) for atom in outputs}


def _evaluated(operation: JaxprOperation, operands: Sequence[Any]) -> list[Any]:
    """Computes an operation in XLA with bits that do not depend on the number of rows."""
    aval = operation.results[0].aval
    if operation.name in _FUNCTIONS and aval.dtype == jnp.float32 and aval.size and aval.shape:
        return [activate(_FUNCTIONS[operation.name], operands[0])]
    results = evaluate(operation.eqn, operands)
    if operation.name in _PRODUCTS and jnp.issubdtype(aval.dtype, jnp.floating):
        return [rounded(atom) for atom in results]
    return results


class _GroupKey(NamedTuple):
    """Key of a group: the level and number of rows that its operations share."""

    level: int
    rows: int


class _FusionPlan(NamedTuple):
    """A function's operations by level: at each level its groups first, then the other operations.

    A fusible operation's level is one above that of everything it depends on outside its group, so
    that nothing it depends on can lie between two operations of the same level.
    """

    rows: dict[JaxprOperation, FusibleOperation]
    groups: dict[_GroupKey, list[JaxprOperation]]
    others: dict[int, list[JaxprOperation]]


def _deduplicate_reshapes(
    found: Sequence[JaxprOperation], outs: Sequence[Operand]
) -> tuple[list[JaxprOperation], list[Operand]]:
    """Common subexpression elimination of shape changes, such as those of token positions."""
    kept, same, known = list[JaxprOperation](), dict[Any, Operand](), dict[Any, JaxprOperation]()
    for operation in found:
        operation.operands = tuple(same.get(id(atom), atom) for atom in operation.operands)
        if operation.name in MOVES:
            # Equal literals are only recognized if they are the same object.
            key = str(operation.eqn.params), *map(id, operation.operands)
            before = known.setdefault(key, operation)
            if before is not operation:
                same |= zip(map(id, operation.results), before.results, strict=True)
                continue
        kept.append(operation)
    return kept, [same.get(id(out), out) for out in outs]


def _eliminate_dead_code(
    found: Sequence[JaxprOperation], outs: Sequence[Operand]
) -> list[JaxprOperation]:
    """Dead code elimination: XLA would drop unused operations, but nothing inside a fused call."""
    needed = {out for out in outs if isinstance(out, JaxprValue)}
    kept = []
    for operation in reversed(found):
        if operation.eqn.effects or not needed.isdisjoint(operation.results):
            kept.append(operation)
            needed |= {atom for atom in operation.operands if isinstance(atom, JaxprValue)}
    return kept[::-1]


def _plan_groups(found: Sequence[JaxprOperation]) -> _FusionPlan:
    plan = _FusionPlan({}, defaultdict(list), defaultdict(list))
    makers: dict[JaxprValue, JaxprOperation] = {}
    levels: dict[JaxprOperation, int] = {}
    for operation in found:
        row = fusible_operation(operation, makers, plan.rows)
        level = 0
        for atom in operation.operands:
            if (maker := producer_of(atom, makers)) is None:
                continue
            before = plan.rows.get(maker)
            together = row is None or (
                before is not None
                and before.rows == row.rows
                and any(atom is matrix for matrix in row.operands)
            )
            level = max(level, levels[maker] + (not together))
        if row is None:
            plan.others[level].append(operation)
        else:
            plan.rows[operation] = row
            plan.groups[_GroupKey(level, row.rows)].append(operation)
        levels[operation] = level
        makers |= dict.fromkeys(operation.results, operation)
    return plan


def _users(found: Sequence[JaxprOperation], outs: Sequence[Operand]) -> dict[JaxprValue, set[Any]]:
    """Returns the operations that use each array; None among them: it is a result."""
    users: dict[JaxprValue, set[Any]] = defaultdict(set)
    for operation in found:
        for atom in operation.operands:
            if isinstance(atom, JaxprValue):
                users[atom].add(operation)
    for out in outs:
        if isinstance(out, JaxprValue):
            users[out].add(None)
    return users
