"""Jaxpr walking: a traced function flattened into a list of operations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "custom_jvp_call": "call_jaxpr"}


def value(atom: Any, known: Mapping[Any, Any]) -> Any:
    """Returns the array of a variable or a literal."""
    return atom.val if isinstance(atom, Literal) else known[atom]


def evaluate(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Computes the results of an equation."""
    bound: Any = eqn.primitive.get_bind_params(eqn.params)
    # Before JAX 0.12 functions among the parameters were returned separately.
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    out = eqn.primitive.bind(*functions, *operands, **params)
    return list(out if eqn.primitive.multiple_results else [out])


class JaxprValue:
    """One result of one operation: a function called twice reuses its jaxpr variables."""

    __slots__ = ("aval",)

    def __init__(self, aval: Any) -> None:
        self.aval = aval


type Operand = JaxprValue | Any  # or a `Literal`


class JaxprOperation:
    """A jaxpr equation with its operands and results.

    Attributes:
        eqn: what is computed.
        operands: values of other operations, or literals.
        results: the values that it computes.
    """

    def __init__(self, eqn: JaxprEqn, operands: Sequence[Operand]) -> None:
        self.eqn, self.operands = eqn, tuple(operands)
        self.results = tuple(JaxprValue(var.aval) for var in eqn.outvars)

    @property
    def name(self) -> str:
        """Name of the primitive."""
        return str(self.eqn.primitive.name)


def flatten_jaxpr(
    closed: Any, inputs: Sequence[Operand], constants: dict[JaxprValue, Any]
) -> tuple[list[JaxprOperation], list[Operand]]:
    """Returns the operations of a traced function, with calls inlined, and its results.

    Args:
        inputs: the function's arguments.
        constants: receives its constants.
    """
    found: list[JaxprOperation] = []
    outs = list(_walk(closed, inputs, constants, found))
    return found, outs


def _walk(
    closed: Any,
    inputs: Sequence[Operand],
    constants: dict[JaxprValue, Any],
    found: list[JaxprOperation],
) -> Iterator[Operand]:
    jaxpr = closed.jaxpr
    slots: dict[Any, Operand] = dict(zip(jaxpr.invars, inputs, strict=True))
    for var, constant in zip(jaxpr.constvars, closed.consts, strict=True):
        slots[var] = slot = JaxprValue(var.aval)
        constants[slot] = constant
    for eqn in jaxpr.eqns:
        operands = [a if isinstance(a, Literal) else slots[a] for a in eqn.invars]
        if (inner := _CALLS.get(eqn.primitive.name)) is not None:
            results = list(_walk(eqn.params[inner], operands, constants, found))
        else:
            found.append(JaxprOperation(eqn, operands))
            results = list(found[-1].results)
        slots |= dict(zip(eqn.outvars, results, strict=True))
    return (a if isinstance(a, Literal) else slots[a] for a in jaxpr.outvars)
