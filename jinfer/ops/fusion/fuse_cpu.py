"""Operator fusion on CPUs: layers' operations become one custom call; for GPUs see `fuse_gpu`.

A layer consists of norms, matmuls, sums and rotations of the same rows, and attention. As separate
calls each has a fixed cost, and threads are woken anew for every matmul. So a traced function
(jaxpr) is rewritten: operations with nothing else between them become one call
(`cpu.fused_layers`), whatever their wiring, across layers where possible. Results stay the same to
the bit.

The steps: flatten the jaxpr (`jaxpr_walk`), deduplicate shape changes, eliminate dead code, assign
each operation a level, group fusible operations (`fuse_cpu_rules`) of one level and row count, and
emit a `Program` per group. What remains is computed in loops of XLA, which may contract a product
and a sum into a fused multiply-add or not, depending on the number of rows: see `rounded`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jinfer.cpu import fused_layers as cpu
from jinfer.ops import gpu_backend
from jinfer.ops.activation import activate
from jinfer.ops.backend import has_cpu_calls
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

# Primitives of which XLA's loops contract something, and the activations that they are without XLA.
_PRODUCTS = frozenset({"mul", "div", "integer_pow", "square", "sqrt"})
_FUNCTIONS = {name: name for name in ("exp", "expm1", "log1p", "tanh")} | {"logistic": "sigmoid"}
_LEAST_OPERATIONS = 2  # operations that make a fused call worthwhile


def fuse_operations[**P, R](
    function: Callable[P, R], told: WeightPointers | None = None
) -> Callable[P, R]:
    """The same function with its operations fused, where the CPU has custom calls.

    On a GPU they are fused into the prologue kernels of matmuls (`fuse_for_gpu`).

    The function stays as it is while calibration statistics are recorded, which mutates arrays on
    the way, and under `jax.disable_jit`, which is for debugging.

    Args:
        told: pointers of the weights that are the first of the given arrays: the calls read them by
            pointer instead of taking them as operands.
    """

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _stays_unfused(args, kwargs) and gpu_backend.fuses_prologue():
            return fuse_for_gpu(function)(*args, **kwargs)
        if not fuses_for_cpu(args, kwargs):
            return function(*args, **kwargs)
        return FusedFunction(partial(function, **kwargs), args, told).results()

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
        self, function: Callable[..., R], args: Sequence[Any], told: WeightPointers | None = None
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
        table, rows = (None, {}) if told is None else (told.table, told.of(flat))
        self._program = partial(cpu.Program, table=table, table_rows=rows)
        found, self._outs = _deduplicate_reshapes(found, self._outs)
        found = _eliminate_dead_code(found, self._outs)
        self._plan, self._users = _plan_groups(found), _users(found, self._outs)
        self.count = sum(map(self._is_worth_it, self._plan.groups.values()))

    def results(self) -> R:
        """The function's results."""
        plan, known = self._plan, self._known
        for level in sorted({*plan.others, *(row.level for row in plan.groups)}):
            groups = [group for row, group in plan.groups.items() if row.level == level]
            for group in groups:
                if self._is_worth_it(group):
                    known |= self._run(group)
            alone = [one for group in groups if not self._is_worth_it(group) for one in group]
            for operation in (*alone, *plan.others.get(level, ())):
                operands = [value(one, known) for one in operation.operands]
                results = _evaluated(operation, operands)
                known |= dict(zip(operation.results, results, strict=True))
        out: R = jax.tree.unflatten(self._tree, [value(out, known) for out in self._outs])
        return out

    def _is_worth_it(self, group: Sequence[JaxprOperation]) -> bool:
        rows = [self._plan.rows[operation] for operation in group]
        computing = sum(not row.moves for row in rows)
        return computing >= _LEAST_OPERATIONS and any(row.product for row in rows)

    def _run(self, group: Sequence[JaxprOperation]) -> dict[JaxprValue, Any]:
        """The results of a group that others need, computed in one call."""
        rows, known, inside = self._plan.rows, self._known, set(group)
        own = dict.fromkeys(result for operation in group for result in operation.results)
        given = dict.fromkeys(
            one for operation in group for one in rows[operation].operands if one not in own
        )
        count = rows[group[0]].rows
        program = self._program([known[one].reshape(count, -1) for one in given])
        values: dict[JaxprValue, int] = {one: number for number, one in enumerate(given)}
        for operation in group:
            row = rows[operation]
            out = row.add(program, [values[one] for one in row.operands], known)
            values |= dict(zip(operation.results, out, strict=True))
        wanted = [result for result in own if self._users[result] - inside]
        numbers = list(dict.fromkeys(values[result] for result in wanted))
        arrays = dict(zip(numbers, program.run(numbers), strict=True))
        return {one: arrays[values[one]].reshape(one.aval.shape) for one in wanted}


def _evaluated(operation: JaxprOperation, operands: Sequence[Any]) -> list[Any]:
    """The results of an operation in XLA, whose bits do not depend on the number of rows."""
    aval = operation.results[0].aval
    if operation.name in _FUNCTIONS and aval.dtype == jnp.float32 and aval.size and aval.shape:
        return [activate(_FUNCTIONS[operation.name], operands[0])]
    results = evaluate(operation.eqn, operands)
    if operation.name in _PRODUCTS and jnp.issubdtype(aval.dtype, jnp.floating):
        return [rounded(one) for one in results]
    return results


class _GroupKey(NamedTuple):
    """What the operations of a group share: level and number of rows."""

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
        operation.operands = tuple(same.get(id(one), one) for one in operation.operands)
        if operation.name in MOVES:
            # A literal is the same in each only where it is one object.
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
    wanted = {out for out in outs if isinstance(out, JaxprValue)}
    kept = []
    for operation in reversed(found):
        if operation.eqn.effects or not wanted.isdisjoint(operation.results):
            kept.append(operation)
            wanted |= {one for one in operation.operands if isinstance(one, JaxprValue)}
    return kept[::-1]


def _plan_groups(found: Sequence[JaxprOperation]) -> _FusionPlan:
    plan = _FusionPlan({}, defaultdict(list), defaultdict(list))
    makers: dict[JaxprValue, JaxprOperation] = {}
    levels: dict[JaxprOperation, int] = {}
    for operation in found:
        row = fusible_operation(operation, makers, plan.rows)
        level = 0
        for one in operation.operands:
            if (maker := producer_of(one, makers)) is None:
                continue
            before = plan.rows.get(maker)
            together = row is None or (
                before is not None
                and before.rows == row.rows
                and any(one is matrix for matrix in row.operands)
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
    """The operations that use each array; None: it is a result."""
    users: dict[JaxprValue, set[Any]] = defaultdict(set)
    for operation in found:
        for one in operation.operands:
            if isinstance(one, JaxprValue):
                users[one].add(operation)
    for out in outs:
        if isinstance(out, JaxprValue):
            users[out].add(None)
    return users
