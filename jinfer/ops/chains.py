"""Puts together what is computed of each token by itself, on CPUs; for GPUs see `prepared`.

Between two attentions a layer is norms, products and sums of the same rows. As calls of their own
they cost a few microseconds each before they begin, and threads are gathered anew for every
product: a fifth of a decoding step of a small model. So a traced function is rewritten: those of
its operations that need nothing else in between become one call (`jinfer.cpu.chain`), whatever the
layer's wiring. The numbers stay the same to the bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.extend.core import JaxprEqn, Literal

from jinfer.cpu import chain as cpu
from jinfer.ops import kernels
from jinfer.ops.addresses import Table
from jinfer.ops.backend import backend
from jinfer.ops.equations import evaluate, value
from jinfer.ops.prepared import prepared
from jinfer.ops.row_operations import RowOperation, row_operation
from jinfer.quant.calibration import records

_LEAST = 2  # operations that are worth a chain


def chained[**P, R](function: Callable[P, R], table: Table | None = None) -> Callable[P, R]:
    """The same function, with such operations put together where the CPU has custom calls.

    On a GPU they become part of the kernels that round the rows of products (`prepared`).

    It stays as it is where something is recorded, which changes arrays on the way, and where JAX is
    told not to compile, as somebody wants to look at each step.

    Args:
        table: where those weights are that are the first of the arrays given: calls are told that
            instead of being given them.
    """

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        as_it_is = jax.config.jax_disable_jit or records((args, kwargs))
        if not as_it_is and kernels.prepares_rows():
            return prepared(function)(*args, **kwargs)
        if as_it_is or not (backend() == "cpu" and cpu.available()):
            return function(*args, **kwargs)
        flat, tree = jax.tree.flatten((args, kwargs))

        def of_flat(*leaves: Any) -> R:
            given, named = jax.tree.unflatten(tree, leaves)
            return function(*given, **named)

        traced, shape = jax.make_jaxpr(of_flat, return_shape=True)(*flat)
        return jax.tree.unflatten(jax.tree.structure(shape), _evaluate(traced, flat, table))

    return run


class _Row(NamedTuple):
    """What operations of a group have in common: their level and how many rows they are of."""

    level: int
    rows: int


class _Plan(NamedTuple):
    """A function's equations, in the order of levels: of each its groups first, then the others.

    A row operation's level is one above that of every other equation that it depends on, so that
    none of those can stand between two of the same level.
    """

    operations: dict[int, RowOperation]  # by the equation's id
    groups: dict[_Row, list[JaxprEqn]]
    others: dict[int, list[JaxprEqn]]


def _evaluate(traced: Any, args: Sequence[Array], table: Table | None) -> list[Array]:
    jaxpr = traced.jaxpr
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, traced.consts, strict=True))
    known |= dict(zip(jaxpr.invars, args, strict=True))
    weights = () if table is None else args[: len(table)]
    told = {id(one): row for row, one in enumerate(weights)}
    program = partial(cpu.Program, table=table, told=told)
    plan, users = _planned(jaxpr.eqns), _users(jaxpr.eqns, jaxpr.outvars)
    for level in sorted({*plan.others, *(row.level for row in plan.groups)}):
        for row, eqns in plan.groups.items():
            if row.level == level and _is_worth_it([plan.operations[id(eqn)] for eqn in eqns]):
                known |= _run(program, eqns, plan.operations, known, users)
            elif row.level == level:
                for eqn in eqns:
                    known |= _evaluate_one(eqn, known)
        for eqn in plan.others.get(level, ()):
            known |= _evaluate_one(eqn, known)
    return [value(atom, known) for atom in jaxpr.outvars]


def _planned(eqns: Sequence[JaxprEqn]) -> _Plan:
    plan = _Plan({}, defaultdict(list), defaultdict(list))
    makers: dict[Any, JaxprEqn] = {}
    levels: dict[int, int] = {}
    for eqn in eqns:
        before = [id(makers[a]) for a in eqn.invars if not isinstance(a, Literal) and a in makers]
        operation = row_operation(eqn, makers, plan.operations)
        if operation is None:
            level = max((levels[maker] for maker in before), default=-1)
            plan.others[level].append(eqn)
        else:
            above = (levels[maker] + (maker not in plan.operations) for maker in before)
            level = max(above, default=0)
            plan.operations[id(eqn)] = operation
            plan.groups[_Row(level, operation.rows)].append(eqn)
        levels[id(eqn)] = level
        makers |= dict.fromkeys(eqn.outvars, eqn)
    return plan


def _is_worth_it(operations: Sequence[RowOperation]) -> bool:
    computing = sum(not operation.moves for operation in operations)
    return computing >= _LEAST and any(operation.product for operation in operations)


def _users(eqns: Sequence[JaxprEqn], results: Sequence[Any]) -> dict[Any, set[int]]:
    """The equations, by id, that each variable is given to; 0: it is a result."""
    users: dict[Any, set[int]] = defaultdict(set)
    for eqn in eqns:
        for atom in eqn.invars:
            if not isinstance(atom, Literal):
                users[atom].add(id(eqn))
    for atom in results:
        if not isinstance(atom, Literal):
            users[atom].add(0)
    return users


def _evaluate_one(eqn: JaxprEqn, known: Mapping[Any, Any]) -> dict[Any, Any]:
    """The equation's results, computed as it says."""
    out = evaluate(eqn, [value(atom, known) for atom in eqn.invars])
    return dict(zip(eqn.outvars, out, strict=True))


def _run(
    new: Callable[..., cpu.Program],
    eqns: Sequence[JaxprEqn],
    operations: Mapping[int, RowOperation],
    known: Mapping[Any, Any],
    users: Mapping[Any, set[int]],
) -> dict[Any, Any]:
    """What a group of row operations gives to others, computed in one call."""
    inside = {id(eqn) for eqn in eqns}
    own = {var for eqn in eqns for var in eqn.outvars}
    given = dict.fromkeys(
        atom for eqn in eqns for atom in operations[id(eqn)].operands if atom not in own
    )
    rows = operations[id(eqns[0])].rows
    program = new([known[var].reshape(rows, -1) for var in given])
    values: dict[Any, int] = {var: number for number, var in enumerate(given)}
    for eqn in eqns:
        operation = operations[id(eqn)]
        out = operation.add(program, [values[atom] for atom in operation.operands], known)
        values |= dict(zip(eqn.outvars, out, strict=True))
    wanted = [var for eqn in eqns for var in eqn.outvars if users[var] - inside]
    numbers = list(dict.fromkeys(values[var] for var in wanted))
    arrays = dict(zip(numbers, program.run(numbers), strict=True))
    shapes: dict[Any, Any] = {var: var.aval for var in wanted}
    return {var: arrays[values[var]].reshape(shapes[var].shape) for var in wanted}
